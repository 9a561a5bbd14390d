"""Runs side by side: which of them repeat one experiment, their means and spreads, and the gain of CCFA.

`compare` gives the numbers. One table of them is printed and written as CSV, Markdown and LaTeX, and stands in a page.
"""

import inspect
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table as Screen

import ccfa
from ccfa.errors import CcfaError, ModelError, UsageError
from ccfa.evaluation import COSTS, DEFINITIONS, METRICS, SIZES, Report, mean_and_spread
from ccfa.experiments import Run
from ccfa.experiments.experiment import describe, preset
from ccfa.experiments.run_directory import differences, leaves, two_columns
from ccfa.experiments.tables import PaperSetting, Result, cell_for, cited_only
from ccfa.files import make_folder, read_file, write_atomically
from ccfa.methods import METHODS, Recipe
from ccfa.models import BACKBONES
from ccfa.options import decode, schema
from ccfa.reporting.charts import NUM_COLOURS, Curve, Figure, Point, line_figure, scatter_figure
from ccfa.reporting.page import render
from ccfa.reporting.tables import (
    Cell,
    Table,
    Value,
    cost_texts,
    counted,
    method_name,
    percent,
    plain,
    sentence,
    to_csv,
    to_latex,
    to_markdown,
)
from ccfa.settings import Experiment

AVERAGE = "average_incremental_accuracy"
COLUMNS = {name: metric.column for name, metric in METRICS.items() if metric.column}
GPU_MINUTES = "GPU minutes"
SURROUNDINGS = ("device", "runs at once", "precision", "ccfa", "commit", "torch")
PAGE = "index.html"
SPREAD = "mean ± sample standard deviation (n - 1) over class orders and seeds; the column 'runs' is n"
MEANINGS = {heading: DEFINITIONS[metric] for metric, heading in COLUMNS.items()} | {
    "gain": "average with CCFA minus without, in points, over pairs of runs of the same class order and seeds",
    "published": "the average that the paper prints for this setting, not measured here",
    **{cost.heading: cost.definition for cost in COSTS.values()},
    GPU_MINUTES: f"minutes divided by the number of runs that shared the device; {COSTS['minutes'].definition}",
}
MAX_NAME = 28  # letters of a name before it is folded
BETWEEN = 3  # spaces between columns of the terminal's table
FIELDS = ("memory", "memory_total", "image_size", "weights")  # of an experiment, named like options
LACKING = object()  # the value of an option that a method does not have
NOTED = ("epochs", "memory", "backbone")  # said where methods differ in them, also by their defaults
MAX_METHODS_IN_ONE_FIGURE = 4  # with and without CCFA that is as many lines as there are colours


def gather(paths: Sequence[Path | str]) -> tuple[list[Result], list[str]]:
    """Read the runs among run directories, folders of runs and report files; the notes name what is not a run."""
    if not paths:
        raise UsageError("Name at least one run directory.")
    runs: dict[Path, Path] = {}
    for run in itertools.chain.from_iterable(_runs_in(Path(path)) for path in paths):
        runs.setdefault(run.resolve(), run)  # a run that is named twice is counted once
    left_out = [run for run in runs.values() if run.suffix != ".json" and not (run / "report.json").is_file()]
    entries = [_read(run) for run in runs.values() if run not in left_out]
    if not entries:
        raise ModelError(f"No run with a finished stage among {_joined(paths)}: nothing to show.")
    notes = [f"left out, since they are not runs or have no finished stage: {_joined(left_out)}."]
    return entries, notes if left_out else []


def _runs_in(path: Path) -> list[Path]:
    if not path.exists():
        raise ModelError(f"{path} does not exist. Name run directories, folders of runs, or report files.")
    if not path.is_dir() or (path / "config.json").is_file():
        return [path]
    return sorted(file.parent for file in path.glob("[!.]*/config.json")) or [path]


def _read(path: Path) -> Result:
    try:
        report = Run(path).report() if path.is_dir() else Report.from_json(read_file(path).decode())
        result = Result(path, report)
        _ = result.experiment  # an error if it is none
        stages = np.cumsum(report.config["resolved"]["stage_sizes"]).tolist()
        if not report.num_seen or report.num_seen != stages[: len(report.num_seen)]:
            raise ModelError(f"it has {report.num_seen} classes seen, and its configuration {stages}.")
        return result
    except (KeyError, TypeError, ValueError, ModelError) as error:
        raise ModelError(f"{path} is not a whole report: {error} Leave it out, or run it again.") from error


