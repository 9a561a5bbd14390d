"""Slow NumPy versions of AFC's formulas, written from the paper's equations and the published behaviour."""

import numpy as np

from reference import Array, unit


def weighted_discrepancy(previous_maps: list[Array], maps: list[Array], importance: list[Array]) -> float:
    """As published: distance of unit vectors of squares, channel by channel; mean over channels, rows, then levels."""
    levels = []
    for previous, current, weights in zip(previous_maps, maps, importance, strict=True):
        values = []
        for old, new in zip(previous, current, strict=True):
            for c, weight in enumerate(weights):
                values.append(weight * np.linalg.norm(unit(old[c].ravel() ** 2) - unit(new[c].ravel() ** 2)))
        levels.append(np.mean(values))
    return float(np.mean(levels))


def weighted_discrepancy_paper(previous_maps: list[Array], maps: list[Array], importance: list[Array]) -> float:
    """The paper's L_disc: sum over levels and channels of I E |Z' - Z|_F^2."""
    total = 0.0
    for previous, current, weights in zip(previous_maps, maps, importance, strict=True):
        for c, weight in enumerate(weights):
            squares = [np.sum((old[c] - new[c]) ** 2) for old, new in zip(previous, current, strict=True)]
            total += weight * float(np.mean(squares))
    return total


def importance(gradients: list[list[Array]]) -> list[Array]:
    """Of each level, |g_c|_F^2 averaged over the rows of a batch, added over batches, divided by the channels' mean.

    `gradients` has one list of levels a batch, each (rows, channels, height, width).
    """
    result = []
    for level in range(len(gradients[0])):
        num_channels = gradients[0][level].shape[1]
        totals = np.zeros(num_channels)
        for batch in gradients:
            for c in range(num_channels):
                totals[c] += np.mean([np.sum(row[c] ** 2) for row in batch[level]])
        result.append(totals / totals.mean())
    return result
