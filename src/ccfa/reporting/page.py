"""report.html: a run as one self-contained page.

The page is made from the files of the run directory alone, so that making it again gives the same bytes. The headline
numbers, the accuracy matrix and forgetting are those of report.json. What is shown of single classes comes from the
stored predictions. A file that is missing or damaged becomes a note on the page.
"""

import base64
import hashlib
import io
import json
import math
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from ccfa.data import ImageSet
from ccfa.errors import ModelError
from ccfa.evaluation import COSTS, DEFINITIONS, METRICS, Numbers, Report, forgetting_max_minus_last
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.run_directory import Run, left_alone
from ccfa.files import csv_text, read_arrays, write_arrays, write_atomically
from ccfa.learning.progress import duration
from ccfa.reporting.charts import NUM_COLOURS, Curve, Figure, heat_map, line_figure
from ccfa.reporting.tables import (
    Table,
    cost_texts,
    counted,
    method_name,
    metric_name,
    metrics_table,
    number,
    own_first,
    percent,
    plain,
)

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]
Labelled = tuple[NDArray[Any], NDArray[Any]]
HEADLINES = {name: metric.headline for name, metric in METRICS.items() if metric.headline}
PICTURES = "pictures.npz"  # the thumbnails of the page
NUM_PAIRS = 10
MAX_CLASSES = 128  # of a confusion matrix by class; with more it is one by stage
MAX_LINES = 25  # between stages; more would hide what they separate
MAX_POINTS = 400  # of a line; more cannot be told apart on a screen
MAX_PER_CLASS = 10  # thumbnails
MAX_PER_PAIR = 5
MAX_EXEMPLAR_BYTES = 2 * 2**20
MAX_WRONG_FILES = 1000
NOT_LOSSES = {"stage", "phase", "epoch", "lr", "images_per_second", "loss"}
NO_REPORT = Report("", {}, [], "", {"": Numbers([], {})}, {}, math.nan, finished=False)


class Contents:
    """What the page shows of a run; only a directory without a usable config.json is an error."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.notes: list[str] = []
        self.resolved: dict[str, Any] = run.config.get("resolved", {})
        self.report = self._read("report.json", run.report, NO_REPORT)
        self.num_seen = self.report.num_seen
        self.environment: dict[str, Any] = self._read("environment.json", lambda: run.environment, {})
        self.status: dict[str, Any] = self._read("status.json", lambda: run.status, {})
        # Labels and predictions after each stage; empty if those of one are missing.
        self.labelled: list[Labelled] = self._read("A file of predictions", self._predictions, [])
        self.seconds: list[float] = self._read("stages.csv", self._seconds, [])
        self.epochs: list[dict[str, Any]] = self._read("metrics.jsonl", run.read_epochs, [])
        self.exemplars: list[list[int]] = []  # rows kept of each class after the last stage
        last = len(self.num_seen) - 1
        if last >= 0:
            self.exemplars = self._read("The file of exemplars", lambda: run.read_exemplars(last), [])
        self.pictures = read_pictures(run.path, last)

    def _read(self, name: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception:  # a damaged file can make a reader fail in any way
            self.notes.append(f"{name} is missing or damaged.")
            return otherwise

    def _predictions(self) -> list[Labelled]:
        stages = [self.run.read_predictions(stage) for stage in range(len(self.num_seen))]
        return [(arrays["labels"], arrays[f"by_{self.report.own}"]) for arrays in stages]

    def _seconds(self) -> list[float]:
        return [float(row["seconds"]) for row in self.run.read_rows("stages.csv")]

    @property
    def last(self) -> str:
        """After what the latest numbers are: "the last stage", or "3 of 6 stages" of an unfinished run."""
        num_done, num = len(self.num_seen), len(self.resolved.get("stage_sizes", []))
        return "the last stage" if num_done in (0, num) else f"{num_done} of {counted(num, 'stage')}"

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """The accuracies of `Report.accuracy_matrix`; NaN above the diagonal."""
        return np.array(self.report.accuracy_matrix, dtype=np.float64)

    @cached_property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Confused pairs after the last stage: true class, predicted class, test images; the most images first."""
        # Only pairs that occur: with thousands of classes, a matrix of all pairs would not fit into memory.
        both = zip(*self.labelled[-1], strict=True) if self.labelled else ()
        counts = Counter((int(true), int(predicted)) for true, predicted in both if true != predicted)
        return sorted(((*pair, count) for pair, count in counts.items()), key=lambda one: (-one[2], one[:2]))

    @cached_property
    def num_images(self) -> list[int]:
        return [int(num) for num in np.bincount(self.labelled[-1][0], minlength=self.num_seen[-1])]

    def picture(self, kind: str, *key: int) -> str:
        """Return thumbnails as the address of an image: "exemplars" of a class, or "mistakes" of a confused pair."""
        if self.pictures is None:
            return ""
        keys = self.pictures["exemplar_classes" if kind == "exemplars" else "mistake_pairs"]
        return strip(self.pictures[kind][(keys.reshape(-1, len(key)) == key).all(axis=1)])

    def stage_of(self, label: int) -> int:
        return bisect_right(self.num_seen, label)

    def class_name(self, label: int, at_most: int = 255) -> str:
        name = str(self.resolved["class_names"][label])
        return name if len(name) <= at_most else name[: at_most - 1] + "…"


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
    contents = Contents(run if isinstance(run, Run) else Run(run))
    path = contents.run.path / "report.html"
    if resolved and contents.labelled:
        contents.pictures = write_pictures(contents, resolved)
    write_atomically(path, page(contents))
    return path