def _joined(paths: Iterable[Path | str]) -> str:
    return ", ".join(map(str, paths))


def common_folder(entries: Sequence[Result]) -> Path:
    """Return `comparison` in the folder that holds all the runs, or in `runs` if there are report files."""
    if any(entry.path.suffix == ".json" for entry in entries):  # they may be part of a checkout
        return Path("runs/comparison")
    parents = [entry.path.parent for entry in entries]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.resolve() for parent in parents]
    return Path(os.path.commonpath(parents)) / "comparison"


def identity(entry: Result) -> dict[str, Any]:
    """Return everything that makes a run the experiment it is; class order and seeds are left out.

    The resolved method is compared, so that a default and the same value given as an option are the same experiment.
    """
    names = ("data", "validation", "image_size", "skip_bad", "recursive")
    given = {name: getattr(entry.experiment, name) for name in names}
    content = {**given, **entry.resolved, "class_names": sorted(entry.resolved["class_names"])}
    del content["class_order"]
    return content


def without_ccfa(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of the same experiment without CCFA."""
    method = content["method"]
    others = [part for part in method.get("feature_augmentations", ()) if part.get("part") != "CCFA"]
    return {**content, "method": {**method, "feature_augmentations": others}}


def setting(entry: Result) -> dict[str, Any]:
    """Return what all runs of a table must share."""
    return {
        "data": entry.experiment.data,
        "stage sizes": entry.resolved["stage_sizes"],
        "classes": sorted(entry.resolved["class_names"]),
        "held out": entry.experiment.validation,
        "training images": entry.resolved.get("num_training_images"),
        "test images": entry.resolved.get("num_test_images"),
    }


def grouped(entries: Sequence[Result], content: Callable[[Result], Mapping[str, Any]]) -> dict[str, list[Result]]:
    """Group runs of equal content: `setting`, or `identity` for those of one experiment."""
    groups: dict[str, list[Result]] = {}
    for entry in entries:
        groups.setdefault(_hashed(content(entry)), []).append(entry)
    return groups


def _hashed(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)


def paired(before: Sequence[Result], after: Sequence[Result]) -> list[float]:
    """Return what the averages of `after` gain over those of `before`, for runs of the same class order and seeds."""
    averages = {entry.key: entry.average for entry in after}
    return [averages[entry.key] - entry.average for entry in before if entry.key in averages]


@dataclass(frozen=True)
class Line:
    """One experiment: its finished runs, and the gain of CCFA in each pair of runs."""

    name: str
    entries: tuple[Result, ...]
    gains: tuple[float, ...] = ()

    @property
    def experiment(self) -> Experiment:
        """The experiment of the first run; the others differ in class order and seeds."""
        return self.entries[0].experiment

    @property
    def published(self) -> float | None:
        """The average that the paper prints for this experiment."""
        setting = self.entries[0].setting
        cell = cell_for(setting) if setting else None
        return cell.value if cell else None

    @property
    def gain(self) -> Value | None:
        """What CCFA adds to the average, over pairs of runs of the same class order and seeds."""
        return Value.of(self.gains, sign="+") if self.gains else None

    def value(self, metric: str) -> Value:
        """Return a metric in percent, by the method's own rule."""
        return Value.of([100 * entry.report.metrics[metric] for entry in self.entries])

    def cost(self, name: str) -> Value:
        """Return what a run costs on average; only the time has a spread, for equal networks are of equal size."""
        known = [value for entry in self.entries if math.isfinite(value := entry.report.costs[name])]
        mean, spread = mean_and_spread(known)
        return Value(mean, math.nan if name in SIZES else spread, COSTS[name].decimals)

    @property
    def memory(self) -> float:
        """The megabytes that are kept between stages; NaN if they are unknown."""
        return sum(self.cost(name).mean for name in SIZES)

    @property
    def curve(self) -> list[Value]:
        """The accuracy on seen classes after each stage, in percent."""
        stages = zip(*(entry.report.overall for entry in self.entries), strict=True)
        return [Value.of([100 * accuracy for accuracy in stage]) for stage in stages]


@dataclass(frozen=True)
class Comparison:
    """Experiments on one data set and scenario: what `ccfa compare` shows.

    `lines` has one entry per experiment. `unfinished` runs are in no mean. `notes` name runs that were left out, and
    what differs between runs that were averaged. Those of them that stand below every table and figure are `settings`:
    options in which methods differ, and options that all runs were given.
    """

    data: str
    scenario: str
    num_seen: list[int]
    lines: tuple[Line, ...]
    unfinished: tuple[Result, ...]
    notes: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.data} · {self.scenario}"

    @property
    def entries(self) -> list[Result]:
        """All runs, those of each line and the unfinished ones."""
        return [*(entry for line in self.lines for entry in line.entries), *self.unfinished]

    @property
    def cited(self) -> dict[str, float]:
        """The paper's values of methods that are not here, where others of its values are for the same memory."""

        def place(setting: PaperSetting | None) -> tuple[object, ...]:
            return (setting.data, setting.scenario, setting.memory) if setting else ()

        beside = {place(line.entries[0].setting) for line in self.lines if line.published is not None}
        rows = cited_only().items()
        return {name: cell.value for name, row in rows for cell in row if cell and place(cell.setting) in beside}


