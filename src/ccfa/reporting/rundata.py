"""What a page shows of a run: its directory, read leniently. A missing or damaged file becomes a note."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import ModelError
from ccfa.evaluation import Report, accuracy
from ccfa.experiments.run_directory import Run
from ccfa.files import read_arrays, read_file

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class RunData:
    """The contents of a run directory.

    `metrics` and `overall` are the report's, by rule of prediction, the method's own rule first. Without a readable
    report they are empty. `labels` and `predicted` have one array per finished stage, by the method's own rule. They
    are empty unless the predictions of all stages are there and agree with the report.
    """

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    num_seen: list[int]  # classes seen after each finished stage
    metrics: dict[str, dict[str, float]]
    overall: dict[str, list[float]]
    labels: list[NDArray[Any]]
    predicted: list[NDArray[Any]]
    seconds: list[float]  # of each stage
    epochs: list[dict[str, Any]]  # the lines of metrics.jsonl
    exemplars: list[list[int]]  # rows kept of each class after the last stage
    pictures: Arrays | None
    notes: tuple[str, ...]

    @property
    def experiment(self) -> dict[str, Any]:
        """What was asked for."""
        return self.config.get("experiment") or {}

    @property
    def resolved(self) -> dict[str, Any]:
        """What the experiment resolved to."""
        return self.config.get("resolved") or {}

    def class_name(self, label: int) -> str:
        """Return the name of a class, which is numbered as it was learned."""
        names = self.resolved.get("class_names") or []
        return str(names[label]) if label < len(names) else f"class {label}"


def read_run(path: Path) -> RunData:
    """Read everything that a page shows of a run; only a directory without a usable config.json is an error."""
    directory, notes = Run(path), []
    config = directory.read_json("config.json")
    _require_kinds(config, path / "config.json")

    def read(name: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception:  # a damaged file can make a reader fail in any way
            notes.append(f"{name} is missing or damaged.")
            return otherwise

    planned = list(accumulate((config.get("resolved") or {}).get("stage_sizes") or []))
    report = read("report.json", lambda: _report(directory, planned), None)
    num_seen, metrics, overall = report or ([], {}, {})
    nothing: list[tuple[NDArray[Any], NDArray[Any]]] = []
    predictions = read("A file of predictions", lambda: _predictions(directory, num_seen, overall), nothing)
    last = len(num_seen) - 1
    has_exemplars = (path / "exemplars" / f"stage-{last:03d}.json").exists()
    return RunData(
        name=path.resolve().name,
        config=config,
        environment=read("environment.json", lambda: directory.read_json("environment.json"), {}),
        status=read("status.json", lambda: directory.read_json("status.json"), {}),
        num_seen=num_seen,
        metrics=metrics,
        overall=overall,
        labels=[labels for labels, _ in predictions],
        predicted=[predicted for _, predicted in predictions],
        seconds=read("stages.csv", lambda: _seconds(path / "stages.csv"), []),
        epochs=read("metrics.jsonl", lambda: _epochs(path / "metrics.jsonl"), []),
        exemplars=read("The file of exemplars", lambda: directory.read_exemplars(last), []) if has_exemplars else [],
        pictures=read_pictures(path, last),
        notes=tuple(notes),
    )


def read_pictures(path: Path, stage: int) -> Arrays | None:
    """Read the thumbnails stored after a stage; None where there are none, or those of another stage."""
    try:
        arrays = read_arrays(path / "pictures.npz")
        shapes = {"exemplar_classes": (len(arrays["exemplars"]),), "mistake_pairs": (len(arrays["mistakes"]), 2)}
        for name in ("exemplars", "mistakes"):
            _, height, width, channels = arrays[name].shape
            if arrays[name].dtype != np.uint8 or not (0 < height <= 256 and 0 < width <= 256 and channels in (1, 3)):
                return None
        fits = int(arrays["stage"]) == stage and all(arrays[name].shape == shape for name, shape in shapes.items())
        return arrays if fits else None
    except Exception:  # as above
        return None


def as_number(content: Any) -> float:
    """Return a number from a file, NaN for anything else."""
    try:
        return float(content)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _require_kinds(config: dict[str, Any], path: Path) -> None:
    """Refuse a configuration that cannot be one, since everything else is read by it."""
    experiment, resolved = (config.get(name) or {} for name in ("experiment", "resolved"))
    if isinstance(experiment, dict) and isinstance(resolved, dict):
        sizes, names = (resolved.get(name) or [] for name in ("stage_sizes", "class_names"))
        if isinstance(names, list) and isinstance(sizes, list) and all(type(n) is int and n > 0 for n in sizes):
            return
    raise ModelError(
        f"{path} does not say what was run: expected the objects experiment and resolved, and in the latter the lists "
        "stage_sizes and class_names. It is damaged or not of a run."
    )


def _report(
    directory: Run, planned: list[int]
) -> tuple[list[int], dict[str, dict[str, float]], dict[str, list[float]]]:
    """Read the report: classes seen, metrics and accuracies by rule, the method's own rule first."""
    report: Report = directory.report()
    rules = sorted(report.rules, key=lambda rule: rule != report.own)
    overall = {rule: report.rules[rule].overall for rule in rules}
    num_seen = report.num_seen
    grows = all(type(seen) is int and before < seen < 10**9 for before, seen in pairwise([0, *num_seen]))
    if not num_seen or not grows or (planned and num_seen != planned[: len(num_seen)]):
        raise ModelError("It should have the stages of config.json.")
    if any(len(values) != len(num_seen) for values in overall.values()):
        raise ModelError("There should be an accuracy after each stage.")
    return num_seen, {rule: report.rules[rule].metrics for rule in rules}, overall


def _predictions(
    directory: Run, num_seen: list[int], overall: dict[str, list[float]]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Read the labels and predictions of each stage; an error unless their accuracy is that of the report."""
    found = []
    for stage, seen in enumerate(num_seen):
        rule = next(iter(overall))
        arrays = directory.read_predictions(stage)
        labels, predicted = arrays["labels"], arrays[f"by_{rule}"]
        for values in (labels, predicted):
            if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= seen:
                raise ModelError(f"Labels and predictions should be integers from 0 to {seen - 1}.")
        if len(np.unique(labels)) < seen:
            raise ModelError("Some class has no test image.")
        if not math.isclose(accuracy(predicted, labels), overall[rule][stage], abs_tol=1e-9):
            raise ModelError("The predictions are not those of the report.")
        found.append((labels, predicted))
    return found


def _seconds(path: Path) -> list[float]:
    lines = read_file(path).decode().splitlines(keepends=True)
    return [as_number(row.get("seconds")) for row in csv.DictReader(lines)]


def _epochs(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl; a line that is not whole is left out, since a run may be killed as it writes."""
    records = []
    for line in read_file(path).decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("stage"), int):
            records.append(record)
    return records
