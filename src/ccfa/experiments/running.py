"""Run an experiment: stage by stage, writing what it finds."""

import json
import time
import traceback
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ccfa.data import ImageSet, Stage
from ccfa.errors import CcfaError, DivergedError
from ccfa.evaluation import (
    Report,
    accuracy,
    accuracy_matrix,
    matrix_rows,
    overall_accuracies,
    summary,
)
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages, first_stage_key
from ccfa.experiments.rundir import RunDirectory, write_atomically
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.acceleration import Acceleration, memory_errors_explained
from ccfa.methods import Method
from ccfa.methods.method import by_nearest_mean


class Audience(Observer, Protocol):
    """Who watches a run: the learner's steps, and each stage's result."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """After a stage was evaluated."""
        ...


class Recorder:
    """Writes metrics.jsonl, one line an epoch, and passes everything on."""

    def __init__(self, directory: RunDirectory, audience: Audience) -> None:
        self.directory = directory
        self.audience = audience

    def on_batch(self, progress: Progress, losses: dict[str, torch.Tensor]) -> None:
        """Pass it on."""
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Write the epoch down and pass it on."""
        images = progress.num_batches * progress.batch_size
        record = {
            "stage": progress.stage.index,
            "phase": progress.phase,
            "epoch": progress.epoch,
            "lr": lr,
            "images_per_second": round(images / max(seconds, 1e-9), 1),
            **losses,
        }
        self.directory.append("metrics.jsonl", json.dumps(record))
        self.audience.on_epoch(progress, losses, lr, seconds)


def run(
    resolved: Resolved,
    directory: RunDirectory,
    audience: Audience,
    device: torch.device,
    acceleration: Acceleration | None = None,
    first_stages: FirstStages | None = None,
) -> Report:
    """Learn all stages, evaluate after each, and leave everything in the run directory."""
    acceleration = acceleration or Acceleration.for_device(device)
    try:
        with memory_errors_explained(resolved.method.phases(resolved.stages[0])[0].batch_size):
            report = _learn_all(resolved, directory, audience, device, acceleration, first_stages)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, and how the command line ends on SIGTERM
        directory.set_status("interrupted")
        raise
    except Exception as error:
        directory.set_status("failed", error=str(error))
        directory.append("log.txt", f"error: {error}" if isinstance(error, CcfaError) else traceback.format_exc())
        raise
    directory.set_status("finished")
    return report


def _learn_all(
    resolved: Resolved,
    directory: RunDirectory,
    audience: Audience,
    device: torch.device,
    acceleration: Acceleration,
    first_stages: FirstStages | None,
) -> Report:
    experiment = resolved.experiment
    learner = Learner(
        resolved.method,
        resolved.train,
        seed=experiment.seed,
        batch_seed=experiment.batch_seed,
        device=device,
        observer=Recorder(directory, audience),
        acceleration=acceleration,
    )
    test = resolved.test.to(device)
    evaluations = Evaluations(resolved.method)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for stage in resolved.stages:
        started = time.monotonic()
        if stage.index == 0 and first_stages:
            first_stages.learn(learner, stage, first_stage_key(resolved, acceleration, device))
        else:
            learner.learn(stage)
        _require_finite(learner.network, stage)
        seen = test.subset(test.rows(0, stage.num_seen))
        evaluations.add(learner, seen, stage)
        seconds = time.monotonic() - started
        rows.append({**evaluations.row(stage), "exemplars": len(learner.memory), "seconds": round(seconds, 2)})
        report = evaluations.report(directory, time.monotonic() - began, len(rows) == len(resolved.stages))
        directory.write_predictions(stage.index, evaluations.arrays())
        directory.write_network(stage.index, learner.network)
        directory.write_rows("stages.csv", rows)
        directory.write_rows("accuracy_matrix.csv", _matrix_table(report.accuracy_matrix))
        if nearest := evaluations.matrix_by_nearest_mean():
            directory.write_rows("accuracy_matrix_by_nearest_mean.csv", _matrix_table(nearest))
        write_atomically(directory.path / "report.json", report.to_json())
        directory.set_status("running", stages_done=len(rows), num_stages=len(resolved.stages))
        directory.append("log.txt", json.dumps(rows[-1]))
        audience.on_stage(stage, rows[-1])
    return report


