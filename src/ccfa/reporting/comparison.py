"""Runs side by side: grouped by experiment, averaged over class orders and seeds, CCFA against its absence."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ccfa.errors import ModelError
from ccfa.evaluation import Report
from ccfa.experiments.tables import Setting, cell_for, cited_only, setting_of
from ccfa.reporting.sameness import Entry, hashed, identity, names, require_one_setting, without_ccfa
from ccfa.reporting.values import Value

TIME = "a whole run, but for a first stage taken over from another run, which takes next to none"
METRICS = {
    "average_incremental_accuracy": "average",
    "last_accuracy": "last",
    "new_class_accuracy": "new",
    "old_class_accuracy": "old",
    "forgetting_max_minus_last": "forgetting",
}
SPREAD = "mean ± sample standard deviation (n - 1) over class orders and seeds; runs says how many, one has no spread"


class Gain(NamedTuple):
    """What CCFA adds, over pairs of runs with the same class order and seeds."""

    value: Value
    num_pairs: int


@dataclass(frozen=True)
class Line:
    """One experiment: its finished runs, what they amount to, and the paper's value."""

    name: str
    entries: tuple[Entry, ...]
    gain: Gain | None = None
    published: float | None = None

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.entries[0].experiment["method"])

    def value(self, metric: str) -> Value:
        """A metric in percent, by the method's own rule."""
        return Value.of([100 * entry.report.own_metrics[metric] for entry in self.entries])

    @property
    def seconds(self) -> Value:
        """How long a run took."""
        return Value.of([entry.report.seconds for entry in self.entries], decimals=0)

    @property
    def curve(self) -> list[Value]:
        """The accuracy on seen classes after each stage, in percent."""
        return [Value.of(column) for column in zip(*(_curve(entry.report) for entry in self.entries), strict=True)]


@dataclass(frozen=True)
class Comparison:
    """What `ccfa compare` shows."""

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
        settings = [_setting(line.entries[0], self.scenario) for line in self.lines if line.published is not None]
        beside = {(setting.data, setting.scenario, setting.memory) for setting in settings if setting}
        return {
            name: cell.value
            for name, row in cited_only().items()
            for cell in row
            if cell and (cell.setting.data, cell.setting.scenario, cell.setting.memory) in beside
        }


def compare(entries: Sequence[Entry], notes: Sequence[str] = ()) -> Comparison:
    """Group runs by experiment and average each group; what is left out, or mixed, is said in the notes."""
    require_one_setting(entries)
    for entry in entries:
        _require_sound(entry)
    data, scenario = str(entries[0].experiment.get("data", "")), scenario_name(entries[0].resolved["stage_sizes"])
    said = list(notes)
    finished = [entry for entry in entries if entry.report.finished]
    groups: dict[Hashable, dict[Hashable, Entry]] = {}
    for entry in finished:
        group = groups.setdefault(hashed(identity(entry)), {})
        first = group.setdefault(entry.key, entry)
        if first is not entry:
            said.append(_repeated(first, entry))
    distinct = [list(group.values()) for group in groups.values()]
    lines = [
        Line(name, tuple(group), published=_published(group[0], scenario))
        for name, group in zip(names(distinct), distinct, strict=True)
    ]
    lines = [_with_gain(line, lines, said) for line in _ordered(lines)]
    unfinished = tuple(entry for entry in entries if not entry.report.finished)
    said += [_unfinished(entry) for entry in unfinished]
    said += _mixed([entry for line in lines for entry in line.entries])
    num_seen = np.cumsum(entries[0].resolved["stage_sizes"]).tolist()
    return Comparison(data, scenario, num_seen, tuple(lines), unfinished, tuple(said))


def scenario_name(sizes: Sequence[int]) -> str:
    """B50-inc10, B0-inc10, or the sizes themselves where no such name fits."""
    first, *later = sizes
    if not later or set(later[:-1]) - {later[0]} or later[-1] > later[0]:
        return ",".join(map(str, sizes))
    return f"B{0 if first == later[0] else first}-inc{later[0]}"


def _curve(report: Report) -> list[float]:
    return [100 * accuracy for accuracy in report.own_overall]


