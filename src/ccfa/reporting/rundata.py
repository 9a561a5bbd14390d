"""What a run directory holds, read leniently: whatever is missing or damaged becomes a note on the page."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import CcfaError, ModelError
from ccfa.evaluation import Report, rule_name
from ccfa.experiments.files import read_arrays, read_bounded
from ccfa.experiments.rundir import MAX_BYTES, RunDirectory

MAX_STAGES = 10**6

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class RunData:
    """A run as its directory tells it; `predictions` has an entry for each whole stage, from the first on."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    report: Report | None
    stages: list[dict[str, float]]  # the lines of stages.csv
    epochs: list[dict[str, Any]]  # the lines of metrics.jsonl
    predictions: list[Arrays]
    exemplars: list[list[int]] | None  # rows kept of each class after the last stage
    notes: tuple[str, ...]

    @property
    def experiment(self) -> dict[str, Any]:
        """What was asked for."""
        return self.config.get("experiment") or {}

    @property
    def resolved(self) -> dict[str, Any]:
        """What the experiment came to."""
        return self.config.get("resolved") or {}

    @property
    def resumed(self) -> list[dict[str, Any]]:
        """The records of being continued where something that decides the last bits had changed; of others is none."""
        records = self.environment.get("resumed")
        return [record for record in records if _object(record).get("differences")] if isinstance(records, list) else []

    @property
    def stage_sizes(self) -> list[int]:
        """How many classes each stage of the experiment brings."""
        return self.resolved.get("stage_sizes") or []

    @property
    def num_seen(self) -> list[int]:
        """How many classes are known after each stage that was evaluated."""
        return list(accumulate(self.stage_sizes))[: len(self.predictions)]

    @property
    def own_rule(self) -> str:
        """How the method itself predicts."""
        rule = f"by_{rule_name(_object(self.resolved.get('method')).get('predict'))}"
        return rule if self._has(rule) else "by_logits"

    @property
    def other_rule(self) -> str | None:
        """The other rule, where it was evaluated too."""
        other = "by_nearest_mean" if self.own_rule == "by_logits" else "by_logits"
        return other if self._has(other) else None

    def predicted(self, rule: str) -> list[NDArray[Any]]:
        """The predictions after each stage by a rule."""
        return [arrays[rule] for arrays in self.predictions]

    @property
    def labels(self) -> list[NDArray[Any]]:
        """The true classes after each stage."""
        return [arrays["labels"] for arrays in self.predictions]

    def class_name(self, label: int) -> str:
        """The name of a class, in learning order."""
        names = self.resolved.get("class_names") or []
        return str(names[label]) if label < len(names) else f"class {label}"

    def _has(self, rule: str) -> bool:
        return bool(self.predictions) and all(rule in arrays for arrays in self.predictions)


def read_run(path: Path) -> RunData:
    """Everything that a page shows of a run; only a directory without a readable config.json is an error."""
    directory = RunDirectory(path)
    config = directory.read_json("config.json")
    _require_kinds(config, path / "config.json")
    notes: list[str] = []
    predictions = _predictions(path, (config.get("resolved") or {}).get("stage_sizes") or [], notes)
    return RunData(
        name=path.resolve().name,
        config=config,
        environment=_json(directory, "environment.json", notes),
        status=_json(directory, "status.json", notes),
        report=_report(directory, notes),
        stages=_stage_rows(path / "stages.csv", notes),
        epochs=_epochs(path / "metrics.jsonl", notes),
        predictions=predictions,
        exemplars=_exemplars(directory, len(predictions) - 1),
        notes=tuple(notes),
    )


def _require_kinds(config: dict[str, Any], path: Path) -> None:
    """What everything else is told by, where it is there at all."""
    resolved = config.get("resolved")
    sizes, names = (_object(resolved).get(name) for name in ("stage_sizes", "class_names"))
    kinds = {
        "experiment, an object": _object(config.get("experiment")) == (config.get("experiment") or {}),
        "resolved, an object": _object(resolved) == (resolved or {}),
        "resolved.stage_sizes, a list of numbers from 1 on": sizes is None
        or (isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)),
        "resolved.class_names, a list": names is None or isinstance(names, list),
    }
    if wrong := [kind for kind, holds in kinds.items() if not holds]:
        raise ModelError(f"{path} does not say what was run: expected {wrong[0]}. It is damaged or not of a run.")


def _predictions(path: Path, stage_sizes: Sequence[int], notes: list[str]) -> list[Arrays]:
    found: list[Arrays] = []
    for stage, num_seen in enumerate(accumulate(stage_sizes)):
        file = path / "predictions" / f"stage-{stage:03d}.npz"
        if not file.exists():
            break
        try:
            arrays = read_arrays(file)
            _require_classes(arrays, num_seen)
        except ModelError as error:
            notes.append(f"Predictions of stage {stage} and later are not shown: {error}")
            break
        found.append(arrays)
    return found


def _require_classes(arrays: Arrays, num_seen: int) -> None:
    labels = arrays.get("labels")
    if labels is None or "by_logits" not in arrays or not labels.size:
        raise ModelError("labels or predictions are missing.")
    for values in arrays.values():
        if values.dtype.kind not in "iu" or values.shape != labels.shape or labels.ndim != 1:
            raise ModelError("labels and predictions should be whole numbers, one of each for an image.")
        if values.min() < 0 or values.max() >= num_seen:
            raise ModelError(f"labels and predictions should lie in 0 to {num_seen - 1}.")
    if len(np.unique(labels)) < num_seen:
        raise ModelError("some class has no test image.")


def _json(directory: RunDirectory, name: str, notes: list[str]) -> dict[str, Any]:
    try:
        return directory.read_json(name)
    except ModelError:
        notes.append(f"{name} is missing or damaged.")
        return {}


def _report(directory: RunDirectory, notes: list[str]) -> Report | None:
    try:
        report = directory.report()
        if not 0 < len(report.num_seen) == len(report.overall):
            raise ModelError("There should be an accuracy after each stage.")
        return report
    except ModelError:
        notes.append("report.json is missing or damaged.")
        return None


def _exemplars(directory: RunDirectory, stage: int) -> list[list[int]] | None:
    try:
        return directory.read_exemplars(stage) if stage >= 0 else None
    except CcfaError:
        return None


def _stage_rows(path: Path, notes: list[str]) -> list[dict[str, float]]:
    try:
        lines = read_bounded(path, MAX_BYTES).decode().splitlines(keepends=True)
        return [{name: as_number(text) for name, text in row.items() if name} for row in csv.DictReader(lines)]
    except (OSError, ModelError, UnicodeDecodeError, csv.Error):
        notes.append("stages.csv is missing or damaged.")
        return []


def _epochs(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Lines that are not whole are left out: a run may have been killed while it wrote one."""
    try:
        lines = read_bounded(path, MAX_BYTES).decode(errors="replace").splitlines()
    except (OSError, ModelError):
        notes.append("metrics.jsonl is missing or damaged.")
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        stage = record.get("stage") if isinstance(record, dict) else None
        if isinstance(stage, int) and 0 <= stage < MAX_STAGES:
            records.append(record)
    return records


def as_number(content: Any) -> float:
    """A number from a file, NaN for what is none."""
    try:
        return float(content)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
