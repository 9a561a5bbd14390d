"""Metrics and the record of a finished run: arrays in, numbers out."""

from ccfa.evaluation.metrics import (
    DEFINITIONS,
    accuracy,
    accuracy_matrix,
    average_incremental_accuracy,
    forgetting_first_minus_last,
    forgetting_inclearn,
    forgetting_lee2019,
    forgetting_max_minus_last,
    last_accuracy,
    new_class_accuracy,
    old_class_accuracy,
    overall_accuracies,
    summary,
)
from ccfa.evaluation.report import Report, matrix_rows, mean_and_spread, standard_error

__all__ = [
    "DEFINITIONS",
    "Report",
    "accuracy",
    "accuracy_matrix",
    "average_incremental_accuracy",
    "forgetting_first_minus_last",
    "forgetting_inclearn",
    "forgetting_lee2019",
    "forgetting_max_minus_last",
    "last_accuracy",
    "matrix_rows",
    "mean_and_spread",
    "new_class_accuracy",
    "old_class_accuracy",
    "overall_accuracies",
    "standard_error",
    "summary",
]
