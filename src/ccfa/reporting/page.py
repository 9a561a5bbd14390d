"""report.html: a run as one self-contained page.

The page is made from the files of the run directory alone, so that making it again gives the same bytes. The headline
numbers are the report's. Charts by class and stage come from the stored predictions.
"""

import base64
import hashlib
import json
import math
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from ccfa.errors import CcfaError
from ccfa.evaluation import DEFINITIONS, accuracy_matrix, forgetting_max_minus_last
from ccfa.experiments.experiment import Resolved, experiment_of
from ccfa.experiments.run_directory import left_alone
from ccfa.files import write_atomically
from ccfa.reporting.charts import NUM_COLOURS, Figure, Table, heat_map, lines_figure, number, percent
from ccfa.reporting.pictures import strip, write_pictures
from ccfa.reporting.rundata import RunData, as_number, read_run
from ccfa.reporting.values import counted, duration

HEADLINES = {
    "average_incremental_accuracy": "average incremental accuracy",
    "last_accuracy": "accuracy after the last stage",
    "forgetting_max_minus_last": "forgetting",
    "new_class_accuracy": "new-class accuracy",
}
NUM_PAIRS = 10
MAX_CLASSES = 128  # of a confusion matrix by class; with more it is one by stage
MAX_LINES = 25  # between stages; more would hide what they part
MAX_POINTS = 400  # of a line; more cannot be told apart on a screen
NOT_LOSSES = {"stage", "phase", "epoch", "lr", "images_per_second", "loss"}


def write_report(directory: Path, resolved: Resolved | None = None) -> Path:
    """Write report.html of a run; with the data at hand, store first the pictures that it shows."""
    directory = Path(directory)
    run = read_run(directory)
    if resolved and run.labels:
        seen, labels, predicted = resolved.test.rows(0, run.num_seen[-1]), run.labels[-1], run.predicted[-1]
        mistakes = [
            (true, other, seen[(labels == true) & (predicted == other)].tolist())
            for true, other, _ in confused_pairs(run)[:NUM_PAIRS]
        ]
        write_pictures(directory, len(run.num_seen) - 1, run.exemplars, mistakes, resolved)
        run = read_run(directory)
    # A lone surrogate, of a file name or from JSON, has no UTF-8.
    write_atomically(directory / "report.html", page(run).encode(errors="replace"))
    return directory / "report.html"


def report_line(directory: Path, resolved: Resolved | None = None) -> str:
    """Write the page and return a line that says where it is, or why it could not be written."""
    try:
        with left_alone(directory):
            return f"Report: {write_report(directory, resolved)}"
    except Exception as error:  # a page is not worth a run
        again = shlex.join(["ccfa", "report", str(directory)])
        return f"note: the report page was not written ({error}). Try again: {again}"


def page(run: RunData) -> str:
    """Return the page of a run as HTML."""
    pairs = confused_pairs(run)
    return render(
        "report.html",
        **_heading(run),
        accuracy=accuracy_figure(run),
        matrix=matrix_figure(run),
        metrics=metrics_table(run),
        definitions=[(name.replace("_", " "), text) for name, text in DEFINITIONS.items()],
        forgetting=forgetting_figure(run),
        old_new=[old_new_figure(run, "old", "a new class"), old_new_figure(run, "new", "an old class")],
        confusion=confusion_figure(run),
        pairs=_shown_pairs(run, pairs[:NUM_PAIRS]),
        exemplars=_shown_exemplars(run),
        has_pictures=run.pictures is not None,
        cost=[*loss_figures(run), time_figure(run)],
        classes=class_table(run, pairs),
        **_repeating(run),
    )