def compare(runs: Sequence[Path | str] | Path | str) -> Comparison:
    """Compare finished runs on one data set and scenario.

    Runs that differ only in class order and seeds are averaged. A method with CCFA is paired, run by run, with the same
    method without it.

    Args:
        runs: Run directories, folders of runs, or single report files.

    Returns:
        One line per experiment, with its mean and spread of each metric. `write_comparison` writes it as a page and
        as tables.

    Raises:
        ModelError: if there is no run, or a report is damaged.
        UsageError: if the runs are not of one data set and scenario.

    >>> comparison = compare(sorted(Path("results/cifar100-B50-inc10").glob("*-podnet-?-podnet-*seed1.json")))
    >>> for line in comparison.lines:
    ...     print(line.name, line.value("average_incremental_accuracy"), line.gain, line.published)
    podnet 65.46 ± 1.10 None 64.62
    podnet + CCFA 66.88 ± 1.28 +1.42 ± 0.18 67.24
    """
    return compare_entries(*gather([runs] if isinstance(runs, Path | str) else runs))


def compare_entries(entries: Sequence[Result], notes: Sequence[str] = ()) -> Comparison:
    """Compare runs that are read already, as `compare` does; the result's notes begin with the given ones."""
    _require_one_setting(entries)
    sizes, notes = entries[0].resolved["stage_sizes"], list(notes)
    finished = [entry for entry in entries if entry.report.finished]
    groups = [_distinct(group, notes) for group in grouped(finished, identity).values()]
    names = _names([group[0] for group in groups])
    lines = [Line(name, tuple(group)) for name, group in zip(names, groups, strict=True)]
    methods = list(dict.fromkeys(line.experiment.method for line in lines))
    lines.sort(key=lambda line: (methods.index(line.experiment.method), line.experiment.ccfa))
    lines = [_with_gain(line, lines, notes) for line in lines]
    unfinished = tuple(entry for entry in entries if not entry.report.finished)
    for entry in unfinished:
        done, last = len(entry.report.num_seen), 100 * entry.report.overall[-1]
        notes.append(
            f"{entry.path} is unfinished ({done} of {counted(len(sizes), 'stage')}, last accuracy {last:.2f}): "
            "on the page and in runs.csv, not averaged."
        )
    notes += _mixed([entry for line in lines for entry in line.entries])
    settings = tuple(_settings_notes([line.entries[0] for line in lines]))
    data, num_seen = entries[0].experiment.data, np.cumsum(sizes).tolist()
    return Comparison(data, scenario_name(sizes), num_seen, tuple(lines), unfinished, (*notes, *settings), settings)


def scenario_name(sizes: Sequence[int]) -> str:
    """Return the scenario of these stages, such as "B50-inc10", or the sizes themselves where no such name fits."""
    first, *later = sizes
    if not later or set(later[:-1]) - {later[0]} or later[-1] > later[0]:
        return ",".join(map(str, sizes))
    return f"B{0 if first == later[0] else first}-inc{later[0]}"


