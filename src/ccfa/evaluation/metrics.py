"""Accuracy and forgetting, each under a name that says which definition it is.

Stages k = 0..K-1; A[i,j] is the accuracy after stage i on test images of the classes first seen at stage j.
Predictions are made over all classes seen so far, without knowing the stage. Values are fractions of one.
With one stage there is nothing old and nothing new: forgetting, new- and old-class accuracy are NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import DataError

Classes = Sequence[NDArray[Any]]  # one vector of class numbers per stage
Floats = NDArray[np.float64]


def accuracy(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of images whose predicted class is their label.

    >>> accuracy(np.array([0, 1, 1, 0]), np.array([0, 1, 1, 1]))
    0.75
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if labels.ndim != 1 or predictions.shape != labels.shape or labels.size == 0:
        raise DataError(
            f"Predictions of shape {predictions.shape} do not fit labels of shape {labels.shape}. "
            "Expected one predicted class per image, and at least one image: two vectors of the same length."
        )
    return float(np.mean(predictions == labels))


def accuracy_matrix(predictions: Classes, labels: Classes, boundaries: Sequence[int]) -> Floats:
    """Return A[i, j], the accuracy after stage i on the classes first seen at stage j; NaN for j > i, [K, K].

    `boundaries` is num_seen of each stage, e.g. [5, 6, 7]; labels are contiguous, old classes first.
    """
    matrix = np.full((len(boundaries), len(boundaries)), np.nan)
    for i, (predicted, true, num_seen) in enumerate(zip(predictions, labels, boundaries, strict=True)):
        for classes, kind in ((predicted, "predictions"), (true, "labels")):
            if classes.min() < 0 or classes.max() >= num_seen:
                raise DataError(
                    f"The {kind} of stage {i} are in {classes.min()}..{classes.max()}. "
                    f"Expected 0..{num_seen - 1}, the classes seen by then, numbered as they are learned."
                )
        first_seen = np.searchsorted(boundaries, true, side="right")
        num_images = np.bincount(first_seen, minlength=i + 1)
        if not num_images.all():
            raise DataError(
                f"After stage {i} there is no test image of the classes first seen at stage "
                f"{num_images.argmin()}. Every stage needs some: add images, or merge it with another."
            )
        matrix[i, : i + 1] = np.bincount(first_seen, weights=predicted == true, minlength=i + 1) / num_images
    return matrix


class Evaluated(NamedTuple):
    """Predictions and labels after each stage, and the accuracies that follow: what metrics are computed from."""

    predictions: Classes
    labels: Classes
    boundaries: Sequence[int]
    overall: Floats  # after each stage, on all classes seen by then
    matrix: Floats

    @classmethod
    def of(cls, predictions: Classes, labels: Classes, boundaries: Sequence[int]) -> "Evaluated":
        """Compute the accuracies, and check that the arrays fit each other."""
        overall = np.array([accuracy(*pair) for pair in zip(predictions, labels, strict=True)])
        return cls(predictions, labels, boundaries, overall, accuracy_matrix(predictions, labels, boundaries))


def old_class_accuracy(run: Evaluated) -> float:
    """The definition in `METRICS`. Every image of a stage counts the same, so it cannot be computed from A alone."""
    accuracies = []
    for predicted, true, num_old in zip(run.predictions[1:], run.labels[1:], run.boundaries[:-1], strict=True):
        old = true < num_old
        accuracies.append(accuracy(predicted[old], true[old]))
    return _mean(accuracies)


def forgetting_max_minus_last(matrix: Floats) -> float:
    """1/(K-1) sum_{j<K-1} (max_{j<=i<=K-2} A[i,j] - A[K-1,j]): the last stage is not in the maximum.

    Chaudhry et al., "Riemannian Walk for Incremental Learning", ECCV 2018.
    Negative where accuracy rose at the end.
    """
    last = len(matrix) - 1
    return _mean([matrix[j:last, j].max() - matrix[last, j] for j in range(last)])


def forgetting_lee2019(run: Evaluated) -> float:
    """FGT = 1/(t-1) sum_{s=2..t} sum_{r=1..s-1} |T_r|/|T_{1:s}| (A_{r,r} - A_{r,s}), which the paper cites.

    Lee, Lee, Shin & Lee, "Overcoming Catastrophic Forgetting with Unlabeled Data in the Wild", ICCV 2019.
    Stages count from 1; A_{r,s}, the accuracy on stage r's classes after stage s, is our matrix[s-1, r-1];
    |T| counts classes.
    """
    num_classes = np.diff(run.boundaries, prepend=0)
    drops = np.diagonal(run.matrix) - run.matrix  # [s, r]
    # The authors' plotting script weighs by all classes of the run and divides by t; this is the equation.
    return _mean([float(num_classes[:s] @ drops[s, :s]) / run.boundaries[s] for s in range(1, len(drops))])


def forgetting_inclearn(run: Evaluated) -> float:
    """1/(G+1) sum_{g<G} (max_{i<K-1} a[i,g] - a[K-1,g]), a[i,g] the accuracy on classes 10g to 10g+9 seen by stage i.

    What PODNet's and AFC's published code (inclearn) prints as forgetting, whatever the stages are. As there,
    accuracies are rounded to 3 decimals, a group that is new at the last stage has a maximum of 0, and the overall
    accuracy counts as one more group. (That code prints 0 for a single stage; here it is NaN.)
    """
    *earlier, last = map(_accuracies_of_tens, run.predictions, run.labels)
    if not earlier:
        return math.nan
    best = [max([0.0, *(stage[group] for stage in earlier if group < len(stage))]) for group in range(len(last))]
    return sum(high - low for high, low in zip(best, last, strict=True)) / (len(last) + 1)


def _accuracies_of_tens(predictions: NDArray[Any], labels: NDArray[Any]) -> list[float]:
    tens = labels // 10
    num_right, num_images = np.bincount(tens, predictions == labels), np.bincount(tens)
    return [round(value, 3) for value in (num_right / num_images.clip(min=1)).tolist()]


class Metric(NamedTuple):
    """A number that is computed for every run."""

    definition: str
    of: Callable[[Evaluated], float]
    column: str = ""  # the heading in a comparison; without one it is shown only where it is asked for
    headline: str = ""  # its name at the top of a run's page; without one it is not shown there
    name: str = ""  # in tables of all metrics; by default the words of its key


# To add a metric, add an entry here: reports, tables and comparisons take it from this list.
METRICS: dict[str, Metric] = {
    "average_incremental_accuracy": Metric(  # Rebuffi et al. 2017
        "mean over all stages, the first included, of the accuracy on seen classes",
        lambda run: _mean(run.overall),
        "average",
        "average incremental accuracy",
    ),
    "last_accuracy": Metric(
        "accuracy on all classes after the last stage",
        lambda run: float(run.overall[-1]),
        "last",
        "accuracy after the last stage",
    ),
    "new_class_accuracy": Metric(
        "mean over stages k after stage 0 of A[k,k]",
        lambda run: _mean(np.diagonal(run.matrix)[1:]),
        "new",
        "new-class accuracy",
    ),
    "old_class_accuracy": Metric(
        "mean over stages after stage 0 of the accuracy on all test images of old classes",
        old_class_accuracy,
        "old",
    ),
    "forgetting_max_minus_last": Metric(
        "mean over stages j before the last of max_i A[i,j] - A[last,j], i from j to the last but one "
        "(Chaudhry et al. 2018)",
        lambda run: forgetting_max_minus_last(run.matrix),
        "forgetting",
        "forgetting",
        "forgetting",
    ),
    "forgetting_first_minus_last": Metric(  # minus the backward transfer of Lopez-Paz & Ranzato 2017
        "mean over stages j before the last of A[j,j] - A[last,j]",
        lambda run: _mean(np.diagonal(run.matrix)[:-1] - run.matrix[-1, :-1]),
        name="forgetting (first minus last)",
    ),
    "forgetting_lee2019": Metric(
        "mean over stages s after stage 0 of the sum over earlier stages r of "
        "(classes of r / classes seen at s) * (A[r,r] - A[s,r]) (FGT, Lee et al. 2019)",
        forgetting_lee2019,
        name="forgetting (Lee et al. 2019)",
    ),
    "forgetting_inclearn": Metric(
        "sum over tens of classes g, in learning order, of max_i a[i,g] - a[last,g], i before the last stage, "
        "divided by the number of tens + 1; a[i,g] is the accuracy after stage i on the classes of g seen by "
        "then, the maximum at least 0 (printed by PODNet's published code)",
        forgetting_inclearn,
        name="forgetting (PODNet's code)",
    ),
}
DEFINITIONS = {name: metric.definition for name, metric in METRICS.items()}


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (n - 1); NaN for the mean of nothing and the deviation of one value."""
    return _mean(values), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.mean(values)) if len(values) else math.nan
