"""Who is taken for whom: old and new classes after each stage, pairs of classes after the last."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccfa.reporting.rundata import RunData

NUM_PAIRS = 10
MAX_CLASSES = 128  # of a confusion matrix by class; with more it is one by stage of arrival


class Pair(NamedTuple):
    """Test images of one class predicted as another: how many, their share of the class, and which they are."""

    true: int
    predicted: int
    num_images: int
    share: float
    rows: list[int]  # among the last stage's test images


class OldNew(NamedTuple):
    """After a stage, shares of the test images of old classes and of those of new ones, by what they are taken for."""

    stage: int
    old_right: float
    old_as_other_old: float
    old_as_new: float
    new_right: float
    new_as_other_new: float
    new_as_old: float


def confusion_counts(run: RunData) -> NDArray[np.int64]:
    """How many test images of each class (row) are predicted as each class (column) after the last stage."""
    num_seen = run.num_seen[-1]
    places = run.labels[-1].astype(np.int64) * num_seen + run.predicted(run.own_rule)[-1]
    return np.bincount(places, minlength=num_seen**2).reshape(num_seen, num_seen)


def confused_pairs(run: RunData) -> list[Pair]:
    """The pairs with the most test images, ties by learning order."""
    if not run.predictions:
        return []
    counts = confusion_counts(run)
    totals = counts.sum(axis=1)
    labels, predicted = run.labels[-1], run.predicted(run.own_rule)[-1]
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    largest = np.argsort(-wrong, axis=None, kind="stable")[:NUM_PAIRS].tolist()
    pairs = []
    for place in largest:
        true, other = divmod(place, len(counts))
        if wrong[true, other]:
            rows = np.flatnonzero((labels == true) & (predicted == other)).tolist()
            pairs.append(Pair(true, other, len(rows), len(rows) / int(totals[true]), rows))
    return pairs


def by_stage(counts: NDArray[np.int64], num_seen: list[int]) -> NDArray[np.int64]:
    """The counts summed over the classes of each stage, rows and columns."""
    starts = [0, *num_seen[:-1]]
    return np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)


def old_and_new(run: RunData) -> list[OldNew]:
    """Shares for each stage after the first."""
    found = []
    for stage in range(1, len(run.predictions)):
        labels, predicted = run.labels[stage], run.predicted(run.own_rule)[stage]
        num_old = run.num_seen[stage - 1]
        old, right, as_old = labels < num_old, labels == predicted, predicted < num_old

        def share(which: NDArray[np.bool_], of: NDArray[np.bool_]) -> float:
            return float(np.mean(which[of]))

        found.append(
            OldNew(
                stage,
                share(right, old),
                share(as_old & ~right, old),
                share(~as_old, old),
                share(right, ~old),
                share(~as_old & ~right, ~old),
                share(as_old, ~old),
            )
        )
    return found