def _names(entries: Sequence[Result]) -> list[str]:
    """Name one run of each experiment by its method and by the options in which it differs from other runs."""
    short = [", ".join([method_name(entry.experiment), *_own_options(entry, entries)]) for entry in entries]
    contents, names = [dict(leaves(identity(entry))) for entry in entries], []
    for name, content in zip(short, contents, strict=True):
        alike = [other for one, other in zip(short, contents, strict=True) if one == name]
        # With the same options, the defaults of two versions may differ.
        names.append(name if len(alike) == 1 else ", ".join([name, *_differing(content, alike)[:2]]))
    return names


def _own_options(entry: Result, entries: Sequence[Result]) -> Iterator[str]:
    """Yield the given options in which other runs differ: of this method, or of another one that has the option."""
    for name, text in _choices(entry).items():
        value = _value(entry, name)
        if name in entry.experiment.options and value == _default(entry.experiment, name):
            continue
        for other in entries:
            of_another = other.experiment.method != entry.experiment.method
            if _value(other, name) != value and not (of_another and _value(other, name) is LACKING):
                yield f"{name}={text}"
                break


def _choices(entry: Result) -> dict[str, Any]:
    given = {name: getattr(entry.experiment, name) for name in FIELDS}
    return {name: value for name, value in given.items() if value is not None} | entry.experiment.options


def _value(entry: Result, name: str) -> Any:
    """Return an option's value in a run, given or by default; LACKING if the method has no such option."""
    experiment, text = entry.experiment, entry.experiment.options.get(name)
    if name == "memory" and (kept := entry.resolved["method"].get("memory")):  # by whichever option
        return f"{kept['total']} in all" if kept.get("total") else kept.get("per_class") or 0
    if text is None:
        default = getattr(experiment, name) if name in FIELDS else _default(experiment, name)
        return _stored(entry, name, default) if default in (LACKING, "default") else default
    kinds = schema(METHODS.get(experiment.method, Recipe))
    try:
        return decode(text, kinds[name]) if name in kinds else json.loads(text)
    except ValueError:  # a word, or of another version
        return text


def _stored(entry: Result, name: str, default: Any) -> Any:
    """Return an option of the recipe as config.json has it, for a method or a data set that is not registered here."""
    method = entry.resolved["method"]
    if name == "backbone":
        return next((one for one, builder in BACKBONES.items() if describe(builder) == method.get(name)), default)
    parts = dict(leaves(method))
    names = (path for path, value in parts.items() if path.endswith(".name") and value == "main")
    main = next(names, "").removesuffix("name")
    return parts.get(main + name, parts.get(f"transforms.{name}", default))


def _default(experiment: Experiment, name: str) -> Any:
    """Return the value of an option that is not given; LACKING if the method has no such option."""
    factory = METHODS.get(experiment.method)
    if factory and name in schema(factory):
        try:
            of_data = preset(experiment.method, experiment.data)
        except CcfaError:  # a data set that is not registered here
            return "default"
        return of_data.get(name, inspect.signature(factory).parameters[name].default)
    plugged_in = (experiment.ccfa and name.startswith("ccfa.")) or (experiment.mix and name.startswith("mix."))
    return "default" if plugged_in else LACKING


def _differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{name}={value}" for name, value in own.items() if any(other.get(name) != value for other in others)]


def _settings_notes(entries: Sequence[Result]) -> Iterator[str]:
    """Say in which options methods differ, and which options all runs were given that have them."""
    given = dict.fromkeys(name for entry in entries for name in entry.experiment.options)
    named = {text.partition("=")[0] for entry in entries for text in _own_options(entry, entries)}
    shared = []
    for name in dict.fromkeys([*NOTED, *given]):
        methods: dict[float | str, list[str]] = {}  # by value
        for entry in entries:
            if (value := _value(entry, name)) is not LACKING:
                is_word = value is None or isinstance(value, bool)  # as they are typed
                key = str(value).lower() if is_word else value if isinstance(value, int | float) else str(value)
                methods.setdefault(key, []).append(entry.experiment.method)
        if name in given and name not in named and len(methods) == 1:
            shared += [f"{name}={value}" for value in methods]
        elif len({frozenset(names) for names in methods.values()}) > 1:
            told = ", ".join(f"{value} ({', '.join(dict.fromkeys(names))})" for value, names in methods.items())
            yield f"between methods {name} differs: {told}."
    if shared:
        yield f"set for all runs that have the option: {', '.join(shared)}."


