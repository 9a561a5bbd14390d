"""What a run's stages amount to: predictions after each, and the tables and the report made of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.data import ImageSet, Stage
from ccfa.errors import ModelError
from ccfa.evaluation import Report, accuracy, accuracy_matrix, matrix_rows, overall_accuracies, summary
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.methods import Method
from ccfa.methods.method import by_nearest_mean


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

    def add_stored(self, directory: Run, stage: Stage) -> None:
        """Take a stage's predictions as they were written down."""
        arrays = directory.read_predictions(stage.index)
        if missing := {"labels", "by_logits"} - arrays.keys():
            raise ModelError(f"The predictions of stage {stage.index} in {directory.path} lack {', '.join(missing)}.")
        self.num_seen.append(stage.num_seen)
        self.labels.append(arrays["labels"])
        self.by_logits.append(arrays["by_logits"])
        if "by_nearest_mean" in arrays:
            self.by_nearest_mean.append(arrays["by_nearest_mean"])

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

    def report(self, directory: Run, seconds: float, finished: bool) -> Report:
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


def write_results(
    directory: Run, evaluations: Evaluations, rows: list[dict[str, Any]], num_stages: int, seconds: float
) -> Report:
    """Write the tables and the report of the stages done, each whole."""
    report = evaluations.report(directory, seconds, len(rows) == num_stages)
    directory.write_rows("stages.csv", rows)
    directory.write_rows("accuracy_matrix.csv", _matrix_table(report.accuracy_matrix))
    if nearest := evaluations.matrix_by_nearest_mean():
        directory.write_rows("accuracy_matrix_by_nearest_mean.csv", _matrix_table(nearest))
    directory.write_report(report)
    directory.set_status("running", stages_done=len(rows), num_stages=num_stages)
    return report


def _matrix_table(matrix: list[list[float | None]]) -> list[dict[str, Any]]:
    """The accuracy matrix with a heading: a row a stage, a column for the classes of each stage."""
    columns = [f"classes_of_stage_{index}" for index in range(len(matrix))]
    return [{"after_stage": index, **dict(zip(columns, row, strict=True))} for index, row in enumerate(matrix)]
