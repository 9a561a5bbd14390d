"""The figures of a run's page: each a chart, the sentence that defines its number, and the same as a table."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ccfa.evaluation import DEFINITIONS, accuracy_matrix, forgetting_max_minus_last, overall_accuracies, summary
from ccfa.reporting.axes import number
from ccfa.reporting.charts import Series, column_chart, line_chart
from ccfa.reporting.confusions import MAX_CLASSES, by_stage, confusion_counts, old_and_new
from ccfa.reporting.heatmaps import heat_map
from ccfa.reporting.rendering import percent
from ccfa.reporting.rundata import RunData

Table = tuple[list[str], list[list[str]]]
MAX_LINES = 25  # between stages; more would hide the cells


def rule_text(rule: str) -> str:
    """A rule of prediction as people say it: by nearest mean."""
    return rule.replace("_", " ")


class Figure(NamedTuple):
    """What is shown, what the number means, the chart (empty where nothing was recorded), and its data."""

    title: str
    meaning: str
    chart: Markup
    table: Table | None = None


def accuracy_figure(run: RunData) -> Figure:
    """Accuracy after each stage by the method's own rule, and by the other one."""
    curves = {}
    if run.predictions:
        rules = [rule for rule in (run.own_rule, run.other_rule) if rule]
        curves = {rule_text(rule): overall_accuracies(run.predicted(rule), run.labels).tolist() for rule in rules}
        num_seen = run.num_seen
    elif run.report:
        num_seen, curves = run.report.num_seen, {f"by {run.report.own.replace('_', ' ')}": run.report.overall}
    meaning = "Share of the test images of all classes seen so far that are predicted right, over all those classes."
    if not curves:
        return Figure("Accuracy after each stage", meaning, Markup(""))
    own = next(iter(curves))
    names = {name: f"{name}, the method's rule" if name == own and len(curves) > 1 else name for name in curves}
    series = [
        Series(names[name], num_seen, _percents(values), dashed=name != own, colour=0 if name == own else 6)
        for name, values in curves.items()
    ]
    label = (
        f"Accuracy {own} goes from {percent(curves[own][0])} % with {num_seen[0]} classes "
        f"to {percent(curves[own][-1])} % with {num_seen[-1]}."
    )
    rows = [
        [str(stage), str(seen), *(percent(values[stage]) for values in curves.values())]
        for stage, seen in enumerate(num_seen)
    ]
    return Figure(
        "Accuracy after each stage",
        meaning,
        line_chart(series, label, "classes seen", "accuracy, percent", " %"),
        (["stage", "classes seen", *curves], rows),
    )


def metrics(run: RunData) -> Table | None:
    """Every metric by the rules that were evaluated, the method's own first."""
    rules = [rule for rule in (run.own_rule, run.other_rule) if rule] if run.predictions else []
    values = [summary(run.predicted(rule), run.labels, run.num_seen) for rule in rules]
    rows = [[name.replace("_", " "), *(percent(one[name], 2) for one in values)] for name in DEFINITIONS]
    return (["metric", *(rule_text(rule) for rule in rules)], rows) if values else None


def matrix_figure(run: RunData) -> Figure:
    """The accuracy matrix as a heat map."""
    title, meaning = "Accuracy matrix", "Row i, column j: accuracy after stage i on the classes first seen at stage j."
    if not run.predictions:
        return Figure(title, meaning, Markup(""))
    matrix = own_matrix(run)
    stages = range(len(matrix))
    label = f"Heat map of {len(matrix)} by {len(matrix)} accuracies; the values are in the table below it."
    chart = heat_map(
        100 * matrix,
        [f"after stage {stage}" for stage in stages],
        [f"classes of stage {stage}" for stage in stages],
        label,
        "after stage",
        "classes of stage",
        " %",
        highest=100.0,
    )
    rows = [[str(stage), *("" if math.isnan(value) else percent(value) for value in matrix[stage])] for stage in stages]
    return Figure(title, meaning, chart, (["after stage", *(f"classes of {stage}" for stage in stages)], rows))


def forgetting_figure(run: RunData) -> Figure:
    """Forgetting after each stage, as if it were the last."""
    meaning = f"After each stage, as if it were the last: {DEFINITIONS['forgetting_max_minus_last']}."
    matrix = own_matrix(run) if run.predictions else np.empty((0, 0))
    values = [forgetting_max_minus_last(matrix[: stage + 1, : stage + 1]) for stage in range(1, len(matrix))]
    return _over_stages("Forgetting", meaning, {"forgetting": values})