def _require_one_setting(entries: Sequence[Result]) -> None:
    kinds = list(grouped(entries, setting).values())
    if len(kinds) < 2:
        return
    first, second = kinds[0][0], kinds[1][0]
    changed = two_columns(differences(setting(first), setting(second)), str(first.path), str(second.path))
    apart = "\n".join(f"  {_joined(entry.path for entry in members)}" for members in kinds)
    raise UsageError(
        "These runs are not of one data set and scenario, so no table and no figure can hold them all:\n"
        f"{changed}\nName the runs of one kind alone:\n{apart}"
    )


def _distinct(group: Sequence[Result], notes: list[str]) -> list[Result]:
    """Keep one run for each class order and seed; further ones become notes."""
    kept: dict[Hashable, Result] = {}
    for entry in group:
        first = kept.setdefault(entry.key, entry)
        if first is not entry:
            notes.append(
                f"{entry.path} repeats {first.path} (same experiment, order and seeds; averages {first.average:.2f} "
                f"and {entry.average:.2f}): the first is counted, the second is not."
            )
    return list(kept.values())


def _with_gain(line: Line, lines: Sequence[Line], notes: list[str]) -> Line:
    """Pair the runs of a line with CCFA with those of the same experiment without it."""
    base = _hashed(without_ccfa(identity(line.entries[0])))
    alone = next((other for other in lines if _hashed(identity(other.entries[0])) == base), None)
    if not line.experiment.ccfa or alone is None:
        return line
    shared = {entry.key for entry in alone.entries} & {entry.key for entry in line.entries}
    unpaired = [entry.path for entry in (*alone.entries, *line.entries) if entry.key not in shared]
    if unpaired:
        notes.append(f"{line.name}: no pair of the same order and seeds, so not in the gain: {_joined(unpaired)}.")
    return replace(line, gains=tuple(paired(alone.entries, line.entries)))


def _mixed(entries: Sequence[Result]) -> Iterator[str]:
    """Name what differs between runs that may still be averaged and compared."""
    for rule in dict.fromkeys(entry.report.own for entry in entries):
        if rule != "logits":
            methods = dict.fromkeys(entry.experiment.method for entry in entries if entry.report.own == rule)
            yield f"{', '.join(methods)}: evaluated by {plain(rule)}, the method's own rule, not by logits."
    for name in SURROUNDINGS:
        counts = Counter(_surroundings(entry)[name] for entry in entries)
        if len(counts) > 1:
            told = ", ".join(f"{value} ({counted(num, 'run')})" for value, num in counts.most_common())
            yield f"{name} differs: {told}."


def _surroundings(entry: Result) -> dict[str, str]:
    environment = entry.report.environment
    facts = {**environment, **(environment.get("acceleration") or {}), "runs at once": environment.get("at_once", 1)}
    return {name: str(facts.get(name, "")) for name in SURROUNDINGS}


def summary_table(comparison: Comparison) -> Table:
    """Make one row per experiment; gains, published values and costs have columns only where there are any.

    Where runs differ in how many shared the device, GPU minutes stand for minutes.
    """
    rows: list[dict[str, Cell]] = []
    shares = {_surroundings(entry)["runs at once"] for line in comparison.lines for entry in line.entries}
    for line in comparison.lines:
        rows.append({"method": line.name, "runs": len(line.entries)})
        rows[-1] |= {heading: line.value(metric) for metric, heading in COLUMNS.items()}
        if line.gain:
            rows[-1] |= {"gain": line.gain, "pairs": len(line.gains)}
        costs = {COSTS[name].heading: line.cost(name) for name in COSTS}
        if len(shares) > 1:
            del costs["minutes"]
            costs[GPU_MINUTES] = Value.of([entry.gpu_minutes for entry in line.entries])
        rows[-1] |= {heading: cost for heading, cost in costs.items() if math.isfinite(cost.mean)}
        if line.published is not None:
            rows[-1]["published"] = f"{line.published:.2f}"
    for name, value in comparison.cited.items():
        rows.append({"method": f"{name} (published only)", "published": f"{value:.2f}"})
    average, *others = COLUMNS.values()
    known = {name for row in rows for name in row}
    optional = [name for name in ("gain", "pairs", "published") if name in known]
    last = [name for name in (*(cost.heading for cost in COSTS.values()), GPU_MINUTES) if name in known]
    headings = ["method", "runs", average, *optional, *others, *last]
    return Table(headings, [[row.get(heading, "") for heading in headings] for row in rows])