def write_page(directory: Path, resolved: Resolved | None = None) -> str:
    """Write the page and return a line that says where it is, or why it could not be written."""
    try:
        with left_alone(directory):
            return f"Report: {write_report(directory, resolved)}"
    except Exception as error:  # a page is not worth a run
        again = shlex.join(["ccfa", "report", str(directory)])
        return f"note: the report page was not written ({error}). Try again: {again}"


def page(run: Contents) -> str:
    experiment, name, sizes = run.run.experiment, run.run.path.resolve().name, run.resolved.get("stage_sizes", [])
    settings = vars(experiment) | {
        f"number of {kind} images": run.resolved.get(f"num_{kind}_images") for kind in ("training", "test")
    }
    return render(
        "report.html",
        run=run,
        name=name,
        title=f"{method_name(experiment)} on {experiment.data}",
        sizes=sizes,
        state=_state(run, len(sizes)),
        headlines=HEADLINES,
        costs=[(COSTS[name], text) for name, text in cost_texts(run.report).items()],
        definitions=DEFINITIONS,
        metric_name=metric_name,
        accuracy=accuracy_figure(run),
        matrix=matrix_figure(run),
        metrics=metrics_table(run.report) if run.num_seen else None,
        other_metrics=metrics_table(run.report, others=True) if run.num_seen else None,
        forgetting=forgetting_figure(run),
        old_new=[old_new_figure(run, "old", "a new class"), old_new_figure(run, "new", "an old class")],
        confusion=confusion_figure(run),
        pairs=run.pairs[:NUM_PAIRS],
        cost=[*loss_figures(run), time_figure(run)],
        classes=class_table(run),
        wrong=wrong_table(run),
        command=_command(run, name),
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


def _command(run: Contents, name: str) -> str:
    words = ["ccfa", "run", *run.run.experiment.arguments()]
    device, speed = run.environment.get("torch_device"), run.environment.get("acceleration")
    if device:
        words += ["--device", device]
    if speed and device != "cpu":  # where there is nothing to choose
        words += ["--precision", speed["precision"]]
        words += [f"--no-{option}" for option in ("compile", "graph") if speed[option] is False]
    return shlex.join([*words, "--out", f"runs/{name}-again"])


def render(template: str, **values: Any) -> str:
    """Fill a template; on a page, every value is escaped unless it is Markup."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ccfa.reporting"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sources = files("ccfa.reporting") / "templates"
    style, script = ((sources / name).read_text(encoding="utf-8").strip() for name in ("style.css", "script.js"))
    # The policy names this script by its hash: one that a class name smuggled in would be refused.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(style=Markup(style), script=Markup(script), script_hash=digest)
    environment.filters.update(counted=counted, duration=duration, percent=percent, plain=plain, text=_text)
    return environment


def _text(value: Any) -> str:
    return ", ".join(f"{name}={part}" for name, part in value.items()) if isinstance(value, dict) else str(value)


def accuracy_figure(run: Contents) -> Figure:
    """Draw the accuracy after each stage by every rule of the report, the method's own first."""
    rules, curves = own_first(run.report), []
    for rule, numbers in rules.items():
        is_own = rule == run.report.own
        name = f"by {plain(rule)}" + (", the method's rule" if is_own and len(rules) > 1 else "")
        values = [100 * value for value in numbers.overall]
        curves.append(Curve(name, values, colour=0 if is_own else 6, dashed=not is_own))
    meaning = "Share of the test images of all classes seen so far that are predicted right, over all those classes."
    title = "Accuracy after each stage"
    return line_figure(title, meaning, "classes seen", run.num_seen, curves, "accuracy, percent")


def matrix_figure(run: Contents) -> Figure:
    meaning = "Row i, column j: accuracy after stage i on the classes first seen at stage j."
    stages = [str(stage) for stage in range(len(run.matrix))]
    label = f"Heat map of {len(stages)} by {len(stages)} accuracies; the values are in the table below it."
    chart = heat_map(100 * run.matrix, stages, label, "after stage", "classes of stage")
    rows = [
        [stage, *("" if math.isnan(value) else percent(value, 1) for value in row)]
        for stage, row in zip(stages, run.matrix.tolist(), strict=True)
    ]
    table = Table(["after stage", *(f"classes of {stage}" for stage in stages)], rows)
    return Figure("Accuracy matrix", meaning, chart, table)


def forgetting_figure(run: Contents) -> Figure:
    """Draw forgetting after each stage but the first, as if it were the last."""
    stages = range(1, len(run.matrix))
    values = [100 * forgetting_max_minus_last(run.matrix[: stage + 1, : stage + 1]) for stage in stages]
    meaning = f"After each stage, as if it were the last: {DEFINITIONS['forgetting_max_minus_last']}.{_needs_two(run)}"
    return line_figure("Forgetting", meaning, "stage", stages, [Curve("forgetting", values)])


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
    title = f"Confusion matrix after {run.last}"
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
    headings = ["class", "stage", "test images", "when learned, %", "now, %", "drop, points", "most confused with"]
    return Table(headings, rows)


def wrong_table(run: Contents) -> Table | None:
    """List the files of the test images that were predicted wrong, if the data are a folder of images."""
    if run.pictures is None or "wrong_files" not in run.pictures:
        return None
    labels, predicted = run.labelled[-1]
    wrong = np.flatnonzero(labels != predicted).tolist()
    rows = [
        [str(file), run.class_name(labels[row]), run.class_name(predicted[row])]
        for file, row in zip(run.pictures["wrong_files"], wrong, strict=False)
    ]
    return Table(["photo", "true class", "predicted class"], rows)


def time_figure(run: Contents) -> Figure:
    meaning = (
        f"Wall-clock seconds of each stage, evaluation included; {duration(sum(run.seconds))} in all. "
        "A first stage that was taken from another run counts with the time of its training there."
    )
    stages, curves = range(len(run.seconds)), [Curve("time", run.seconds)]
    return line_figure("Time", meaning, "stage", stages, curves, "seconds", " s", from_zero=True)


def loss_figures(run: Contents) -> list[Figure]:
    """Draw the loss of each phase, and the terms that it is the sum of, over all epochs of the run."""
    by_phase = [{record["phase"]: record["loss"]} for record in run.epochs]
    by_term = [{name: loss for name, loss in record.items() if name not in NOT_LOSSES} for record in run.epochs]
    figures = [_over_epochs(run, "Training loss", "Mean over each epoch's batches, by phase.", by_phase)]
    if len({name for losses in by_term for name in losses}) > 1:
        meaning = "Classification loss and penalties as they enter the sum, mean over each epoch."
        figures.append(_over_epochs(run, "Parts of the loss", meaning, by_term))
    return figures


def _over_epochs(run: Contents, title: str, meaning: str, losses: list[dict[str, float]]) -> Figure:
    """Draw the losses that each epoch has."""
    stages = [record["stage"] for record in run.epochs]
    size = max(1, math.ceil(len(stages) / MAX_POINTS))
    places = range(0, len(stages), size)
    curves = []
    for name in list(dict.fromkeys(name for epoch in losses for name in epoch))[:NUM_COLOURS]:
        values = [epoch.get(name, math.nan) for epoch in losses]
        curves.append(Curve(name, [_mean_of_finite(values[place : place + size]) for place in places]))
    marks = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    marks = marks if len(marks) <= MAX_LINES else []
    meaning += f" Each point is the mean of up to {size} epochs." if size > 1 else ""
    meaning += " Hairlines separate the stages." if marks else ""
    meaning += " This run trained no epoch of the first stage." if stages and stages[0] else ""
    return line_figure(title, meaning, "epoch of the run", places, curves, "loss", "", 3, marks, from_zero=True)


def _mean_of_finite(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def write_pictures(run: Contents, resolved: Resolved) -> Arrays:
    """Store and return thumbnails of the exemplars of each class, and of test images of the most confused pairs.

    All wrong photos of a folder are listed in wrong.csv.
    """
    side = 24 if len(run.exemplars) > 250 else 48
    channels, height, width = resolved.train.shape
    num_bytes = channels * min(height, side) * min(width, side)
    per_class = max(1, min(MAX_PER_CLASS, MAX_EXEMPLAR_BYTES // (num_bytes * max(len(run.exemplars), 1))))
    chosen = [(label, row) for label, rows in enumerate(run.exemplars) for row in rows[:per_class]]
    chosen = chosen[: MAX_EXEMPLAR_BYTES // num_bytes]
    seen, (labels, predicted) = resolved.test.rows(0, run.num_seen[-1]), run.labelled[-1]
    mistaken = [
        (true, other, row)
        for true, other, _ in run.pairs[:NUM_PAIRS]
        for row in seen[(labels == true) & (predicted == other)][:MAX_PER_PAIR].tolist()
    ]
    arrays = {
        "stage": np.array(len(run.num_seen) - 1),
        "exemplars": _thumbnails(resolved.train, [row for _, row in chosen], side),
        "exemplar_classes": np.array([label for label, _ in chosen], dtype=np.int64),
        "mistakes": _thumbnails(resolved.test, [row for *_, row in mistaken], 48),
        "mistake_pairs": np.array([pair for *pair, _ in mistaken], dtype=np.int64).reshape(-1, 2),
    }
    if resolved.test.files:
        wrong = np.flatnonzero(labels != predicted)
        files = [resolved.test.files[row] for row in seen[torch.from_numpy(wrong)].tolist()]
        arrays["wrong_files"] = np.array(files[:MAX_WRONG_FILES], dtype=np.str_)
        names = [map(run.class_name, of[wrong].tolist()) for of in (labels, predicted)]
        rows = zip(files, *names, strict=True)
        write_atomically(run.run.path / "wrong.csv", csv_text([("file", "class", "predicted"), *rows]))
    write_arrays(run.run.path / PICTURES, arrays)
    return arrays


def read_pictures(path: Path, stage: int) -> Arrays | None:
    """Return the thumbnails stored after a stage, or None if there are none of this stage."""
    try:
        arrays = read_arrays(path / PICTURES)
    except ModelError:
        return None
    return arrays if arrays["stage"] == stage else None


def strip(thumbnails: NDArray[np.uint8]) -> str:
    """Return thumbnails (n, height, width, channels) side by side as the data address of a PNG; empty for none."""
    if not len(thumbnails):
        return ""
    row = np.concatenate(list(thumbnails), axis=1)
    content = io.BytesIO()
    Image.fromarray(row[..., 0] if row.shape[2] == 1 else row).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _thumbnails(images: ImageSet, rows: Sequence[int], side: int) -> NDArray[np.uint8]:
    channels, height, width = images.shape
    size = (min(width, side), min(height, side))
    arrays = images.images[torch.tensor(rows, dtype=torch.int64)].permute(0, 2, 3, 1).cpu().numpy()
    scaled = [Image.fromarray(array.squeeze(2) if channels == 1 else array).resize(size) for array in arrays]
    return np.array(scaled, dtype=np.uint8).reshape(len(rows), size[1], size[0], channels)
