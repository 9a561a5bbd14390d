"""The figures of what a run cost and how it learned: seconds, images per second, losses."""

import math
from typing import Any

from markupsafe import Markup

from ccfa.reporting.axes import number
from ccfa.reporting.charts import Series, column_chart, line_chart, mean_of_finite
from ccfa.reporting.rundata import RunData, as_number
from ccfa.reporting.sections import Figure
from ccfa.reporting.values import counted, duration

MAX_POINTS = 400  # of a line: more than that are not told apart on a screen
NOT_LOSSES = {"stage", "phase", "epoch", "lr", "images_per_second", "loss"}


def time_figure(run: RunData) -> Figure:
    """Seconds of each stage."""
    seconds = [row.get("seconds", math.nan) for row in run.stages]
    stages = [str(stage) for stage in range(len(seconds))]
    total = sum(value for value in seconds if math.isfinite(value))
    return Figure(
        "Time",
        f"Wall-clock seconds of each stage, evaluation included; {duration(total)} in all. "
        "A first stage taken over from another run takes no time.",
        column_chart(
            stages, [("time", seconds)], f"{counted(len(stages), 'stage')}, {total:.0f} s.", "stage", "seconds", " s"
        ),
        (["stage", "seconds"], [[stage, number(value)] for stage, value in zip(stages, seconds, strict=True)]),
    )


def throughput_figure(run: RunData) -> Figure:
    """Training images per second of each stage."""
    meaning = "Training images per second, mean over the stage's epochs."
    speeds: dict[int, list[float]] = {}
    for record in run.epochs:
        speeds.setdefault(record["stage"], []).append(_value(record, "images_per_second"))
    means = {stage: mean_of_finite(values) for stage, values in sorted(speeds.items())}
    series = [Series("images per second", list(means), list(means.values()))]
    chart = line_chart(
        series, f"Throughput of {counted(len(means), 'stage')}.", "stage", "images/s", "", 0, from_zero=True
    )
    rows = [[str(stage), number(mean, decimals=0)] for stage, mean in means.items()]
    return Figure("Throughput", meaning, chart, (["stage", "images per second"], rows))


def loss_figures(run: RunData) -> list[Figure]:
    """The loss of each phase, and the parts that it is the sum of, over all epochs of the run."""
    if not run.epochs:
        return [Figure("Training loss", "Mean over each epoch's batches.", Markup(""))]
    phases = list(dict.fromkeys(str(record.get("phase")) for record in run.epochs))
    terms = list(dict.fromkeys(name for record in run.epochs for name in record if name not in NOT_LOSSES))
    size = math.ceil(len(run.epochs) / MAX_POINTS)
    joined = "" if size == 1 else f" Each point is the mean of up to {size} epochs."
    by_phase = {
        phase: [_value(record, "loss") if str(record.get("phase")) == phase else math.nan for record in run.epochs]
        for phase in phases
    }
    by_term = {term: [_value(record, term) for record in run.epochs] for term in terms}
    figures = [_epochs("Training loss", f"Mean over each epoch's batches, by phase.{joined}", by_phase, run, size)]
    if len(terms) > 1:
        meaning = f"Classification loss and penalties as they enter the sum, mean over each epoch.{joined}"
        figures.append(_epochs("Parts of the loss", meaning, by_term, run, size))
    return figures


def _epochs(title: str, meaning: str, curves: dict[str, list[float]], run: RunData, size: int) -> Figure:
    groups = _neighbours(run.epochs, size)
    places = [group.start for group in groups]
    series = [
        Series(name, places, [mean_of_finite(values[group.start : group.stop]) for group in groups])
        for name, values in curves.items()
    ]
    stages = [record["stage"] for record in run.epochs]
    starts = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    marks = starts if len(starts) <= 25 else []
    meaning += " Hairlines part the stages." if marks else ""
    label = f"{title} over {counted(len(stages), 'epoch')} of {counted(len(starts) + 1, 'stage')}."
    chart = line_chart(series, label, "epoch of the run", "loss", "", 3, marks, from_zero=True)
    return Figure(title, meaning, chart, _last_of_stages(curves, stages))


def _neighbours(epochs: list[dict[str, Any]], size: int) -> list[range]:
    """Up to `size` epochs in a row of one stage and phase."""
    groups: list[range] = []
    for at, record in enumerate(epochs):
        last = groups[-1] if groups else range(0)
        same = last and all(epochs[last.start].get(name) == record.get(name) for name in ("stage", "phase"))
        if same and len(last) < size:
            groups[-1] = range(last.start, at + 1)
        else:
            groups.append(range(at, at + 1))
    return groups


def _last_of_stages(curves: dict[str, list[float]], stages: list[int]) -> tuple[list[str], list[list[str]]]:
    """Each curve's last value in each stage."""
    rows = []
    for stage in dict.fromkeys(stages):
        lasts = []
        for values in curves.values():
            own = [value for value, at in zip(values, stages, strict=True) if at == stage and math.isfinite(value)]
            lasts.append(number(own[-1] if own else math.nan, decimals=4))
        rows.append([str(stage), *lasts])
    return ["last epoch of stage", *curves], rows


def _value(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    return as_number(value) if isinstance(value, int | float) else math.nan