def runs_table(comparison: Comparison) -> Table:
    """Make one row per run, unfinished ones included."""
    facts = ["run", "experiment", "order", "seed", "batch seed", "stages"]
    named = [(line.name, entry) for line in comparison.lines for entry in line.entries]
    named += [("unfinished, not averaged", entry) for entry in comparison.unfinished]
    rows: list[list[Cell]] = []
    for name, entry in named:
        report, (order, seed, batch_seed) = entry.report, entry.key
        order_name = entry.experiment.order or "default"
        if len(order_name) > 24:
            order_name = ",".join(map(str, order[:4])) + ",..."
        stages = f"{len(report.num_seen)} of {len(comparison.num_seen)}"
        values = [percent(report.metrics[metric]) for metric in COLUMNS]
        last = [*cost_texts(report).values(), plain(report.own), *_surroundings(entry).values()]
        rows.append([str(entry.path), name, order_name, seed, batch_seed, stages, *values, *last])
    costs = [cost.heading for cost in COSTS.values()]
    return Table([*facts, *COLUMNS.values(), *costs, "rule", *SURROUNDINGS], rows)


def definitions(table: Table) -> list[str]:
    return [f"± : {SPREAD}", *(f"{name}: {MEANINGS[name]}" for name in table.headings if name in MEANINGS)]


def show_comparison(comparison: Comparison, folder: Path, console: Console) -> None:
    """Print a comparison, write its files, and print where they are."""
    if not comparison.lines:
        for note in comparison.notes:
            console.print(f"note: {note}", soft_wrap=True)
        names = _joined(entry.path for entry in comparison.unfinished)
        raise ModelError(f"No finished run among {names}: nothing to compare. Finish one with ccfa resume.")
    replaced = "replaced, " if (folder / PAGE).exists() else ""
    try:
        print_comparison(comparison, console)
    finally:  # the reader of the output, such as `head`, may have left
        page = write_comparison(comparison, folder)
    told = f"Comparison: {page} ({replaced}with table.csv, table.md, table.tex and runs.csv beside it)"
    console.print(told, soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, in parts where the terminal is narrow, the notes, and what the columns mean."""
    table = summary_table(comparison)
    console.print(f"percent · {comparison.title}", style="italic")
    for part in _parts(table, console.width):
        screen = Screen(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        screen.add_column(table.headings[0], overflow="fold", max_width=MAX_NAME)
        for place in part:
            screen.add_column(table.headings[place], justify="right", no_wrap=True)
        for row in table.rows:
            if any(row[place] != "" for place in part):
                screen.add_row(str(row[0]), *(str(row[place]) for place in part))
        console.print(screen)
        console.print()
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in definitions(table):
        console.print(line, style="dim")


def _parts(table: Table, width: int) -> list[list[int]]:
    """Divide the columns so that each part, with the names in front, fits into so many letters."""
    columns = zip(table.headings, *table.rows, strict=True)
    names, *sizes = (max(len(str(cell)) for cell in column) + BETWEEN for column in columns)
    parts: list[list[int]] = []
    used = width
    for place, size in enumerate(sizes, start=1):
        if used + size > width:
            parts.append([])
            used = min(names, MAX_NAME + BETWEEN)
        parts[-1].append(place)
        used += size
    return parts


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write a comparison into a folder, and return the path of the page.

    The files are index.html, table.csv, table.md, table.tex and runs.csv; those of an earlier comparison are replaced.
    """
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} is a run directory. Choose another folder for the comparison with --out.")
    make_folder(folder)
    table = summary_table(comparison)
    note = " ".join(
        [f"percent, except where a column has another unit; {SPREAD}.", *map(sentence, comparison.settings)]
    )
    write_atomically(folder / "table.csv", to_csv(table))
    write_atomically(folder / "table.md", to_markdown(table, comparison.title, note))
    write_atomically(folder / "table.tex", to_latex(table, comparison.title, note))
    write_atomically(folder / "runs.csv", to_csv(runs_table(comparison)))
    write_atomically(folder / PAGE, comparison_page(comparison, folder))
    return folder / PAGE


