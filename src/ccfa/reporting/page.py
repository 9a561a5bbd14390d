"""report.html: a run as one self-contained page.

The page is made from the files of the run directory alone, so that making it again gives the same bytes. The headline
numbers, the accuracy matrix and forgetting are those of report.json. What is shown of single classes comes from the
stored predictions. A file that is missing or damaged becomes a note on the page.
"""

import base64
import hashlib
import json
import math
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from ccfa.evaluation import DEFINITIONS, METRICS, Numbers, Report, forgetting_max_minus_last
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.run_directory import Run, left_alone
from ccfa.files import write_atomically
from ccfa.reporting.charts import NUM_COLOURS, Curve, Figure, Table, heat_map, line_figure
from ccfa.reporting.pictures import Arrays, read_pictures, strip, write_pictures
from ccfa.reporting.values import counted, duration, number, percent

T = TypeVar("T")
HEADLINES = {name: metric.headline for name, metric in METRICS.items() if metric.headline}
NUM_PAIRS = 10
MAX_CLASSES = 128  # of a confusion matrix by class; with more it is one by stage
MAX_LINES = 25  # between stages; more would hide what they separate
MAX_POINTS = 400  # of a line; more cannot be told apart on a screen
NOT_LOSSES = {"stage", "phase", "epoch", "lr", "images_per_second", "loss"}
NO_REPORT = Report("", {}, [], "", {"": Numbers([], {})}, {}, math.nan, finished=False)


@dataclass(frozen=True)
class Contents:
    """A run with everything that its page shows."""

    run: Run
    report: Report
    environment: dict[str, Any]
    status: dict[str, Any]
    labelled: list[
        tuple[NDArray[Any], NDArray[Any]]
    ]  # labels and predictions after each stage; empty if one is missing
    seconds: list[float]  # of each stage
    epochs: list[dict[str, Any]]
    exemplars: list[list[int]]  # rows kept of each class after the last stage
    pictures: Arrays | None
    notes: list[str]

    @property
    def num_seen(self) -> list[int]:
        """The number of classes seen after each finished stage."""
        return self.report.num_seen

    @property
    def rules(self) -> dict[str, Numbers]:
        """The numbers by each rule of prediction, the method's own first."""
        return {self.report.own: self.report.rules[self.report.own], **self.report.rules}

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """What the experiment resolved to, as config.json holds it."""
        return dict(self.run.config.get("resolved", {}))

    @cached_property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Confused pairs after the last stage: true class, predicted class, test images; the most images first."""
        # Only pairs that occur: with thousands of classes, a matrix of all pairs would not fit into memory.
        both = zip(*self.labelled[-1], strict=True) if self.labelled else ()
        counts = Counter((int(true), int(predicted)) for true, predicted in both if true != predicted)
        return sorted(((*pair, count) for pair, count in counts.items()), key=lambda one: (-one[2], one[:2]))

    @cached_property
    def num_images(self) -> list[int]:
        """The number of test images of each class."""
        return [int(num) for num in np.bincount(self.labelled[-1][0], minlength=self.num_seen[-1])]

    def picture(self, kind: str, *key: int) -> str:
        """Return thumbnails as the address of an image: "exemplars" of a class, or "mistakes" of a confused pair."""
        if self.pictures is None:
            return ""
        keys = self.pictures["exemplar_classes" if kind == "exemplars" else "mistake_pairs"]
        return strip(self.pictures[kind][(keys.reshape(-1, len(key)) == key).all(axis=1)])

    def stage_of(self, label: int) -> int:
        """Return the stage at which a class was learned."""
        return bisect_right(self.num_seen, label)

    def class_name(self, label: int, at_most: int = 255) -> str:
        """Return the name of a class, shortened if it has more letters."""
        name = str(self.resolved["class_names"][label])
        return name if len(name) <= at_most else name[: at_most - 1] + "…"


def read_contents(run: Run) -> Contents:
    """Read what the page shows of a run; only a directory without a usable config.json is an error."""
    notes: list[str] = []

    def read(name: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception:  # a damaged file can make a reader fail in any way
            notes.append(f"{name} is missing or damaged.")
            return otherwise

    def labelled() -> list[tuple[NDArray[Any], NDArray[Any]]]:
        predictions = [run.read_predictions(stage) for stage in stages]
        return [(arrays["labels"], arrays[f"by_{report.own}"]) for arrays in predictions]

    report = read("report.json", run.report, NO_REPORT)
    stages = range(len(report.num_seen))
    return Contents(
        run,
        report,
        environment=read("environment.json", lambda: run.environment, {}),
        status=read("status.json", lambda: run.status, {}),
        labelled=read("A file of predictions", labelled, []),
        seconds=read("stages.csv", lambda: [float(row["seconds"]) for row in run.read_rows("stages.csv")], []),
        epochs=read("metrics.jsonl", run.read_epochs, []),
        exemplars=read("The file of exemplars", lambda: run.read_exemplars(stages[-1]), []) if stages else [],
        pictures=read_pictures(run.path, len(stages) - 1),
        notes=notes,
    )


def write_report(run: Run | Path | str, resolved: Resolved | None = None) -> Path:
    """Write the page of a run, report.html, into its directory.

    A page can be written at any time, also of a run that is unfinished or was made elsewhere. The data set is not
    needed: without it, the page shows the pictures that were stored before, if there are any.

    Args:
        run: A run or its directory.
        resolved: The run's experiment with its data; the pictures of the page are taken from it and stored in
            pictures.npz.

    Returns:
        The path of the page.

    Raises:
        ModelError: if the directory is not that of a run.

    >>> import tempfile
    >>> from ccfa.experiments import Experiment, Run, resolve
    >>> folder = tempfile.TemporaryDirectory()
    >>> run = Run(Path(folder.name) / "run")
    >>> with run.entered(resolve(Experiment("podnet", ccfa=True)).config, {"device": "cpu"}):
    ...     write_report(run).name
    'report.html'
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    contents = read_contents(run)
    if resolved and contents.labelled:
        stage, (labels, predicted) = len(contents.num_seen) - 1, contents.labelled[-1]
        seen = resolved.test.rows(0, contents.num_seen[-1])
        mistakes = [
            (true, other, seen[(labels == true) & (predicted == other)].tolist())
            for true, other, _ in contents.pairs[:NUM_PAIRS]
        ]
        contents = replace(contents, pictures=write_pictures(run.path, stage, contents.exemplars, mistakes, resolved))
    write_atomically(run.path / "report.html", page(contents))
    return run.path / "report.html"


