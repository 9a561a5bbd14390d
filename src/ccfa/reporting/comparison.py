"""Runs side by side: which of them are of one experiment, what they amount to, and what CCFA adds."""

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import METRICS, Report
from ccfa.experiments.differences import differences, leaves, two_columns
from ccfa.experiments.tables import Setting, cell_for, cited_only, setting_of
from ccfa.files import read_file
from ccfa.reporting.values import Value
from ccfa.settings import Experiment

AVERAGE = "average_incremental_accuracy"
COLUMNS = {name: metric.column for name, metric in METRICS.items() if metric.column}
PATHS_SHOWN = 8

# Of the experiment's fields: those over which runs are averaged, and those whose meaning stands in `resolved`,
# where a default and the same value typed out are alike.
_VARYING = {"order", "seed", "batch_seed"}
_RESOLVED = {"method", "ccfa", "mix", "memory", "memory_total", "options", "scenario"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}
_REQUIRED = {
    "experiment": {"method": str, "options": dict},
    "resolved": {"method": dict, "stage_sizes": list, "class_order": list, "class_names": list},
}
_Key = TypeVar("_Key", bound=Hashable)


class Entry(NamedTuple):
    """A run: where it is and what came out."""

    path: Path
    report: Report

    @property
    def experiment(self) -> dict[str, Any]:
        """What was asked for."""
        return dict(self.report.config["experiment"])

    @property
    def resolved(self) -> dict[str, Any]:
        """What that came to: the method in full, stages, class order, sizes of the data."""
        return dict(self.report.config["resolved"])

    @property
    def key(self) -> tuple[tuple[int, ...], int, int]:
        """What may differ between runs that are averaged: class order and seeds."""
        seed = self.experiment.get("seed", 0)
        batch_seed = self.experiment.get("batch_seed")
        return tuple(self.resolved["class_order"]), seed, seed if batch_seed is None else batch_seed

    @property
    def ccfa(self) -> bool:
        """Whether CCFA is plugged in."""
        return bool(self.experiment.get("ccfa"))

    @property
    def average(self) -> float:
        """The average incremental accuracy in percent, by the method's own rule."""
        return 100 * self.report.metrics[AVERAGE]

    @property
    def surroundings(self) -> dict[str, str]:
        """Where it ran: what may differ between runs that are averaged, but should be known."""
        facts = {**self.report.environment, **(self.report.environment.get("acceleration") or {})}
        return {name: str(facts.get(name, "")) for name in ("precision", "device", "ccfa", "commit", "torch")}


def gather(paths: Sequence[Path], command: str = "ccfa compare") -> tuple[list[Entry], list[str]]:
    """The runs among run directories, folders of runs and report files, and notes on what is not a run."""
    if not paths:
        raise UsageError(f"Name at least one run directory, e.g. {command} runs/*")
    entries: dict[Path, Entry] = {}
    notes, left_out = [], []
    for path in itertools.chain.from_iterable(map(_runs_in, paths)):
        file = path if path.suffix == ".json" and path.is_file() else path / "report.json"
        if not path.exists():
            raise ModelError(f"{path} does not exist. Name run directories, e.g. {command} runs/*")
        if path.resolve() in entries:
            notes.append(f"{path} is named twice and counted once.")
        elif not file.is_file():
            left_out.append(path)
        else:
            entries[path.resolve()] = Entry(path, _read(file))
    if left_out:
        notes.append(f"left out, since they are no runs or no stage of them is finished: {_listed(left_out)}.")
    if not entries:
        raise ModelError(f"No run with a finished stage among {_listed(paths)}: nothing to show.")
    return list(entries.values()), notes


def _runs_in(path: Path) -> list[Path]:
    """The runs of a folder of runs, as a sweep leaves it; any other path as it is."""
    if not path.is_dir() or (path / "config.json").is_file():
        return [path]
    return sorted(file.parent for file in path.glob("[!.]*/config.json")) or [path]


def _read(path: Path) -> Report:
    """A report that says what was run and does not contradict itself; a ModelError with its path otherwise."""
    try:
        report = Report.from_json(read_file(path).decode())
        for part, fields in _REQUIRED.items():
            content = report.config.get(part)
            for name, kind in fields.items():
                if not (
                    isinstance(content, dict)
                    and isinstance(content.get(name), kind)
                    and (content[name] or kind is dict)
                ):
                    raise ModelError(
                        f"it does not say what was run: {part}.{name} is missing or not a {kind.__name__}."
                    )
        stages, done = np.cumsum(report.config["resolved"]["stage_sizes"]).tolist(), len(report.num_seen)
        whole = done == len(stages) if report.finished else 0 < done <= len(stages)
        if not whole or report.num_seen != stages[:done] or len(report.overall) != done:
            raise ModelError(f"it has {report.num_seen} classes seen, and its configuration {stages}.")
        if missing := COLUMNS.keys() - report.metrics.keys():
            raise ModelError(f"it has no {', '.join(sorted(missing))}.")
    except (OSError, ValueError, TypeError, ModelError) as error:
        raise ModelError(f"{path} is not a whole report: {error} Leave it out, or run it again.") from error
    return report


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(str, paths[:PATHS_SHOWN]))
    return shown if len(paths) <= PATHS_SHOWN else f"{shown} and {len(paths) - PATHS_SHOWN} more"