def _require_finite(network: torch.nn.Module, stage: Stage) -> None:
    """The last step of a stage can break the weights unseen: no loss is computed after it."""
    broken = [name for name, tensor in network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise DivergedError(
            f"After stage {stage.index} the weights {broken[0]} are no longer finite numbers; "
            f"the stage is not kept. Try a smaller learning rate."
        )


class Evaluations:
    """The predictions after each stage so far, and what they amount to."""

    def __init__(self, method: Method) -> None:
        self.own_rule_is_nearest_mean = method.predict is by_nearest_mean
        self.num_seen: list[int] = []
        self.labels: list[NDArray[np.int64]] = []
        self.by_logits: list[NDArray[np.int64]] = []
        self.by_nearest_mean: list[NDArray[np.int64]] = []

    def add(self, learner: Learner, test: ImageSet, stage: Stage) -> None:
        """Predict the test images of all seen classes."""
        self.num_seen.append(stage.num_seen)
        self.labels.append(test.labels.cpu().numpy())
        self.by_logits.append(learner.predict_by_logits(test.images).cpu().numpy())
        if len(learner.memory):
            self.by_nearest_mean.append(learner.predict_by_nearest_mean(test.images).cpu().numpy())

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """The last stage's labels and predictions."""
        arrays = {"labels": self.labels[-1], "by_logits": self.by_logits[-1]}
        return arrays | ({"by_nearest_mean": self.by_nearest_mean[-1]} if self.by_nearest_mean else {})

    def matrix_by_nearest_mean(self) -> list[list[float | None]]:
        """The accuracy matrix of the nearest-mean rule; empty for a method without exemplars."""
        if not self.by_nearest_mean:
            return []
        return matrix_rows(accuracy_matrix(self.by_nearest_mean, self.labels, self.num_seen))

    def row(self, stage: Stage) -> dict[str, Any]:
        """The last stage's line of stages.csv, accuracies as fractions, by the method's own rule first."""
        labels = self.labels[-1]
        predictions = (self.by_nearest_mean if self.own_rule_is_nearest_mean else self.by_logits)[-1]
        old = labels < stage.num_old
        return {
            "stage": stage.index,
            "num_seen": stage.num_seen,
            "accuracy": accuracy(predictions, labels),
            "new_accuracy": accuracy(predictions[~old], labels[~old]),
            "old_accuracy": accuracy(predictions[old], labels[old]) if stage.num_old else None,
            "logits_accuracy": accuracy(self.by_logits[-1], labels),
            "nearest_mean_accuracy": (accuracy(self.by_nearest_mean[-1], labels) if self.by_nearest_mean else None),
        }

    def report(self, directory: RunDirectory, seconds: float, finished: bool) -> Report:
        """Everything so far as a report."""
        nearest = self.by_nearest_mean
        return Report(
            name=directory.path.name,
            config=directory.read_json("config.json"),
            num_seen=self.num_seen,
            overall=overall_accuracies(self.by_logits, self.labels).tolist(),
            accuracy_matrix=matrix_rows(accuracy_matrix(self.by_logits, self.labels, self.num_seen)),
            metrics=summary(self.by_logits, self.labels, self.num_seen),
            metrics_by_nearest_mean=summary(nearest, self.labels, self.num_seen) if nearest else None,
            overall_by_nearest_mean=overall_accuracies(nearest, self.labels).tolist() if nearest else None,
            environment=directory.read_json("environment.json"),
            seconds=seconds,
            finished=finished,
        )


def _matrix_table(matrix: list[list[float | None]]) -> list[dict[str, Any]]:
    """The accuracy matrix with a heading: a row a stage, a column for the classes of each stage."""
    columns = [f"classes_of_stage_{index}" for index in range(len(matrix))]
    return [{"after_stage": index, **dict(zip(columns, row, strict=True))} for index, row in enumerate(matrix)]