def write_page(directory: Path, resolved: Resolved | None = None) -> str:
    """Write the page and return a line that says where it is, or why it could not be written."""
    try:
        with left_alone(directory):
            return f"Report: {write_report(directory, resolved)}"
    except Exception as error:  # a page is not worth a run
        again = shlex.join(["ccfa", "report", str(directory)])
        return f"note: the report page was not written ({error}). Try again: {again}"


def page(run: Contents) -> str:
    """Return the page of a run as HTML."""
    experiment, name, sizes = run.run.experiment, run.run.path.resolve().name, run.resolved.get("stage_sizes", [])
    plugged = filter(None, [experiment.mix, "CCFA" if experiment.ccfa else None])
    settings = vars(experiment) | {
        f"number of {kind} images": run.resolved.get(f"num_{kind}_images") for kind in ("training", "test")
    }
    return render(
        "report.html",
        run=run,
        name=name,
        title=f"{' + '.join([experiment.method, *plugged])} on {experiment.data}",
        sizes=sizes,
        state=_state(run, len(sizes)),
        headlines=HEADLINES,
        definitions=DEFINITIONS,
        accuracy=accuracy_figure(run),
        matrix=matrix_figure(run),
        metrics=metrics_table(run),
        forgetting=forgetting_figure(run),
        old_new=[old_new_figure(run, "old", "a new class"), old_new_figure(run, "new", "an old class")],
        confusion=confusion_figure(run),
        pairs=run.pairs[:NUM_PAIRS],
        cost=[*loss_figures(run), time_figure(run)],
        classes=class_table(run),
        command=shlex.join(["ccfa", "run", *_arguments(run), "--out", f"runs/{name}-again"]),
        settings={key: value for key, value in settings.items() if value not in (None, False, {})},
        config=json.dumps(run.run.config, indent=1, ensure_ascii=False),
    )


def _state(run: Contents, num_stages: int) -> str:
    state, num_done = str(run.status.get("state", "unknown")), len(run.num_seen)
    finished = state == "finished" and num_done in (0, num_stages)  # 0 if the report is lost
    shown = "Finished" if finished else f"{state.capitalize()}: {num_done} of {counted(num_stages, 'stage')}"
    if times := len(run.environment.get("resumed", [])):
        shown += f", resumed {counted(times, 'time')} with another device or other versions"
    return shown + (f" ({run.status['error']})" if run.status.get("error") else "")