def common_folder(entries: Sequence[Entry]) -> Path:
    """`comparison` in the folder that holds all the runs."""
    parents = [entry.path.parent for entry in entries]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.resolve() for parent in parents]
    return Path(os.path.commonpath(parents)) / "comparison"


def identity(entry: Entry) -> dict[str, Any]:
    """Everything that makes a run the experiment it is; class order and seeds are left out."""
    asked = {
        name: value
        for name, value in entry.experiment.items()
        if name not in _VARYING | _RESOLVED and value != _DEFAULTS.get(name)
    }
    resolved = {name: value for name, value in entry.resolved.items() if name != "class_order"}
    return {**asked, **resolved, "class_names": sorted(entry.resolved["class_names"], key=str)}


def without_ccfa(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same experiment with CCFA unplugged."""
    method = content["method"]
    others = [part for part in method.get("feature_augmentations", ()) if part.get("part") != "CCFA"]
    return {**content, "method": {**method, "feature_augmentations": others}}


def setting(entry: Entry) -> dict[str, Any]:
    """What all runs of a table must share."""
    return {
        "data": entry.experiment.get("data"),
        "stage sizes": entry.resolved["stage_sizes"],
        "classes": sorted(entry.resolved["class_names"], key=str),
        "held out": entry.experiment.get("validation", 0.0),
        "training images": entry.resolved.get("num_training_images"),
        "test images": entry.resolved.get("num_test_images"),
    }


def hashed(content: Mapping[str, Any]) -> str:
    """A text that is equal for equal contents."""
    return json.dumps(content, sort_keys=True)


def grouped(entries: Sequence[Entry], content: Callable[[Entry], Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """The runs of equal content together: `setting`, or `identity` for those of one experiment."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(hashed(content(entry)), []).append(entry)
    return groups


def paired(before: Mapping[_Key, float], after: Mapping[_Key, float]) -> list[float]:
    """The differences of the runs that both sides have, by class order and seeds.

    >>> paired({"seed 0": 60.0, "seed 1": 61.0}, {"seed 1": 63.0})
    [2.0]
    """
    return [after[key] - before[key] for key in before if key in after]


@dataclasses.dataclass(frozen=True)
class Line:
    """One experiment: its finished runs, what CCFA adds in each pair of runs, and the paper's setting, if it is one."""

    name: str
    entries: tuple[Entry, ...]
    setting: Setting | None = None
    gains: tuple[float, ...] = ()

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.entries[0].experiment["method"])

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
        """A metric in percent, by the method's own rule."""
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Experiments on one data set and scenario: what `ccfa compare` shows."""

    data: str
    scenario: str
    num_seen: list[int]
    lines: tuple[Line, ...]
    unfinished: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """What the table is of."""
        return f"{self.data} · {self.scenario}"

    @property
    def cited(self) -> dict[str, float]:
        """The paper's values of methods that are not here, where others of its values are for the same memory."""

        def place(setting: Setting) -> tuple[object, ...]:
            return setting.data, setting.scenario, setting.memory

        beside = {place(line.setting) for line in self.lines if line.setting and line.published is not None}
        rows = cited_only().items()
        return {name: cell.value for name, row in rows for cell in row if cell and place(cell.setting) in beside}


def compare(entries: Sequence[Entry], notes: Sequence[str] = ()) -> Comparison:
    """Group runs by experiment and average each group.

    Unfinished runs and repeated ones are left out of the means. The notes of the result name them, and what differs
    between runs that are averaged.

    Raises:
        UsageError: if the runs are not of one data set and scenario.
    """
    _require_one_setting(entries)
    data, sizes = str(entries[0].experiment.get("data", "")), entries[0].resolved["stage_sizes"]
    scenario, told = scenario_name(sizes), list(notes)
    groups = [
        _distinct(group, told)
        for group in grouped([entry for entry in entries if entry.report.finished], identity).values()
    ]
    lines = [
        # The paper's setting is found however the stages were written.
        Line(name, tuple(group), setting_of({**group[0].experiment, "scenario": scenario}))
        for name, group in zip(names(groups), groups, strict=True)
    ]
    methods = list(dict.fromkeys(line.method for line in lines))
    lines.sort(key=lambda line: (methods.index(line.method), line.entries[0].ccfa))
    lines = [_with_gain(line, lines, told) for line in lines]
    unfinished = tuple(entry for entry in entries if not entry.report.finished)
    for entry in unfinished:
        done, last = len(entry.report.num_seen), 100 * entry.report.overall[-1]
        told.append(
            f"{entry.path} is unfinished ({done} of {len(sizes)} stages, last accuracy {last:.2f}): "
            "shown, not averaged."
        )
    told += _mixed([entry for line in lines for entry in line.entries])
    return Comparison(data, scenario, np.cumsum(sizes).tolist(), tuple(lines), unfinished, tuple(told))


