"""Accuracy and forgetting, each under a name that says which definition it is.

Stages k = 0..K-1; A[i,j] is the accuracy after stage i on test images of the classes first seen at stage j.
Predictions are made over all classes seen so far, without being told the stage. Values are fractions of one.
With one stage there is nothing old and nothing new: forgetting, new- and old-class accuracy are NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import DataError

DEFINITIONS: dict[str, str] = {
    "average_incremental_accuracy": "mean over all stages, the first included, of the accuracy on seen classes",
    "last_accuracy": "accuracy on all classes after the last stage",
    "forgetting_max_minus_last": "mean over stages j before the last of max_i A[i,j] - A[last,j], "
    "i from j to the last but one (Chaudhry et al. 2018)",
    "forgetting_first_minus_last": "mean over stages j before the last of A[j,j] - A[last,j]",
    "forgetting_lee2019": "mean over stages s after stage 0 of the sum over earlier stages r of "
    "(classes of r / classes seen at s) * (A[r,r] - A[s,r]) (FGT, Lee et al. 2019)",
    "forgetting_inclearn": "sum over tens of classes g, in learning order, of max_i a[i,g] - a[last,g], i before the "
    "last stage, divided by the number of tens + 1; a[i,g] is the accuracy after stage i on the classes of g seen by "
    "then, the maximum at least 0 (printed by PODNet's published code)",
    "new_class_accuracy": "mean over stages k after stage 0 of A[k,k]",
    "old_class_accuracy": "mean over stages after stage 0 of the accuracy on all test images of old classes",
}


def accuracy(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Share of images whose predicted class is their label: (1/N) sum_n [predictions_n = labels_n]."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if labels.ndim != 1 or predictions.shape != labels.shape:
        raise DataError(
            f"Predictions of shape {predictions.shape} do not fit labels of shape {labels.shape}. "
            "Expected one predicted class per image: two vectors of the same length."
        )
    if labels.size == 0:
        raise DataError("Accuracy needs at least one image, got none. Check that the test set is not empty.")
    return float(np.mean(predictions == labels))


def overall_accuracies(predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Accuracy on all seen classes after each stage, [K]."""
    if len(predictions) != len(labels) or len(labels) == 0:
        raise DataError(
            f"Got predictions of {len(predictions)} stages and labels of {len(labels)}. "
            "Expected one vector of each per stage, and at least one stage."
        )
    return np.array([accuracy(*pair) for pair in zip(predictions, labels, strict=True)])


def accuracy_matrix(
    predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], boundaries: Sequence[int]
) -> NDArray[np.float64]:
    """A[i, j], accuracy after stage i on the classes first seen at stage j; NaN for j > i, [K, K].

    `boundaries` is num_seen of each stage, e.g. [5, 6, 7]; labels are contiguous, old classes first.
    """
    overall_accuracies(predictions, labels)
    _check_boundaries(boundaries, len(labels))
    matrix = np.full((len(boundaries), len(boundaries)), np.nan)
    for i, num_seen in enumerate(boundaries):
        predicted, true = np.asarray(predictions[i]), np.asarray(labels[i])
        _check_classes(predicted, "predictions", i, num_seen)
        _check_classes(true, "labels", i, num_seen)
        first_seen = np.searchsorted(boundaries, true, side="right")
        num_images = np.bincount(first_seen, minlength=i + 1)
        if not num_images.all():
            raise DataError(
                f"After stage {i} there is no test image of the classes first seen at stage "
                f"{num_images.argmin()}. Every stage needs some: add images, or merge it with another."
            )
        matrix[i, : i + 1] = np.bincount(first_seen, weights=predicted == true, minlength=i + 1) / num_images
    return matrix


def average_incremental_accuracy(overall: Sequence[float] | NDArray[np.float64]) -> float:
    """Plain mean of the overall accuracies of all K stages, stage 0 included (Rebuffi et al. 2017)."""
    return float(np.mean(_per_stage(overall)))


def last_accuracy(overall: Sequence[float] | NDArray[np.float64]) -> float:
    """Accuracy on all classes after the last stage."""
    return float(_per_stage(overall)[-1])


def forgetting_max_minus_last(matrix: NDArray[np.float64]) -> float:
    """1/(K-1) sum_{j<K-1} (max_{j<=i<=K-2} A[i,j] - A[K-1,j]): the last stage is not in the maximum.

    Chaudhry et al., "Riemannian Walk for Incremental Learning", ECCV 2018.
    Negative where accuracy rose at the end.
    """
    matrix = _check_matrix(matrix)
    last = len(matrix) - 1
    return _mean([matrix[j:last, j].max() - matrix[last, j] for j in range(last)])


def forgetting_first_minus_last(matrix: NDArray[np.float64]) -> float:
    """1/(K-1) sum_{j<K-1} (A[j,j] - A[K-1,j]): minus the backward transfer of Lopez-Paz & Ranzato 2017."""
    matrix = _check_matrix(matrix)
    return _mean(np.diagonal(matrix)[:-1] - matrix[-1, :-1])