def render(template: str, **values: Any) -> str:
    """Fill a template that extends base.html; every value is escaped unless it is Markup."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ccfa.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = files("ccfa.reporting") / "templates"
    style, script = ((sources / name).read_text(encoding="utf-8").strip() for name in ("style.css", "script.js"))
    # The policy names this script by its hash: one that a class name smuggled in would be refused.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(style=Markup(style), script=Markup(script), script_hash=digest)
    environment.filters.update(counted=counted)
    return environment


def _heading(run: RunData) -> dict[str, Any]:
    experiment, sizes = run.experiment, run.resolved.get("stage_sizes") or []
    plugged = [f" + {experiment['mix']}" if experiment.get("mix") else "", " + CCFA" if experiment.get("ccfa") else ""]
    state = str(run.status.get("state", "unknown"))
    finished = state == "finished" and len(run.num_seen) in (0, len(sizes))  # 0 where the report is lost
    told = "Finished" if finished else f"{state.capitalize()}: {len(run.num_seen)} of {_stages(len(sizes))}"
    resumed = run.environment.get("resumed")
    records = resumed if isinstance(resumed, list) else []
    if times := sum(bool(isinstance(one, dict) and one.get("differences")) for one in records):
        told += f", resumed {counted(times, 'time')} with another device or other versions"
    own = next(iter(run.metrics.values()), {})
    return {
        "name": run.name,
        "title": f"{experiment.get('method', 'a run')}{''.join(plugged)} on {experiment.get('data', 'data')}",
        "facts": [
            f"{counted(sum(sizes), 'class', 'es')} in {_stages(len(sizes))}",
            str(run.environment.get("device", "unknown device")),
            duration(sum(run.seconds) if run.seconds else math.nan),
            f"seed {experiment.get('seed', 0)}",
        ],
        "finished": finished,
        "state": told + (f" ({run.status['error']})" if run.status.get("error") else ""),
        "verdict": [
            (title, percent(own.get(name, math.nan), 2), DEFINITIONS[name]) for name, title in HEADLINES.items()
        ],
        "rule": _by(next(iter(run.metrics), "")),
        "notes": run.notes,
    }


def _stages(num: int) -> str:
    return counted(num, "stage")


def _by(rule: str) -> str:
    return f"by {rule.replace('_', ' ')}" if rule else ""


def _repeating(run: RunData) -> dict[str, Any]:
    try:
        words, why_not = ["ccfa", "run", *experiment_of(run.config).arguments()], ""
    except CcfaError as error:
        words, why_not = [], str(error)
    device, speed = run.environment.get("torch_device"), run.environment.get("acceleration")
    if isinstance(device, str):
        words += ["--device", device]
    if isinstance(speed, dict) and device != "cpu":  # where there is nothing to choose
        words += ["--precision", str(speed.get("precision"))]
        words += [f"--no-{name}" for name in ("compile", "graph") if speed.get(name) is False]
    images = [(f"number of {kind} images", run.resolved.get(f"num_{kind}_images")) for kind in ("training", "test")]
    settings = [(name.replace("_", " "), value) for name, value in run.experiment.items()] + images
    return {
        "command": "" if why_not else shlex.join([*words, "--out", f"runs/{run.name}-again"]),
        "why_not": why_not,
        "settings": [(name, _plain(value)) for name, value in settings if value not in (None, False, {})],
        "environment": [(name, _plain(value)) for name, value in run.environment.items() if name != "resumed"],
        "config": json.dumps(run.config, indent=1, ensure_ascii=False),
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    return str(value)


def accuracy_figure(run: RunData) -> Figure:
    """Accuracy after each stage by every rule of the report, the method's own first."""
    curves = {_by(rule): _percents(values) for rule, values in run.overall.items()}
    own = next(iter(curves), "")
    if len(curves) > 1:
        own, curves = f"{own}, the method's rule", {f"{own}, the method's rule": curves.pop(own), **curves}
    meaning = "Share of the test images of all classes seen so far that are predicted right, over all those classes."
    title = "Accuracy after each stage"
    return lines_figure(title, meaning, "classes seen", run.num_seen, curves, "accuracy, percent", main=own)


def metrics_table(run: RunData) -> Table | None:
    """Every metric by every rule of the report, the method's own first."""
    rows = [
        [name.replace("_", " "), *(percent(one.get(name, math.nan), 2) for one in run.metrics.values())]
        for name in DEFINITIONS
    ]
    return (["metric", *map(_by, run.metrics)], rows) if run.metrics else None


def matrix_figure(run: RunData) -> Figure:
    """The accuracy matrix as a heat map."""
    title, meaning = "Accuracy matrix", "Row i, column j: accuracy after stage i on the classes first seen at stage j."
    matrix = _matrix(run)
    stages = [str(stage) for stage in range(len(matrix))]
    label = f"Heat map of {len(matrix)} by {len(matrix)} accuracies; the values are in the table below it."
    chart = heat_map(100 * matrix, stages, label, "after stage", "classes of stage")
    rows = [
        [stage, *("" if math.isnan(value) else percent(value) for value in row)]
        for stage, row in zip(stages, matrix.tolist(), strict=True)
    ]
    return Figure(title, meaning, chart, (["after stage", *(f"classes of {stage}" for stage in stages)], rows))