def comparison_page(comparison: Comparison, folder: Path | None = None) -> str:
    """Return the page; one that is written to a folder has links from there to the pages of the runs."""
    table, lines, num_seen = summary_table(comparison), comparison.lines, comparison.num_seen
    num_runs = sum(len(line.entries) for line in lines)
    return render(
        "comparison.html",
        comparison=comparison,
        lead=f"{counted(len(lines), 'experiment')}, {counted(num_runs, 'finished run')}, "
        f"{counted(len(num_seen), 'stage')}, {counted(num_seen[-1], 'class', 'es')}.",
        spread=SPREAD,
        summary=table,
        curves=_curves(comparison),
        memory=_memory(comparison),
        runs=_linked(runs_table(comparison), folder),
        definitions=definitions(table),
        footer=f"Written by ccfa {ccfa.__version__}.",
    )


def _linked(runs: Table, folder: Path | None) -> Table:
    """Make the names of runs that have a page links to it."""
    rows = []
    for path, *cells in runs.rows:
        page = Path(str(path), "report.html")
        if folder and page.is_file():
            address = quote(Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix())
            path = Markup('<a href="{}">{}</a>').format(address, path)
        rows.append([path, *cells])
    return Table(runs.headings, rows)


def _curves(comparison: Comparison) -> list[Figure]:
    """Draw all lines in one figure, or a figure for each method where there are many; all have the same scale."""
    methods: dict[str, list[Line]] = {}
    for line in comparison.lines:
        methods.setdefault(line.experiment.method, []).append(line)
    if len(methods) <= MAX_METHODS_IN_ONE_FIGURE and len(comparison.lines) <= NUM_COLOURS:
        methods = {"All methods": [*comparison.lines]} if methods else {}
    values = [edge for line in comparison.lines for value in line.curve for edge in _band(value)]
    return [_curve(comparison.num_seen, lines, title, values) for title, lines in methods.items()]


def _memory(comparison: Comparison) -> Figure:
    """Draw the average accuracy of each line over what it keeps between stages."""
    colours = families(line.name for line in comparison.lines)
    unknown = [line.name for line in comparison.lines if math.isnan(line.memory)]
    num = len(comparison.lines)
    title = f"{num - len(unknown)} of {num} experiments" if unknown else "All methods"
    points = [Point(line.name, line.memory, line.value(AVERAGE).mean, colours[line.name]) for line in comparison.lines]
    meaning = (
        "The average incremental accuracy over the megabytes that are kept between stages: the network, what the loss "
        "terms remember, and the exemplars. The horizontal axis is logarithmic."
    )
    meaning += f" Not shown, no sizes stored: {'; '.join(unknown)}." if unknown else ""
    return scatter_figure(title, meaning, "megabytes kept", "average accuracy, percent", points)


def families(names: Iterable[str]) -> dict[str, int]:
    """Number experiments by name; with and without CCFA they share a number, unless there is only one then.

    >>> families(["a", "a + CCFA", "b"]), families(["a", "a + CCFA"])
    ({'a': 0, 'a + CCFA': 0, 'b': 1}, {'a': 0, 'a + CCFA': 1})
    """
    alone = {name: name.replace(" + CCFA", "") for name in names}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(alone.values()))}
    if len(numbers) == 1:
        return {name: number for number, name in enumerate(alone)}
    return {name: numbers[family] for name, family in alone.items()}


def _curve(num_seen: list[int], lines: Sequence[Line], title: str, covered: Sequence[float]) -> Figure:
    colours = families(line.name for line in lines)
    both = len({line.experiment.ccfa for line in lines}) == 2
    curves = []
    for line in lines:
        values, banded = line.curve, line.curve if len(line.entries) > 1 else []
        curves.append(
            Curve(
                line.name,
                [value.mean for value in values],
                low=[_band(value)[0] for value in banded],
                high=[_band(value)[1] for value in banded],
                colour=colours[line.name],
                dashed=both and not line.experiment.ccfa,
            )
        )
    rows = [[line.name, str(len(line.entries)), *map(str, line.curve)] for line in lines]
    figure = line_figure(title, "", "classes seen", num_seen, curves, "accuracy, percent", "", 2, covered=covered)
    return figure._replace(table=Table(["method", "runs", *map(str, num_seen)], rows))


def _band(value: Value) -> tuple[float, float]:
    """Return one standard deviation to each side of an accuracy in percent; of a single run the accuracy itself."""
    spread = 0.0 if math.isnan(value.spread) else value.spread
    return max(value.mean - spread, 0.0), min(value.mean + spread, 100.0)
