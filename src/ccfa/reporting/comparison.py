"""Runs side by side: which of them repeat one experiment, their means and spreads, and the gain of CCFA."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import METRICS, Report
from ccfa.experiments import Run
from ccfa.experiments.experiment import experiment_of
from ccfa.experiments.run_directory import differences, leaves, two_columns
from ccfa.experiments.tables import Setting, cell_for, cited_only, setting_of
from ccfa.files import read_file
from ccfa.reporting.values import Value
from ccfa.settings import Experiment

AVERAGE = "average_incremental_accuracy"
COLUMNS = {name: metric.column for name, metric in METRICS.items() if metric.column}
SURROUNDINGS = ("device", "precision", "ccfa", "commit", "torch")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """A run: where it is and what came out."""

    path: Path
    report: Report

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment as it was given."""
        return experiment_of(self.report.config)

    @property
    def resolved(self) -> dict[str, Any]:
        """What the experiment resolved to: the method in full, stages, class order, sizes of the data."""
        return dict(self.report.config["resolved"])

    @property
    def key(self) -> tuple[tuple[int, ...], int, int]:
        """Class order and seeds: what differs between runs that are averaged."""
        seed, batch_seed = self.experiment.seed, self.experiment.batch_seed
        return tuple(self.resolved["class_order"]), seed, seed if batch_seed is None else batch_seed

    @property
    def average(self) -> float:
        """The average incremental accuracy in percent, by the method's own rule."""
        return 100 * self.report.metrics[AVERAGE]

    @property
    def surroundings(self) -> dict[str, str]:
        """Device, precision and versions."""
        facts = {**self.report.environment, **(self.report.environment.get("acceleration") or {})}
        return {name: str(facts.get(name, "")) for name in SURROUNDINGS}


def gather(paths: Sequence[Path | str], command: str = "ccfa compare") -> tuple[list[Entry], list[str]]:
    """Read the runs among run directories, folders of runs and report files; the notes name what is not a run."""
    if not paths:
        raise UsageError(f"Name at least one run directory, e.g. {command} runs/*")
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


def _read(path: Path) -> Entry:
    try:
        report = Run(path).report() if path.is_dir() else Report.from_json(read_file(path).decode())
        experiment_of(report.config)
        stages = np.cumsum(report.config["resolved"]["stage_sizes"]).tolist()
        if not report.num_seen or report.num_seen != stages[: len(report.num_seen)]:
            raise ModelError(f"it has {report.num_seen} classes seen, and its configuration {stages}.")
        return Entry(path, report)
    except (KeyError, TypeError, ValueError, ModelError) as error:
        raise ModelError(f"{path} is not a whole report: {error} Leave it out, or run it again.") from error


def _joined(paths: Iterable[Path | str]) -> str:
    return ", ".join(map(str, paths))


def common_folder(entries: Sequence[Entry]) -> Path:
    """Return `comparison` in the folder that holds all the runs."""
    parents = [entry.path.parent for entry in entries]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.resolve() for parent in parents]
    return Path(os.path.commonpath(parents)) / "comparison"


def identity(entry: Entry) -> dict[str, Any]:
    """Return everything that makes a run the experiment it is; class order and seeds are left out.

    The resolved method is compared, so that a default and the same value given as an option are the same experiment.
    """
    given = {name: getattr(entry.experiment, name) for name in ("data", "validation", "image_size", "skip_bad")}
    resolved = {name: value for name, value in entry.resolved.items() if name != "class_order"}
    return {**given, **resolved, "class_names": sorted(entry.resolved["class_names"])}


