"""The record of a run, as one small JSON file: numbers by rule of prediction, and where they come from."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ccfa.errors import ModelError
from ccfa.evaluation.metrics import METRICS, Evaluated

FORMAT = 2
BYTES_PER_MB = 10**6


class Cost(NamedTuple):
    """A number that says what a run costs, beside what it reaches."""

    heading: str
    definition: str
    decimals: int


COSTS: dict[str, Cost] = {
    "parameters_mb": Cost(
        "parameters MB", "megabytes (10^6 bytes) of the network after the last stage: its weights and its buffers", 3
    ),
    "remembered_mb": Cost(
        "remembered MB", "megabytes that the loss terms keep for later stages, such as the means of classes", 3
    ),
    "exemplars_mb": Cost(
        "exemplars MB", "megabytes of the exemplars after the last stage, one byte per pixel and channel", 3
    ),
    "minutes": Cost(
        "minutes",
        "wall-clock time of all stages, evaluation included; a first stage taken from another run counts with the time "
        "that its training took there, or with zero in reports made before that was stored",
        2,
    ),
}
SIZES = [name for name in COSTS if name.endswith("_mb")]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The accuracies, as fractions of one, and metrics of one rule of prediction."""

    overall: list[float]  # after each stage, on the classes seen by then
    metrics: dict[str, float]  # NaN where a metric has no value
    accuracy_matrix: list[list[float | None]] = dataclasses.field(default_factory=list)  # None above the diagonal

    @classmethod
    def of(
        cls, predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], num_seen: Sequence[int]
    ) -> "Numbers":
        """Compute the numbers of the predictions after each stage.

        >>> import numpy as np
        >>> labels = [np.array([0, 1]), np.array([0, 1, 2])]
        >>> numbers = Numbers.of([np.array([0, 1]), np.array([0, 2, 2])], labels, num_seen=[2, 3])
        >>> numbers.metrics["forgetting_max_minus_last"]
        0.5
        """
        run = Evaluated.of(predictions, labels, num_seen)
        matrix = [[None if math.isnan(value) else value for value in row] for row in run.matrix.tolist()]
        return cls(run.overall.tolist(), {name: metric.of(run) for name, metric in METRICS.items()}, matrix)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Numbers":
        return cls(
            overall=[float(value) for value in fields["overall"]],
            metrics={name: math.nan if value is None else float(value) for name, value in fields["metrics"].items()},
            accuracy_matrix=[
                [None if value is None else float(value) for value in row] for row in fields.get("accuracy_matrix", [])
            ],
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run was, where it ran and what came out; `config` and `environment` hold plain JSON values.

    `rules` has the numbers by each rule of prediction that was evaluated: "logits", "nearest_mean" or the name of a
    method's own rule. `own` is the rule of the method; `overall`, `metrics` and `accuracy_matrix` are by this rule.
    """

    name: str
    config: dict[str, Any]
    num_seen: list[int]
    own: str
    rules: dict[str, Numbers]
    environment: dict[str, Any]  # commit, versions, device
    seconds: float
    finished: bool
    parameters_mb: float | None = None  # these three are None in reports of earlier versions; see COSTS
    remembered_mb: float | None = None
    exemplars_mb: float | None = None
    format: int = FORMAT  # of the file; fields that a later format adds are left out when it is read here

    @property
    def overall(self) -> list[float]:
        """The accuracy on seen classes after each stage, by the method's own rule."""
        return self.rules[self.own].overall

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by the method's own rule."""
        return self.rules[self.own].metrics

    @property
    def accuracy_matrix(self) -> list[list[float | None]]:
        """The accuracy after each stage (row) on each stage's classes (column), by the method's own rule."""
        return self.rules[self.own].accuracy_matrix

    @property
    def minutes(self) -> float:
        """The time of all stages."""
        return self.seconds / 60

    @property
    def costs(self) -> dict[str, float]:
        """The numbers of COSTS; NaN where one is unknown."""
        values = {name: getattr(self, name) for name in COSTS}
        return {name: math.nan if value is None else value for name, value in values.items()}

    def to_json(self) -> str:
        """Return the report as JSON, one line per field so that reports compare line by line; NaN is null."""
        fields = dataclasses.asdict(self)
        for numbers in fields["rules"].values():
            metrics = numbers["metrics"]
            numbers["metrics"] = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        lines = [f'  "{key}": {json.dumps(value, allow_nan=False)}' for key, value in fields.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that this or an earlier version wrote; unknown fields are ignored.

        Raises:
            ModelError: If the text is not a report.
        """
        try:
            fields = json.loads(text, parse_constant=_refuse_constant)
            if "rules" not in fields and "overall" in fields:
                fields = _from_format_1(fields)
            report = cls(
                name=str(fields["name"]),
                config=dict(fields["config"]),
                num_seen=[int(value) for value in fields["num_seen"]],
                own=str(fields["own"]),
                rules={rule: Numbers.from_fields(numbers) for rule, numbers in fields["rules"].items()},
                environment=dict(fields["environment"]),
                seconds=float(fields["seconds"]),
                finished=bool(fields["finished"]),
                **{name: float(fields[name]) for name in SIZES if fields.get(name) is not None},
                format=int(fields["format"]),
            )
            _ = report.rules[report.own]
        except KeyError as error:
            raise ModelError(f"This is not a report of a run: {error} is missing. Is the file damaged?") from error
        except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise ModelError(f"This is not a report of a run: {error}. Is the file cut off or damaged?") from error
        return report


def rule_name(predict: Any) -> str:
    """Return the name of a rule of prediction: that of its function, "logits" for `by_logits`.

    A description of the function, as a configuration holds it, has the same name.

    >>> rule_name("by_nearest_mean"), rule_name(max)
    ('nearest_mean', 'max')
    """
    part = predict.get("part") if isinstance(predict, Mapping) else getattr(predict, "func", predict)
    name = part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
    return str(name).removeprefix("by_")


def _from_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of today: format 1 had the numbers by logits at the top, and no name of the own rule."""
    rules = {"logits": fields}
    if fields.get("metrics_by_nearest_mean") is not None:
        by_mean = {"overall": fields["overall_by_nearest_mean"], "metrics": fields["metrics_by_nearest_mean"]}
        rules["nearest_mean"] = by_mean
    own = rule_name(fields["config"]["resolved"]["method"]["predict"])
    return {**fields, "own": own if own in rules else "logits", "rules": rules, "format": FORMAT}


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