def _require_sound(entry: Entry) -> None:
    """A report that contradicts itself is damaged."""
    stages = np.cumsum(entry.resolved["stage_sizes"]).tolist()
    done = len(entry.report.num_seen)
    whole = done == len(stages) if entry.report.finished else 0 < done <= len(stages)
    if not whole or entry.report.num_seen != stages[:done] or len(entry.report.own_overall) != done:
        raise ModelError(
            f"{entry.path} is damaged: its report tells of {entry.report.num_seen} classes seen, its configuration of "
            f"{stages}. Leave it out, or run it again."
        )
    if missing := METRICS.keys() - entry.report.own_metrics.keys():
        raise ModelError(
            f"{entry.path}: the report has no {', '.join(sorted(missing))}. Leave it out, or run it again."
        )


def _ordered(lines: Sequence[Line]) -> list[Line]:
    """Lines of one method together, without CCFA first, otherwise as given."""
    methods = list(dict.fromkeys(line.method for line in lines))
    return sorted(lines, key=lambda line: (methods.index(line.method), line.entries[0].ccfa))


def _with_gain(line: Line, lines: Sequence[Line], said: list[str]) -> Line:
    """The line with what CCFA adds to it, where the same experiment without CCFA is there too."""
    if not line.entries[0].ccfa:
        return line
    base = hashed(without_ccfa(identity(line.entries[0])))
    alone = next((other for other in lines if hashed(identity(other.entries[0])) == base), None)
    if alone is None:
        return line
    before, after = ({entry.key: entry for entry in side.entries} for side in (alone, line))
    pairs = [(before[key], after[key]) for key in before if key in after]
    unpaired = [entry for key, entry in {**before, **after}.items() if not (key in before and key in after)]
    if unpaired:
        listed = ", ".join(str(entry.path) for entry in unpaired)
        said.append(f"{line.name}: no run of the same order and seeds to pair with, so not in the gain: {listed}.")
    gains = [_average(plugged.report) - _average(plain.report) for plain, plugged in pairs]
    gain = Gain(Value.of(gains, sign="+"), len(gains)) if gains else None
    return Line(line.name, line.entries, gain, line.published)


def _average(report: Report) -> float:
    return 100 * report.own_metrics["average_incremental_accuracy"]


def _setting(entry: Entry, scenario: str) -> Setting | None:
    """What the run was measured on, however its stages were written."""
    return setting_of({**entry.experiment, "scenario": scenario})


def _published(entry: Entry, scenario: str) -> float | None:
    """The paper's average for the run's setting."""
    setting = _setting(entry, scenario)
    cell = cell_for(setting) if setting else None
    return cell.value if cell else None


def _repeated(first: Entry, entry: Entry) -> str:
    values = " and ".join(f"{_average(one.report):.2f}" for one in (first, entry))
    return (
        f"{entry.path} repeats {first.path} (same experiment, order and seeds; averages {values}): "
        f"the first is counted, the second is not."
    )


def _unfinished(entry: Entry) -> str:
    done, stages = len(entry.report.num_seen), len(entry.resolved["stage_sizes"])
    return (
        f"{entry.path} is unfinished ({done} of {stages} stages, last accuracy "
        f"{_curve(entry.report)[-1]:.2f}): shown, not averaged."
    )


def _mixed(entries: Sequence[Entry]) -> Iterator[str]:
    """What may be averaged and compared, but should be known: rules of prediction, devices, versions."""
    rules: dict[str, list[str]] = {}
    for entry in entries:
        rules.setdefault(entry.report.own_rule, []).append(entry.experiment["method"])
    if "nearest mean" in rules:
        methods = ", ".join(dict.fromkeys(rules["nearest mean"]))
        yield f"{methods}: judged by the nearest mean of exemplars, its own rule; everything else by logits."
    for name in ("precision", "device", "ccfa", "commit", "torch"):
        counts = Counter(entry.surroundings[name] for entry in entries)
        if len(counts) > 1:
            yield f"{name} differs: " + ", ".join(f"{value} ({num} runs)" for value, num in counts.most_common()) + "."