def forgetting_lee2019(matrix: NDArray[np.float64], boundaries: Sequence[int]) -> float:
    """FGT = 1/(t-1) sum_{s=2..t} sum_{r=1..s-1} |T_r|/|T_{1:s}| (A_{r,r} - A_{r,s}), which the paper cites.

    Lee, Lee, Shin & Lee, "Overcoming Catastrophic Forgetting with Unlabeled Data in the Wild", ICCV 2019.
    Stages count from 1; A_{r,s}, the accuracy on stage r's classes after stage s, is our matrix[s-1, r-1];
    |T| counts classes.
    """
    matrix = _check_matrix(matrix)
    _check_boundaries(boundaries, len(matrix))
    num_classes = np.diff(boundaries, prepend=0)
    drops = np.diagonal(matrix) - matrix  # [s, r]
    # The authors' plotting script weighs by all classes of the run and divides by t; this is the equation.
    return _mean([float(num_classes[:s] @ drops[s, :s]) / boundaries[s] for s in range(1, len(matrix))])


def forgetting_inclearn(predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]]) -> float:
    """1/(G+1) sum_{g<G} (max_{i<K-1} a[i,g] - a[K-1,g]), a[i,g] the accuracy on classes 10g to 10g+9 seen by stage i.

    What PODNet's and AFC's published code (inclearn) prints as forgetting, whatever the stages are. As there,
    accuracies are rounded to 3 decimals, a group that is new at the last stage has a maximum of 0, and the overall
    accuracy counts as one more group. (That code prints 0 for a single stage; here it is NaN.)
    """
    overall_accuracies(predictions, labels)
    groups = [_accuracies_of_tens(*pair) for pair in zip(predictions, labels, strict=True)]
    if len(groups) == 1:
        return math.nan
    last = groups.pop()
    best = [max([0.0, *(stage[group] for stage in groups if group < len(stage))]) for group in range(len(last))]
    return sum(high - low for high, low in zip(best, last, strict=True)) / (len(last) + 1)


def new_class_accuracy(matrix: NDArray[np.float64]) -> float:
    """Mean over stages k >= 1 of A[k,k], the accuracy on classes just learned ("average new accuracy")."""
    return _mean(np.diagonal(_check_matrix(matrix))[1:])


def old_class_accuracy(
    predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], boundaries: Sequence[int]
) -> float:
    """Mean over stages k >= 1 of the accuracy on the test images of all classes seen before stage k.

    Every image of a stage counts the same; A alone does not tell how many images there are.
    """
    overall_accuracies(predictions, labels)
    _check_boundaries(boundaries, len(labels))
    values = []
    for k in range(1, len(boundaries)):
        old = np.asarray(labels[k]) < boundaries[k - 1]
        values.append(accuracy(np.asarray(predictions[k])[old], np.asarray(labels[k])[old]))
    return _mean(values)


def summary(
    predictions: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], boundaries: Sequence[int]
) -> dict[str, float]:
    """Every metric of `DEFINITIONS` by name, from the predictions after each stage."""
    overall = overall_accuracies(predictions, labels)
    matrix = accuracy_matrix(predictions, labels, boundaries)
    return {
        "average_incremental_accuracy": average_incremental_accuracy(overall),
        "last_accuracy": last_accuracy(overall),
        "forgetting_max_minus_last": forgetting_max_minus_last(matrix),
        "forgetting_first_minus_last": forgetting_first_minus_last(matrix),
        "forgetting_lee2019": forgetting_lee2019(matrix, boundaries),
        "forgetting_inclearn": forgetting_inclearn(predictions, labels),
        "new_class_accuracy": new_class_accuracy(matrix),
        "old_class_accuracy": old_class_accuracy(predictions, labels, boundaries),
    }


def _accuracies_of_tens(predictions: NDArray[Any], labels: NDArray[Any]) -> list[float]:
    tens = np.asarray(labels) // 10
    num_right, num_images = np.bincount(tens, np.asarray(predictions) == labels), np.bincount(tens)
    return [round(value, 3) for value in (num_right / num_images.clip(min=1)).tolist()]


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _per_stage(overall: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.asarray(overall, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise DataError(f"Expected one accuracy per stage, got an array of shape {values.shape}.")
    return values


def _check_matrix(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    matrix = np.asarray(matrix, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise DataError(f"Expected an accuracy matrix [K, K], one row and one column per stage, got {matrix.shape}.")
    if np.isnan(matrix[np.tril_indices(len(matrix))]).any():
        raise DataError(
            "The accuracy matrix has a NaN on or below its diagonal. Expected an accuracy after every stage "
            "(row) on the classes of that stage and all earlier ones; make it with accuracy_matrix()."
        )
    return matrix


def _check_boundaries(boundaries: Sequence[int], num_stages: int) -> None:
    if len(boundaries) != num_stages:
        raise DataError(f"Got {len(boundaries)} boundaries for {num_stages} stages. Expected num_seen of each stage.")
    if (np.diff(boundaries, prepend=0) < 1).any():
        raise DataError(
            f"Boundaries {list(boundaries)} do not grow. Expected the number of classes seen after each "
            "stage, for example [5, 6, 7]; not the number of new classes."
        )


def _check_classes(classes: NDArray[Any], kind: str, stage: int, num_seen: int) -> None:
    if classes.dtype.kind not in "iu":
        raise DataError(f"The {kind} of stage {stage} are {classes.dtype}. Expected integer class numbers.")
    if classes.min() < 0 or classes.max() >= num_seen:
        raise DataError(
            f"The {kind} of stage {stage} lie in {classes.min()}..{classes.max()}. "
            f"Expected 0..{num_seen - 1}, the classes seen by then. "
            "Keep only their test images, and number classes as they are learned."
        )