def forgetting_figure(run: RunData) -> Figure:
    """Forgetting after each stage but the first, as if it were the last."""
    matrix = _matrix(run)
    stages = range(1, len(matrix))
    values = [100 * forgetting_max_minus_last(matrix[: stage + 1, : stage + 1]) for stage in stages]
    meaning = f"After each stage, as if it were the last: {DEFINITIONS['forgetting_max_minus_last']}.{_needs_two(run)}"
    return lines_figure("Forgetting", meaning, "stage", stages, {"forgetting": values})


def old_new_figure(run: RunData, which: str, other: str) -> Figure:
    """What test images of old (or new) classes are predicted as, after each stage but the first."""
    shares = old_new_shares(run, which)
    names = ("right class", f"another {which} class", other)
    curves = {name: _percents([one[place] for one in shares]) for place, name in enumerate(names)}
    meaning = (
        f"Share of the test images of {which} classes predicted as their own class, which is the accuracy on "
        f"{which} classes, as another {which} class, or as {other}.{_needs_two(run)}"
    )
    return lines_figure(f"Test images of {which} classes", meaning, "stage", range(1, len(shares) + 1), curves)


def _needs_two(run: RunData) -> str:
    return "" if len(run.num_seen) > 1 else " It needs at least two stages."


def old_new_shares(run: RunData, which: str) -> list[tuple[float, float, float]]:
    """Shares of the test images of old (or new) classes: right, as another such class, as one of the other kind.

    One tuple per stage after the first.
    """
    found = []
    for labels, predicted, num_old in zip(run.labels[1:], run.predicted[1:], run.num_seen, strict=False):
        these = (labels < num_old) == (which == "old")
        right = float(np.mean((predicted == labels)[these]))
        crossed = float(np.mean(((predicted < num_old) != (labels < num_old))[these]))
        found.append((right, max(1 - right - crossed, 0.0), crossed))
    return found


def confused_pairs(run: RunData) -> list[tuple[int, int, int]]:
    """List confused pairs after the last stage: true class, predicted class, test images; the most images first."""
    if not run.labels:
        return []
    # Only pairs that occur: with thousands of classes, a matrix of all pairs would not fit into memory.
    pairs = zip(run.labels[-1].tolist(), run.predicted[-1].tolist(), strict=True)
    counts = Counter(pair for pair in pairs if pair[0] != pair[1])
    return sorted(((*pair, count) for pair, count in counts.items()), key=lambda one: (-one[2], one[:2]))


def confusion_figure(run: RunData) -> Figure:
    """The confusion matrix after the last stage, in order of arrival; by stage where there are very many classes."""
    title = "Confusion matrix after the last stage"
    if not run.labels:
        return Figure(title, "Share of each class's test images by what they are predicted as.")
    group, lines, what = np.arange(run.num_seen[-1]), run.num_seen[:-1], "class"
    if len(group) > MAX_CLASSES:
        group, lines, what = np.searchsorted(run.num_seen, group, side="right"), [], "stage"
    counts = np.zeros((group[-1] + 1, group[-1] + 1))
    np.add.at(counts, (group[run.labels[-1]], group[run.predicted[-1]]), 1)
    names = [_shortened(run.class_name(label)) if what == "class" else str(label) for label in range(len(counts))]
    chart = heat_map(
        100 * counts / counts.sum(axis=1, keepdims=True),
        names,
        f"Heat map of {len(counts)} by {len(counts)} shares, ordered by stage of arrival.",
        f"true {what}",
        f"predicted {what}",
        lines=lines if len(lines) <= MAX_LINES else (),
        faint=True,
    )
    meaning = (
        f"Row: the true {what}; column: the predicted one; share of the row's test images in percent. "
        "Ordered by stage of arrival. The shade grows with the square root of the share, so that rare mistakes show."
    )
    return Figure(title, meaning, chart)


def class_table(run: RunData, pairs: Sequence[tuple[int, int, int]]) -> Table | None:
    """For each class: stage, test images, accuracy when learned and now, drop, the class it is most confused with."""
    if not run.labels:
        return None
    both = list(zip(run.labels, run.predicted, strict=True))
    accuracies = [np.bincount(labels, labels == predicted) / np.bincount(labels) for labels, predicted in both]
    num_images = np.bincount(run.labels[-1]).tolist()
    most = {true: (predicted, count) for true, predicted, count in reversed(pairs)}
    rows = []
    for label in range(run.num_seen[-1]):
        stage = _stage_of(run, label)
        then, now = float(accuracies[stage][label]), float(accuracies[-1][label])
        row = [str(stage), str(num_images[label]), percent(then), percent(now), number(100 * (then - now))]
        other, count = most.get(label, (0, 0))
        confused = f"{run.class_name(other)} ({percent(count / num_images[label])} %)" if count else "-"
        rows.append([run.class_name(label), *row, confused])
    return ["class", "stage", "test images", "when learned, %", "now, %", "drop, points", "most confused with"], rows