def new_and_old_figure(run: RunData) -> Figure:
    """Accuracy on the classes just learned, and on all earlier ones."""
    meaning = (
        "After each stage k: A[k,k], the accuracy on the classes just learned, and the accuracy on all test images "
        "of earlier classes. Their means over stages are the new- and old-class accuracy."
    )
    shares = old_and_new(run)
    curves = {"new classes": [one.new_right for one in shares], "old classes": [one.old_right for one in shares]}
    return _over_stages("New and old classes", meaning, curves)


def old_new_figures(run: RunData) -> list[Figure]:
    """What test images of old classes are taken for, and those of new classes, after each stage."""
    shares = old_and_new(run)
    stages = [str(one.stage) for one in shares]
    figures = []
    for which, same, apart in (
        ("old", "another old class", "a new class"),
        ("new", "another new class", "an old class"),
    ):
        other = {"old": "new", "new": "old"}[which]
        parts = {
            "right class": [getattr(one, f"{which}_right") for one in shares],
            same: [getattr(one, f"{which}_as_other_{which}") for one in shares],
            apart: [getattr(one, f"{which}_as_{other}") for one in shares],
        }
        rows = [[stage, *(percent(values[at]) for values in parts.values())] for at, stage in enumerate(stages)]
        columns = [(name, _percents(values)) for name, values in parts.items()]
        label = f"Columns of shares for {len(stages)} stages; the values are in the table below."
        figures.append(
            Figure(
                f"Test images of {which} classes",
                f"Share of them predicted as their own class, as {same}, or as {apart}; the first two together are "
                f"{which} taken for {which}.",
                column_chart(stages, columns, label, "stage", "share, percent", " %", colours=(0, 5, 1)),
                (["stage", *parts], rows),
            )
        )
    return figures


def confusion_figure(run: RunData) -> Figure:
    """The confusion matrix of the last stage, in order of arrival; by stage where there are very many classes."""
    title = "Confusion matrix after the last stage"
    if not run.predictions:
        return Figure(title, "Share of each class's test images by what they are predicted as.", Markup(""))
    counts, num_seen = confusion_counts(run), run.num_seen
    names, lines, what = [run.class_name(label) for label in range(num_seen[-1])], num_seen[:-1], "class"
    if len(counts) > MAX_CLASSES:
        counts, lines, what = by_stage(counts, num_seen), [], "stage"
        names = [f"classes of stage {stage}" for stage in range(len(counts))]
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    chart = heat_map(
        shares,
        [f"true: {shortened(name)}" for name in names],
        [f"predicted: {shortened(name)}" for name in names],
        f"Heat map of {len(counts)} by {len(counts)} shares, ordered by stage of arrival.",
        f"true {what}, as learned",
        f"predicted {what}, as learned",
        " %",
        highest=100.0,
        lines=lines if len(lines) <= MAX_LINES else (),
        faint=True,
    )
    meaning = (
        f"Row: the true {what}; column: the predicted one; share of the row's test images in percent. "
        "Ordered by stage of arrival. The shade grows with the square root of the share, so that rare mistakes show."
    )
    rows = []
    for at, line in enumerate(shares):
        best = [other for other in np.argsort(-line, kind="stable")[:4].tolist() if other != at and line[other]][:3]
        taken = ", ".join(f"{names[other]} ({number(float(line[other]))} %)" for other in best)
        rows.append([names[at], number(float(line[at])), taken or "-"])
    return Figure(title, meaning, chart, ([what, "right, percent", "most often taken for"], rows))


def own_matrix(run: RunData) -> NDArray[np.float64]:
    """The accuracy matrix by the method's own rule."""
    return accuracy_matrix(run.predicted(run.own_rule), run.labels, run.num_seen)


def shortened(name: str, at_most: int = 60) -> str:
    """A name that fits on a line."""
    return name if len(name) <= at_most else name[: at_most - 1] + "…"


def _over_stages(title: str, meaning: str, curves: dict[str, list[float]]) -> Figure:
    """Lines over the stages after the first."""
    num_stages = max(map(len, curves.values()))
    if not num_stages:
        return Figure(title, meaning + " It needs at least two stages.", Markup(""))
    stages = list(range(1, num_stages + 1))
    last = "; ".join(f"{name} ends at {percent(values[-1])} %" for name, values in curves.items())
    series = [Series(name, stages, _percents(values)) for name, values in curves.items()]
    rows = [[str(stage), *(percent(values[stage - 1]) for values in curves.values())] for stage in stages]
    chart = line_chart(series, f"{title} after stages 1 to {num_stages}: {last}.", "stage", "percent", " %")
    return Figure(title, meaning, chart, (["stage", *curves], rows))


def _percents(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]