def _arguments(run: Contents) -> list[str]:
    """Return what `ccfa run` needs to repeat the run."""
    words = run.run.experiment.arguments()
    device, speed = run.environment.get("torch_device"), run.environment.get("acceleration")
    if device:
        words += ["--device", device]
    if speed and device != "cpu":  # where there is nothing to choose
        words += ["--precision", speed["precision"]]
        words += [f"--no-{name}" for name in ("compile", "graph") if speed[name] is False]
    return words


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
    environment.filters.update(counted=counted, duration=duration, percent=percent, plain=_plain, text=_text)
    return environment


def _text(value: Any) -> str:
    return ", ".join(f"{name}={part}" for name, part in value.items()) if isinstance(value, dict) else str(value)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def accuracy_figure(run: Contents) -> Figure:
    """Draw the accuracy after each stage by every rule of the report, the method's own first."""
    own, *others = (
        (f"by {_plain(rule)}", [100 * value for value in numbers.overall]) for rule, numbers in run.rules.items()
    )
    first = Curve(f"{own[0]}, the method's rule" if others else own[0], own[1])
    curves = [first, *(Curve(*other, colour=6, dashed=True) for other in others)]
    meaning = "Share of the test images of all classes seen so far that are predicted right, over all those classes."
    title = "Accuracy after each stage"
    return line_figure(title, meaning, "classes seen", run.num_seen, curves, "accuracy, percent")


def metrics_table(run: Contents) -> Table | None:
    """List every metric by every rule of the report, the method's own first."""
    rows = [
        [_plain(name), *(percent(numbers.metrics.get(name)) for numbers in run.rules.values())] for name in DEFINITIONS
    ]
    return (["metric", *(f"by {_plain(rule)}" for rule in run.rules)], rows) if run.num_seen else None


def matrix_figure(run: Contents) -> Figure:
    """Draw the accuracy matrix as a heat map."""
    title, meaning = "Accuracy matrix", "Row i, column j: accuracy after stage i on the classes first seen at stage j."
    matrix = _matrix(run)
    stages = [str(stage) for stage in range(len(matrix))]
    label = f"Heat map of {len(matrix)} by {len(matrix)} accuracies; the values are in the table below it."
    chart = heat_map(100 * matrix, stages, label, "after stage", "classes of stage")
    rows = [
        [stage, *("" if math.isnan(value) else percent(value, 1) for value in row)]
        for stage, row in zip(stages, matrix.tolist(), strict=True)
    ]
    return Figure(title, meaning, chart, (["after stage", *(f"classes of {stage}" for stage in stages)], rows))


def forgetting_figure(run: Contents) -> Figure:
    """Draw forgetting after each stage but the first, as if it were the last."""
    matrix = _matrix(run)
    stages = range(1, len(matrix))
    values = [100 * forgetting_max_minus_last(matrix[: stage + 1, : stage + 1]) for stage in stages]
    meaning = f"After each stage, as if it were the last: {DEFINITIONS['forgetting_max_minus_last']}.{_needs_two(run)}"
    return line_figure("Forgetting", meaning, "stage", stages, [Curve("forgetting", values)])


def _matrix(run: Contents) -> NDArray[np.float64]:
    return np.array(run.report.accuracy_matrix, dtype=np.float64)


def _needs_two(run: Contents) -> str:
    return "" if len(run.num_seen) > 1 else " It needs at least two stages."


def old_new_figure(run: Contents, which: str, other: str) -> Figure:
    """Draw what test images of old (or new) classes are predicted as, after each stage but the first."""
    shares = []
    for (labels, predicted), num_old in zip(run.labelled[1:], run.num_seen, strict=False):
        these = (labels < num_old) == (which == "old")
        right = np.mean((predicted == labels)[these])
        crossed = np.mean(((predicted < num_old) != (labels < num_old))[these])
        shares.append([float(100 * share) for share in (right, 1 - right - crossed, crossed)])
    names = ("right class", f"another {which} class", other)
    curves = [Curve(name, [share[at] for share in shares]) for at, name in enumerate(names)]
    meaning = (
        f"Share of the test images of {which} classes predicted as their own class, which is the accuracy on "
        f"{which} classes, as another {which} class, or as {other}.{_needs_two(run)}"
    )
    return line_figure(f"Test images of {which} classes", meaning, "stage", range(1, len(shares) + 1), curves)


