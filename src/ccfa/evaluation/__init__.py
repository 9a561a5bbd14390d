"""Metrics and the record of a finished run: arrays in, numbers out."""

from ccfa.evaluation.metrics import (
    DEFINITIONS,
    METRICS,
    accuracy,
    accuracy_matrix,
    forgetting_max_minus_last,
    mean_and_spread,
    overall_accuracies,
    summary,
)
from ccfa.evaluation.report import Numbers, Report, rule_name

__all__ = [
    "DEFINITIONS",
    "METRICS",
    "Numbers",
    "Report",
    "accuracy",
    "accuracy_matrix",
    "forgetting_max_minus_last",
    "mean_and_spread",
    "overall_accuracies",
    "rule_name",
    "summary",
]
