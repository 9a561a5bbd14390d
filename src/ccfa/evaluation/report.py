"""The record of a run, as one small JSON file: numbers by rule of prediction, and where they come from."""

import dataclasses
import json
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from numpy.typing import NDArray

from ccfa.errors import ModelError
from ccfa.evaluation.metrics import accuracy_matrix, overall_accuracies, summary

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a rule of prediction gives: accuracies as fractions of one."""

    overall: list[float]  # after each stage, on the classes seen by then
    metrics: dict[str, float]  # NaN where a metric has no value
    accuracy_matrix: list[list[float | None]] = dataclasses.field(default_factory=list)  # None above the diagonal

    @classmethod
    def of(
        cls, predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], num_seen: Sequence[int]
    ) -> "Numbers":
        """The numbers of the predictions after each stage."""
        matrix = accuracy_matrix(predictions, labels, num_seen).tolist()
        rows = [[None if math.isnan(value) else value for value in row] for row in matrix]
        return cls(overall_accuracies(predictions, labels).tolist(), summary(predictions, labels, num_seen), rows)


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

    def to_json(self) -> str:
        """The report as JSON, one line per field so that reports compare line by line; NaN is null."""
        fields = dataclasses.asdict(self)
        for numbers in fields["rules"].values():
            metrics = numbers["metrics"]
            numbers["metrics"] = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        try:
            lines = [f'  "{key}": {json.dumps(value, allow_nan=False)}' for key, value in fields.items()]
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"Report {self.name!r} cannot be written as JSON: {error}. "
                "Expected text, finite numbers, booleans, None, lists and dictionaries; convert the rest."
            ) from error
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that this or an earlier version wrote; unknown fields are ignored.

        Raises:
            ModelError: if the text is not a report. The message names the field.
        """
        try:
            fields = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"This is not a report: not valid JSON ({error}). Is the file cut off?") from error
        if isinstance(fields, dict) and "rules" not in fields:
            fields = _from_format_1(fields)
        report: Report = _decoded(fields, cls, "report")
        if report.own not in report.rules:
            raise ModelError(f"This report has no numbers by its method's own rule, {report.own!r}.")
        return report


def rule_name(predict: Any) -> str:
    """The name of a rule of prediction: that of its function, "logits" for `by_logits`.

    A description of the function, as a configuration holds it, will do.

    >>> rule_name("by_nearest_mean"), rule_name(max)
    ('nearest_mean', 'max')
    """
    part = predict.get("part") if isinstance(predict, Mapping) else getattr(predict, "func", predict)
    name = part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
    return str(name).removeprefix("by_")


def _from_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of today: format 1 had those of the logits at the top, and no name of the method's own rule."""
    rules = {"logits": fields}
    if fields.get("metrics_by_nearest_mean") is not None:
        rules["nearest_mean"] = {
            "overall": fields.get("overall_by_nearest_mean"),
            "metrics": fields["metrics_by_nearest_mean"],
        }
    try:
        own = rule_name(fields["config"]["resolved"]["method"]["predict"])
    except (KeyError, TypeError):
        own = "logits"
    return {**fields, "own": own if own in rules else "logits", "rules": rules, "format": FORMAT}


def _decoded(value: Any, kind: Any, place: str) -> Any:
    """A JSON value as the type that a field is declared with; null is NaN where a number is expected in a mapping."""
    kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    if kind is Any or (value is None and types.NoneType in kinds):
        return value
    kind, origin = kinds[0], get_origin(kinds[0])
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        required = [name for name, field in fields.items() if field.default is field.default_factory]
        if missing := sorted(set(required) - value.keys()):
            raise ModelError(f"This is not a report of a run: {place} has no {', '.join(missing)}.")
        return kind(**{name: _decoded(value[name], hints[name], name) for name in fields if name in value})
    if origin is dict and isinstance(value, dict):
        item = get_args(kind)[1]
        return {
            name: math.nan if one is None and item is float else _decoded(one, item, place)
            for name, one in value.items()
        }
    if origin is list and isinstance(value, list):
        return [_decoded(one, get_args(kind)[0], place) for one in value]
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is kind:
        return value
    raise ModelError(
        f"Report field {place!r} holds {value!r:.60}, expected {getattr(kind, '__name__', kind)}. Is the file damaged?"
    )


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
