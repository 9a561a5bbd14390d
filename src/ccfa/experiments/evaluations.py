"""The results of a run: predictions after each stage, and the tables and the report made of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.data import ImageSet, Stage
from ccfa.evaluation import Numbers, Report, accuracy, rule_name
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.methods import Method


class Evaluations:
    """The labels and predictions after each stage so far, by the method's own rule, by logits and by nearest mean."""

    def __init__(self, method: Method) -> None:
        self.own = rule_name(method.predict)
        self.num_seen: list[int] = []
        self.stages: list[dict[str, NDArray[np.int64]]] = []

    def add(self, learner: Learner, test: ImageSet, stage: Stage) -> None:
        """Predict the test images of all seen classes."""
        rules = {"logits": learner.predict_by_logits}
        if len(learner.memory):
            rules["nearest_mean"] = learner.predict_by_nearest_mean
        rules[self.own] = learner.predict
        predictions = {f"by_{name}": rule(test.images).cpu().numpy() for name, rule in rules.items()}
        self._append(stage, {"labels": test.labels.cpu().numpy(), **predictions})

    def add_stored(self, directory: Run, stage: Stage) -> None:
        """Take a stage's predictions from the run directory."""
        self._append(stage, directory.read_predictions(stage.index))

    def _append(self, stage: Stage, arrays: dict[str, NDArray[np.int64]]) -> None:
        self.num_seen.append(stage.num_seen)
        self.stages.append(arrays)

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """Return the last stage's labels and predictions."""
        return self.stages[-1]

    def row(self, stage: Stage) -> dict[str, Any]:
        """Return the last stage's line of stages.csv: accuracies as fractions, by the method's own rule first."""
        arrays = self.arrays()
        labels, predictions, nearest = arrays["labels"], arrays[f"by_{self.own}"], arrays.get("by_nearest_mean")
        old = labels < stage.num_old
        return {
            "stage": stage.index,
            "num_seen": stage.num_seen,
            "accuracy": accuracy(predictions, labels),
            "new_accuracy": accuracy(predictions[~old], labels[~old]),
            "old_accuracy": accuracy(predictions[old], labels[old]) if stage.num_old else None,
            "logits_accuracy": accuracy(arrays["by_logits"], labels),
            "nearest_mean_accuracy": None if nearest is None else accuracy(nearest, labels),
        }


def write_results(
    directory: Run, evaluations: Evaluations, rows: list[dict[str, Any]], num_stages: int, seconds: float
) -> Report:
    """Write the tables and the report of the stages done, and return the report."""
    stages, num_seen, own = evaluations.stages, evaluations.num_seen, evaluations.own
    labels = [arrays["labels"] for arrays in stages]
    rules = [rule for rule in dict.fromkeys(("logits", "nearest_mean", own)) if f"by_{rule}" in stages[-1]]
    report = Report(
        name=directory.path.name,
        config=directory.config,
        num_seen=num_seen,
        own=own,
        rules={rule: Numbers.of([arrays[f"by_{rule}"] for arrays in stages], labels, num_seen) for rule in rules},
        environment=directory.environment,
        seconds=seconds,
        finished=len(rows) == num_stages,
    )
    directory.write_rows("stages.csv", rows)
    for rule, numbers in report.rules.items():
        name = "accuracy_matrix.csv" if rule == own else f"accuracy_matrix_by_{rule}.csv"
        directory.write_rows(name, _matrix_table(numbers.accuracy_matrix))
    directory.write_report(report)
    directory.set_status("running", stages_done=len(rows), num_stages=num_stages)
    return report


def _matrix_table(matrix: list[list[float | None]]) -> list[dict[str, Any]]:
    """The accuracy matrix with a heading: one row per stage, one column for the classes of each stage."""
    columns = [f"classes_of_stage_{index}" for index in range(len(matrix))]
    return [{"after_stage": index, **dict(zip(columns, row, strict=True))} for index, row in enumerate(matrix)]