def without_ccfa(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of the same experiment without CCFA."""
    method = content["method"]
    others = [part for part in method.get("feature_augmentations", ()) if part.get("part") != "CCFA"]
    return {**content, "method": {**method, "feature_augmentations": others}}


def setting(entry: Entry) -> dict[str, Any]:
    """Return what all runs of a table must share."""
    return {
        "data": entry.experiment.data,
        "stage sizes": entry.resolved["stage_sizes"],
        "classes": sorted(entry.resolved["class_names"]),
        "held out": entry.experiment.validation,
        "training images": entry.resolved.get("num_training_images"),
        "test images": entry.resolved.get("num_test_images"),
    }


def grouped(entries: Sequence[Entry], content: Callable[[Entry], Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """Group runs of equal content: `setting`, or `identity` for those of one experiment."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_hashed(content(entry)), []).append(entry)
    return groups


def _hashed(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)


def paired(before: Mapping[_Key, float], after: Mapping[_Key, float]) -> list[float]:
    """Return the differences of the runs that both sides have, by class order and seeds.

    >>> paired({"seed 0": 60.0, "seed 1": 61.0}, {"seed 1": 63.0})
    [2.0]
    """
    return [after[key] - before[key] for key in before if key in after]


@dataclass(frozen=True)
class Line:
    """One experiment: its finished runs, the gain of CCFA in each pair of runs, and the paper's setting, if any."""

    name: str
    entries: tuple[Entry, ...]
    setting: Setting | None = None
    gains: tuple[float, ...] = ()

    @property
    def experiment(self) -> Experiment:
        """The experiment of the first run; the others differ in class order and seeds."""
        return self.entries[0].experiment

    @property
    def published(self) -> float | None:
        """The average that the paper prints for this experiment."""
        cell = cell_for(self.setting) if self.setting else None
        return cell.value if cell else None

    @property
    def gain(self) -> Value | None:
        """What CCFA adds to the average, over pairs of runs of the same class order and seeds."""
        return Value.of(self.gains, sign="+") if self.gains else None

    def value(self, metric: str) -> Value:
        """Return a metric in percent, by the method's own rule."""
        return Value.of([100 * entry.report.metrics[metric] for entry in self.entries])

    @property
    def seconds(self) -> Value:
        """How long a run took."""
        return Value.of([entry.report.seconds for entry in self.entries], decimals=0)

    @property
    def curve(self) -> list[Value]:
        """The accuracy on seen classes after each stage, in percent."""
        stages = zip(*(entry.report.overall for entry in self.entries), strict=True)
        return [Value.of([100 * accuracy for accuracy in stage]) for stage in stages]


@dataclass(frozen=True)
class Comparison:
    """Experiments on one data set and scenario: what `ccfa compare` shows.

    `lines` has one entry per experiment. `unfinished` runs are in no mean. `notes` name runs that were left out, and
    what differs between runs that were averaged.
    """

    data: str
    scenario: str
    num_seen: list[int]
    lines: tuple[Line, ...]
    unfinished: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """Data set and scenario."""
        return f"{self.data} · {self.scenario}"

    @property
    def entries(self) -> list[Entry]:
        """All runs, those of each line and the unfinished ones."""
        return [*(entry for line in self.lines for entry in line.entries), *self.unfinished]

    @property
    def cited(self) -> dict[str, float]:
        """The paper's values of methods that are not here, where others of its values are for the same memory."""

        def place(setting: Setting) -> tuple[object, ...]:
            return setting.data, setting.scenario, setting.memory

        beside = {place(line.setting) for line in self.lines if line.setting and line.published is not None}
        rows = cited_only().items()
        return {name: cell.value for name, row in rows for cell in row if cell and place(cell.setting) in beside}


def compare(runs: Sequence[Path | str]) -> Comparison:
    """Compare finished runs on one data set and scenario.

    Runs that differ only in class order and seeds are averaged. A method with CCFA is paired, run by run, with the same
    method without it.

    Args:
        runs: Run directories, folders of runs, or single report files.

    Returns:
        One line per experiment, with its mean and spread of each metric. `write_comparison` in
        `ccfa.reporting.comparison_page` writes it as a page and as tables.

    Raises:
        ModelError: if there is no run, or a report is damaged.
        UsageError: if the runs are not of one data set and scenario.

    >>> comparison = compare(sorted(Path("results/cifar100-B50-inc10").glob("*.json")))
    >>> for line in comparison.lines:
    ...     print(line.name, line.value("average_incremental_accuracy"), line.gain, line.published)
    podnet 65.46 ± 1.10 None 64.62
    podnet + CCFA 66.88 ± 1.28 +1.42 ± 0.18 67.24
    """
    return compare_entries(*gather(runs))


def compare_entries(entries: Sequence[Entry], notes: Sequence[str] = ()) -> Comparison:
    """Compare runs that are read already, as `compare` does; the result's notes begin with the given ones."""
    _require_one_setting(entries)
    sizes, notes = entries[0].resolved["stage_sizes"], list(notes)
    scenario = scenario_name(sizes)
    finished = [entry for entry in entries if entry.report.finished]
    groups = [_distinct(group, notes) for group in grouped(finished, identity).values()]
    lines = [
        # By the name of the scenario, since stages can also be given as a list of sizes.
        Line(name, tuple(group), setting_of(vars(group[0].experiment) | {"scenario": scenario}))
        for name, group in zip(_names([group[0] for group in groups]), groups, strict=True)
    ]
    methods = list(dict.fromkeys(line.experiment.method for line in lines))
    lines.sort(key=lambda line: (methods.index(line.experiment.method), line.experiment.ccfa))
    lines = [_with_gain(line, lines, notes) for line in lines]
    unfinished = tuple(entry for entry in entries if not entry.report.finished)
    for entry in unfinished:
        done, last = len(entry.report.num_seen), 100 * entry.report.overall[-1]
        notes.append(
            f"{entry.path} is unfinished ({done} of {len(sizes)} stages, last accuracy {last:.2f}): "
            "shown, not averaged."
        )
    notes += _mixed([entry for line in lines for entry in line.entries])
    seen = np.cumsum(sizes).tolist()
    return Comparison(entries[0].experiment.data, scenario, seen, tuple(lines), unfinished, tuple(notes))


def scenario_name(sizes: Sequence[int]) -> str:
    """Return the scenario of these stages, or the sizes themselves where no such name fits.

    >>> scenario_name([50, 10, 10, 10, 10, 10]), scenario_name([10, 10]), scenario_name([5, 1, 2])
    ('B50-inc10', 'B0-inc10', '5,1,2')
    """
    first, *later = sizes
    if not later or set(later[:-1]) - {later[0]} or later[-1] > later[0]:
        return ",".join(map(str, sizes))
    return f"B{0 if first == later[0] else first}-inc{later[0]}"


def _names(entries: Sequence[Entry]) -> list[str]:
    """Name one run of each experiment by its method and by what differs from the other runs of that method."""
    names = []
    for entry in entries:
        experiment = entry.experiment
        same = [_choices(other) for other in entries if other.experiment.method == experiment.method]
        plugged = filter(None, [experiment.mix, "CCFA" if experiment.ccfa else None])
        names.append(", ".join([" + ".join([experiment.method, *plugged]), *_differing(_choices(entry), same)]))
    contents = [dict(leaves(identity(entry))) for entry in entries]
    return [
        # With the same options, the defaults of two versions may differ.
        name if len(alike) == 1 else ", ".join([name, *_differing(content, alike)[:2]])
        for name, content in zip(names, contents, strict=True)
        for alike in [[other for one, other in zip(names, contents, strict=True) if one == name]]
    ]


def _choices(entry: Entry) -> dict[str, Any]:
    given = {name: getattr(entry.experiment, name) for name in ("memory", "memory_total", "image_size")}
    return {name: value for name, value in given.items() if value is not None} | entry.experiment.options


def _differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{name}={value}" for name, value in own.items() if any(other.get(name) != value for other in others)]


def _require_one_setting(entries: Sequence[Entry]) -> None:
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


def _distinct(group: Sequence[Entry], notes: list[str]) -> list[Entry]:
    """Keep one run for each class order and seed; further ones become notes."""
    kept: dict[Hashable, Entry] = {}
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
    before, after = ({entry.key: entry.average for entry in side.entries} for side in (alone, line))
    unpaired = [entry.path for entry in (*alone.entries, *line.entries) if entry.key not in before.keys() & after]
    if unpaired:
        notes.append(f"{line.name}: no pair of the same order and seeds, so not in the gain: {_joined(unpaired)}.")
    return replace(line, gains=tuple(paired(before, after)))


def _mixed(entries: Sequence[Entry]) -> Iterator[str]:
    """Name what differs between runs that may still be averaged and compared."""
    for rule in dict.fromkeys(entry.report.own for entry in entries):
        if rule != "logits":
            methods = dict.fromkeys(entry.experiment.method for entry in entries if entry.report.own == rule)
            yield f"{', '.join(methods)}: evaluated by {rule.replace('_', ' ')}, the method's own rule, not by logits."
    for name in SURROUNDINGS:
        counts = Counter(entry.surroundings[name] for entry in entries)
        if len(counts) > 1:
            yield f"{name} differs: " + ", ".join(f"{value} ({num} runs)" for value, num in counts.most_common()) + "."
