"""The record of a run, as one small JSON file, and means over several of them."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import DataError, ModelError

FORMAT = 1

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "config": (dict,),
    "num_seen": (list,),
    "overall": (list,),
    "accuracy_matrix": (list,),
    "metrics": (dict,),
    "metrics_by_nearest_mean": (dict, type(None)),
    "overall_by_nearest_mean": (list, type(None)),
    "environment": (dict,),
    "seconds": (int, float),
    "finished": (bool,),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run was, where it ran and what came out; `config` and `environment` hold plain JSON values."""

    name: str
    config: dict[str, Any]
    num_seen: list[int]
    overall: list[float]
    accuracy_matrix: list[list[float | None]]  # None above the diagonal
    metrics: dict[str, float]
    metrics_by_nearest_mean: dict[str, float] | None
    overall_by_nearest_mean: list[float] | None
    environment: dict[str, Any]  # commit, versions, device
    seconds: float
    finished: bool
    format: int = FORMAT  # of the file; fields that a later format adds are left out when it is read here

    @property
    def own_rule(self) -> str:
        """How the method itself predicts."""
        resolved = self.config.get("resolved")
        method = resolved.get("method") if isinstance(resolved, dict) else None
        by_mean = isinstance(method, dict) and method.get("predict") == "by_nearest_mean"
        nearest = by_mean and self.metrics_by_nearest_mean is not None
        return "nearest mean" if nearest else "logits"

    @property
    def own_metrics(self) -> dict[str, float]:
        """The metrics by the method's own rule."""
        nearest = self.metrics_by_nearest_mean if self.own_rule == "nearest mean" else None
        return nearest or self.metrics

    @property
    def own_overall(self) -> list[float]:
        """The accuracy on seen classes after each stage, by the method's own rule."""
        nearest = self.overall_by_nearest_mean if self.own_rule == "nearest mean" else None
        return nearest or self.overall

    def to_json(self) -> str:
        """The report as JSON, one line per field so that reports compare line by line; NaN is null."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for key in ("metrics", "metrics_by_nearest_mean"):
            fields[key] = _nan_to_none(fields[key])
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
        """The report that some version's `to_json` wrote; anything else is an error that names the field."""
        try:
            fields = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"This is not a report: not valid JSON ({error}). Is the file cut off?") from error
        if not isinstance(fields, dict):
            raise ModelError(f"This is not a report: expected a JSON object, got a {type(fields).__name__}.")
        if missing := sorted(_JSON_TYPES.keys() - fields.keys()):
            raise ModelError(f"This is not a report of a run: it has no {', '.join(missing)}.")
        fields = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        for key, types in _JSON_TYPES.items():
            if type(fields[key]) not in types:
                expected = " or ".join(expected.__name__ for expected in types)
                raise ModelError(f"Report field {key!r} is a {type(fields[key]).__name__}, expected {expected}.")
        for key in ("num_seen", "overall", "overall_by_nearest_mean", "seconds"):
            _require_numbers(key, fields[key])
        for key in ("metrics", "metrics_by_nearest_mean"):
            fields[key] = _none_to_nan(fields[key])
            _require_numbers(key, list((fields[key] or {}).values()))
        return cls(**{**fields, "seconds": float(fields["seconds"])})


def matrix_rows(matrix: NDArray[np.float64]) -> list[list[float | None]]:
    """The accuracy matrix as a report stores it, NaN as None; `np.array(rows, dtype=float)` reads it back."""
    return [[None if math.isnan(value) else value for value in row] for row in np.asarray(matrix).tolist()]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over runs; the deviation of one run is NaN."""
    if len(values) == 0:
        raise DataError("A mean needs at least one value, got none.")
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean, s / sqrt(n) with s the sample standard deviation; NaN for one value."""
    return mean_and_spread(values)[1] / math.sqrt(len(values))


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _require_numbers(key: str, content: Any) -> None:
    """Refuse anything else in a list of numbers, and integers that no float can hold."""
    for value in content if isinstance(content, list) else [content or 0]:
        if type(value) not in (int, float) or abs(value) > sys.float_info.max:
            raise ModelError(f"Report field {key!r} holds {value!r:.60}, expected a number. Is the file damaged?")


def _nan_to_none(metrics: dict[str, float] | None) -> dict[str, float | None] | None:
    if metrics is None:
        return None
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def _none_to_nan(metrics: dict[str, float | None] | None) -> dict[str, float] | None:
    if metrics is None:
        return None
    return {name: math.nan if value is None else value for name, value in metrics.items()}