def confusion_figure(run: Contents) -> Figure:
    """Draw the confusion matrix after the last stage, by class or, with very many classes, by stage."""
    title = "Confusion matrix after the last stage"
    if not run.labelled:
        return Figure(title, "Share of each class's test images by what they are predicted as.")
    group, lines, what = np.arange(run.num_seen[-1]), run.num_seen[:-1], "class"
    if len(group) > MAX_CLASSES:
        group, lines, what = np.searchsorted(run.num_seen, group, side="right"), [], "stage"
    counts = np.zeros((group[-1] + 1, group[-1] + 1))
    labels, predicted = run.labelled[-1]
    np.add.at(counts, (group[labels], group[predicted]), 1)
    names = [run.class_name(label, 60) if what == "class" else str(label) for label in range(len(counts))]
    chart = heat_map(
        100 * counts / counts.sum(axis=1, keepdims=True).clip(min=1),
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


def class_table(run: Contents) -> Table | None:
    """List each class: stage, test images, accuracy when learned and now, the class it is most confused with."""
    if not run.labelled:
        return None
    accuracies = []
    for (labels, predicted), num in zip(run.labelled, run.num_seen, strict=True):
        with np.errstate(invalid="ignore"):  # NaN for a class without test images
            accuracies.append(np.bincount(labels, labels == predicted, num) / np.bincount(labels, minlength=num))
    most = {true: (predicted, count) for true, predicted, count in reversed(run.pairs)}
    rows = []
    for label in range(run.num_seen[-1]):
        stage = run.stage_of(label)
        then, now = float(accuracies[stage][label]), float(accuracies[-1][label])
        row = [str(stage), str(run.num_images[label]), percent(then, 1), percent(now, 1), number(100 * (then - now))]
        other, count = most.get(label, (0, 0))
        confused = f"{run.class_name(other)} ({percent(count / run.num_images[label], 1)} %)" if count else "-"
        rows.append([run.class_name(label), *row, confused])
    return ["class", "stage", "test images", "when learned, %", "now, %", "drop, points", "most confused with"], rows


def time_figure(run: Contents) -> Figure:
    """Draw the seconds of each stage."""
    meaning = (
        f"Wall-clock seconds of each stage, evaluation included; {duration(sum(run.seconds))} in all. "
        "A first stage taken over from another run takes no time."
    )
    stages, curves = range(len(run.seconds)), [Curve("time", run.seconds)]
    return line_figure("Time", meaning, "stage", stages, curves, "seconds", " s", from_zero=True)


def loss_figures(run: Contents) -> list[Figure]:
    """Draw the loss of each phase, and the terms that it is the sum of, over all epochs of the run."""
    phases = dict.fromkeys(record["phase"] for record in run.epochs)
    by_phase = {
        phase: [record["loss"] if record["phase"] == phase else math.nan for record in run.epochs] for phase in phases
    }
    terms = dict.fromkeys(name for record in run.epochs for name in record if name not in NOT_LOSSES)
    by_term = {term: [record.get(term, math.nan) for record in run.epochs] for term in terms}
    figures = [_over_epochs(run, "Training loss", "Mean over each epoch's batches, by phase.", by_phase)]
    if len(terms) > 1:
        meaning = "Classification loss and penalties as they enter the sum, mean over each epoch."
        figures.append(_over_epochs(run, "Parts of the loss", meaning, by_term))
    return figures


def _over_epochs(run: Contents, title: str, meaning: str, losses: dict[str, list[float]]) -> Figure:
    stages = [record["stage"] for record in run.epochs]
    size = max(1, math.ceil(len(stages) / MAX_POINTS))
    places = range(0, len(stages), size)
    curves = [
        Curve(name, [_mean_of_finite(values[place : place + size]) for place in places])
        for name, values in list(losses.items())[:NUM_COLOURS]
    ]
    marks = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    marks = marks if len(marks) <= MAX_LINES else []
    meaning += f" Each point is the mean of up to {size} epochs." if size > 1 else ""
    meaning += " Hairlines separate the stages." if marks else ""
    return line_figure(title, meaning, "epoch of the run", places, curves, "loss", "", 3, marks, from_zero=True)


def _mean_of_finite(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
