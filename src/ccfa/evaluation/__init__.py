"""Metrics and the record of a finished run: arrays in, numbers out."""

from ccfa.evaluation.metrics import DEFINITIONS, METRICS, accuracy, forgetting_max_minus_last, mean_and_spread
from ccfa.evaluation.report import BYTES_PER_MB, COSTS, SIZES, Numbers, Report, rule_name

__all__ = [
    "BYTES_PER_MB",
    "COSTS",
    "DEFINITIONS",
    "METRICS",
    "SIZES",
    "Numbers",
    "Report",
    "accuracy",
    "forgetting_max_minus_last",
    "mean_and_spread",
    "rule_name",
]