def _shown_pairs(run: RunData, pairs: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """What the page shows of the most confused pairs."""
    num_images = np.bincount(run.labels[-1]).tolist() if pairs else []
    return [
        {
            "true": run.class_name(true),
            "predicted": run.class_name(predicted),
            "stages": f"learned at stages {_stage_of(run, true)} and {_stage_of(run, predicted)}",
            "num_images": count,
            "share": percent(count / num_images[true]),
            "picture": _pictures(run, "mistakes", "mistake_pairs", [true, predicted]),
        }
        for true, predicted, count in pairs
    ]


def _shown_exemplars(run: RunData) -> list[dict[str, Any]]:
    """What the page shows of the exemplars of each class."""
    shown = [
        {
            "name": _shortened(run.class_name(label), 80),
            "num_exemplars": len(rows),
            "picture": _pictures(run, "exemplars", "exemplar_classes", [label]),
        }
        for label, rows in enumerate(run.exemplars)
    ]
    return shown if any(run.exemplars) else []


def _pictures(run: RunData, images: str, keys: str, key: list[int]) -> str:
    if run.pictures is None:
        return ""
    return strip(run.pictures[images][(run.pictures[keys].reshape(-1, len(key)) == key).all(axis=1)])


def time_figure(run: RunData) -> Figure:
    """Seconds of each stage."""
    total = sum(value for value in run.seconds if math.isfinite(value))
    meaning = (
        f"Wall-clock seconds of each stage, evaluation included; {duration(total)} in all. "
        "A first stage taken over from another run takes no time."
    )
    curves = {"time": run.seconds}
    return lines_figure("Time", meaning, "stage", range(len(run.seconds)), curves, "seconds", " s", from_zero=True)


def loss_figures(run: RunData) -> list[Figure]:
    """The loss of each phase, and the terms that it is the sum of, over all epochs of the run."""
    phases = [str(record.get("phase")) for record in run.epochs]
    losses = [as_number(record.get("loss")) for record in run.epochs]
    by_phase = {
        phase: [loss if own == phase else math.nan for loss, own in zip(losses, phases, strict=True)]
        for phase in list(dict.fromkeys(phases))[:NUM_COLOURS]
    }
    terms = list(dict.fromkeys(name for record in run.epochs for name in record if name not in NOT_LOSSES))
    by_term = {term: [as_number(record.get(term)) for record in run.epochs] for term in terms[:NUM_COLOURS]}
    figures = [_over_epochs(run, "Training loss", "Mean over each epoch's batches, by phase.", by_phase)]
    if len(terms) > 1:
        meaning = "Classification loss and penalties as they enter the sum, mean over each epoch."
        figures.append(_over_epochs(run, "Parts of the loss", meaning, by_term))
    return figures


def _over_epochs(run: RunData, title: str, meaning: str, curves: dict[str, list[float]]) -> Figure:
    stages = [record["stage"] for record in run.epochs]
    size = max(1, math.ceil(len(stages) / MAX_POINTS))
    places = range(0, len(stages), size)
    means = {
        name: [_mean_of_finite(values[place : place + size]) for place in places] for name, values in curves.items()
    }
    marks = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    marks = marks if len(marks) <= MAX_LINES else []
    meaning += f" Each point is the mean of up to {size} epochs." if size > 1 else ""
    meaning += " Hairlines part the stages." if marks else ""
    return lines_figure(title, meaning, "epoch of the run", places, means, "loss", "", 3, marks, from_zero=True)


def _matrix(run: RunData) -> NDArray[np.float64]:
    return accuracy_matrix(run.predicted, run.labels, run.num_seen) if run.labels else np.empty((0, 0))


def _stage_of(run: RunData, label: int) -> int:
    return bisect_right(run.num_seen, label)


def _mean_of_finite(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _percents(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def _shortened(name: str, at_most: int = 60) -> str:
    return name if len(name) <= at_most else name[: at_most - 1] + "…"