def scenario_name(sizes: Sequence[int]) -> str:
    """B50-inc10, B0-inc10, or the sizes themselves where no such name fits."""
    first, *later = sizes
    if not later or set(later[:-1]) - {later[0]} or later[-1] > later[0]:
        return ",".join(map(str, sizes))
    return f"B{0 if first == later[0] else first}-inc{later[0]}"


def names(groups: Sequence[Sequence[Entry]]) -> list[str]:
    """A name for each group of runs of one experiment; groups of one method are told apart by what differs."""
    firsts = [group[0] for group in groups]
    choices = [_choices(entry) for entry in firsts]
    named = []
    for entry, own in zip(firsts, choices, strict=True):
        method = entry.experiment["method"]
        same = [other for one, other in zip(firsts, choices, strict=True) if one.experiment["method"] == method]
        plugged = filter(None, [entry.experiment.get("mix"), "CCFA" if entry.ccfa else None])
        named.append(", ".join([" + ".join([method, *plugged]), *_differing(own, same)]))
    contents = [dict(leaves(identity(entry))) for entry in firsts]
    return [
        # Where the same was asked for, the defaults of another version may differ.
        name if len(alike) == 1 else ", ".join([name, *_differing(own, alike)[:2]])
        for name, own in zip(named, contents, strict=True)
        for alike in [[other for one, other in zip(named, contents, strict=True) if one == name]]
    ]


def _choices(entry: Entry) -> dict[str, Any]:
    """What was asked for beside the plug-ins, where anything was."""
    asked = {name: entry.experiment.get(name) for name in ("memory", "memory_total", "image_size")}
    return {name: value for name, value in asked.items() if value is not None} | dict(entry.experiment["options"])


def _differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{name}={value}" for name, value in own.items() if any(other.get(name) != value for other in others)]


def _require_one_setting(entries: Sequence[Entry]) -> None:
    kinds = list(grouped(entries, setting).values())
    if len(kinds) < 2:
        return
    first, second = kinds[0][0], kinds[1][0]
    found = two_columns(differences(setting(first), setting(second)), str(first.path), str(second.path))
    apart = "\n".join(f"  {_listed([entry.path for entry in members])}" for members in kinds)
    raise UsageError(
        "These runs are not of one data set and scenario, so no table and no figure can hold them all:\n"
        f"{found}\nName the runs of one kind alone:\n{apart}"
    )


def _distinct(group: Sequence[Entry], told: list[str]) -> list[Entry]:
    """The runs of an experiment, one for each class order and seed; further ones become notes."""
    kept: dict[Hashable, Entry] = {}
    for entry in group:
        first = kept.setdefault(entry.key, entry)
        if first is not entry:
            told.append(
                f"{entry.path} repeats {first.path} (same experiment, order and seeds; averages {first.average:.2f} "
                f"and {entry.average:.2f}): the first is counted, the second is not."
            )
    return list(kept.values())


def _with_gain(line: Line, lines: Sequence[Line], told: list[str]) -> Line:
    """The line with what CCFA adds to it, where the same experiment without CCFA is there too."""
    base = hashed(without_ccfa(identity(line.entries[0])))
    alone = next((other for other in lines if hashed(identity(other.entries[0])) == base), None)
    if not line.entries[0].ccfa or alone is None:
        return line
    keys = [{entry.key for entry in side.entries} for side in (alone, line)]
    unpaired = [entry.path for side in (alone, line) for entry in side.entries if entry.key not in keys[0] & keys[1]]
    if unpaired:
        listed = ", ".join(map(str, unpaired))
        told.append(f"{line.name}: no run of the same order and seeds to pair with, so not in the gain: {listed}.")
    before, after = ({entry.key: entry.average for entry in side.entries} for side in (alone, line))
    return dataclasses.replace(line, gains=tuple(paired(before, after)))


def _mixed(entries: Sequence[Entry]) -> Iterator[str]:
    """What may be averaged and compared, but should be known: rules of prediction, devices, versions."""
    for rule in dict.fromkeys(entry.report.own for entry in entries):
        if rule != "logits":
            methods = dict.fromkeys(entry.experiment["method"] for entry in entries if entry.report.own == rule)
            yield f"{', '.join(methods)}: evaluated by {rule.replace('_', ' ')}, the method's own rule, not by logits."
    for name in ("precision", "device", "ccfa", "commit", "torch"):
        counts = Counter(entry.surroundings[name] for entry in entries)
        if len(counts) > 1:
            yield f"{name} differs: " + ", ".join(f"{value} ({num} runs)" for value, num in counts.most_common()) + "."
