"""What a run's stages amount to: predictions after each, and the tables and the report made of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.data import ImageSet, Stage
from ccfa.errors import ModelError
from ccfa.evaluation import Numbers, Report, accuracy, rule_name
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.methods import Method


class Evaluations:
    """The predictions after each stage so far, by the method's own rule, by logits and by nearest mean."""

    def __init__(self, method: Method) -> None:
        self.own = rule_name(method.predict)
        self.num_seen: list[int] = []
        self.labels: list[NDArray[np.int64]] = []
        self.rules: dict[str, list[NDArray[np.int64]]] = {}

    def add(self, learner: Learner, test: ImageSet, stage: Stage) -> None:
        """Predict the test images of all seen classes."""
        rules = {"logits": learner.predict_by_logits}
        if len(learner.memory):
            rules["nearest_mean"] = learner.predict_by_nearest_mean
        rules[self.own] = learner.predict
        self._append(
            stage, test.labels.cpu().numpy(), {name: rule(test.images).cpu().numpy() for name, rule in rules.items()}
        )

    def add_stored(self, directory: Run, stage: Stage) -> None:
        """Take a stage's predictions as they were written down."""
        arrays = directory.read_predictions(stage.index)
        if missing := {"labels", "by_logits", f"by_{self.own}"} - arrays.keys():
            raise ModelError(f"The predictions of stage {stage.index} in {directory.path} lack {', '.join(missing)}.")
        labels = arrays.pop("labels")
        names = sorted(arrays, key=lambda name: (name != "by_logits", name != "by_nearest_mean"))
        self._append(stage, labels, {rule_name(name): arrays[name] for name in names})

    def _append(self, stage: Stage, labels: NDArray[np.int64], predictions: Mapping[str, NDArray[np.int64]]) -> None:
        self.num_seen.append(stage.num_seen)
        self.labels.append(labels)
        for rule, predicted in predictions.items():
            self.rules.setdefault(rule, []).append(predicted)

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """The last stage's labels and predictions."""
        return {"labels": self.labels[-1]} | {f"by_{rule}": stages[-1] for rule, stages in self.rules.items()}

    def row(self, stage: Stage) -> dict[str, Any]:
        """The last stage's line of stages.csv, accuracies as fractions, by the method's own rule first."""
        labels, predictions = self.labels[-1], self.rules[self.own][-1]
        old = labels < stage.num_old
        nearest = self.rules.get("nearest_mean")
        return {
            "stage": stage.index,
            "num_seen": stage.num_seen,
            "accuracy": accuracy(predictions, labels),
            "new_accuracy": accuracy(predictions[~old], labels[~old]),
            "old_accuracy": accuracy(predictions[old], labels[old]) if stage.num_old else None,
            "logits_accuracy": accuracy(self.rules["logits"][-1], labels),
            "nearest_mean_accuracy": accuracy(nearest[-1], labels) if nearest else None,
        }

    def report(self, directory: Run, seconds: float, finished: bool) -> Report:
        """Everything so far as a report."""
        return Report(
            name=directory.path.name,
            config=directory.read_json("config.json"),
            num_seen=self.num_seen,
            own=self.own,
            rules={name: Numbers.of(stages, self.labels, self.num_seen) for name, stages in self.rules.items()},
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
    for rule, numbers in report.rules.items():
        name = "accuracy_matrix.csv" if rule == report.own else f"accuracy_matrix_by_{rule}.csv"
        directory.write_rows(name, _matrix_table(numbers.accuracy_matrix))
    directory.write_report(report)
    directory.set_status("running", stages_done=len(rows), num_stages=num_stages)
    return report


def _matrix_table(matrix: list[list[float | None]]) -> list[dict[str, Any]]:
    """The accuracy matrix with a heading: one row per stage, one column for the classes of each stage."""
    columns = [f"classes_of_stage_{index}" for index in range(len(matrix))]
    return [{"after_stage": index, **dict(zip(columns, row, strict=True))} for index, row in enumerate(matrix)]
