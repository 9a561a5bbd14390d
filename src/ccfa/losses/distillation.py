"""Distillation penalties L_dist between the previous network's features and the current ones."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def pod_spatial(previous: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor:
    """POD-spatial as published code computes it: mean over levels and rows of || n(p(A'^2)) - n(p(A^2)) ||_2.

    p sums the squared map over its width and over its height and concatenates; n normalises the whole vector of a row.
    """
    distances = [
        row_norm(_pooled(_squares(old)) - _pooled(_squares(new))) for old, new in zip(previous, current, strict=True)
    ]
    return torch.stack([distance.mean() for distance in distances]).mean()


def pod_spatial_paper(previous: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor:
    """POD-width + POD-height as the paper writes them: absolute differences of the summed maps, summed over levels."""
    total = current[0].new_zeros(())
    for old, new in zip(previous, current, strict=True):
        for dim in (3, 2):
            difference = old.sum(dim=dim) - new.sum(dim=dim)
            total = total + difference.abs().flatten(1).sum(dim=1).mean()
    return total


def weighted_discrepancy(previous: Sequence[Tensor], current: Sequence[Tensor], importance: Sequence[Tensor]) -> Tensor:
    """AFC's loss as published code computes it: mean over levels, rows and channels of I_c || u(A'_c) - u(A_c) ||_2.

    u squares a channel of a row and normalises it over its positions; `importance` has one value per channel, by level.
    """
    distances = [
        (weights * row_norm(_unit_channels(old) - _unit_channels(new))).mean()
        for old, new, weights in zip(previous, current, importance, strict=True)
    ]
    return torch.stack(distances).mean()


def weighted_discrepancy_paper(
    previous: Sequence[Tensor], current: Sequence[Tensor], importance: Sequence[Tensor]
) -> Tensor:
    """AFC's loss as the paper writes it: sum over levels and channels of I_c || A'_c - A_c ||_F^2, mean over rows."""
    total = current[0].new_zeros((), dtype=importance[0].dtype)
    for old, new, weights in zip(previous, current, importance, strict=True):
        squares = (old - new).to(weights.dtype).square().sum(dim=(2, 3))
        total = total + (weights * squares).sum(dim=1).mean()
    return total


def cosine_distance(previous: Tensor, current: Tensor) -> Tensor:
    """1 - cos, averaged over rows: POD-flat and UCIR's less-forget loss as published code computes them."""
    return (1 - F.cosine_similarity(previous, current)).mean()


def squared_distance(previous: Tensor, current: Tensor) -> Tensor:
    """||h' - h||^2, averaged over rows: POD-flat as the paper writes it."""
    return (previous - current).square().sum(dim=1).mean()


def frobenius_distance(previous: Tensor, current: Tensor, weights: Tensor) -> Tensor:
    """IL2A's: || diag(weights) (current - previous) ||_F over the whole batch, neither squared nor averaged."""
    distance: Tensor = torch.linalg.vector_norm(weights[:, None] * (current - previous))
    return distance


def softened_cross_entropy(previous: Tensor, current: Tensor, temperature: float) -> Tensor:
    """BiC's: -sum_c softmax(o'/T)_c log softmax(o/T)_c over old classes, averaged over rows, without a factor T^2."""
    targets = (previous / temperature).softmax(dim=1)
    return -(targets * (current / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def softened_sigmoids(previous: Tensor, current: Tensor, temperature: float) -> Tensor:
    """inclearn's for BiC: binary cross-entropy of sigmoid(o/T) to sigmoid(o'/T), averaged over rows and old classes."""
    return F.binary_cross_entropy_with_logits(current / temperature, (previous / temperature).sigmoid())


def sigmoids_for_labels(previous: Tensor, current: Tensor, targets: Tensor, share: Tensor) -> Tensor:
    """iCaRL's: old classes' BCE to the previous sigmoids, less `share` of that to the labels; one sum per row."""
    distilled = F.binary_cross_entropy_with_logits(current, previous.sigmoid(), reduction="none")
    labelled = F.binary_cross_entropy_with_logits(current, targets, reduction="none")
    return (distilled - share * labelled).sum(dim=1)


def row_norm(difference: Tensor) -> Tensor:
    """The L2 norm of each row (last dimension), with gradient 0, not NaN, where it is zero."""
    squares = difference.square().sum(dim=-1)
    positive = squares > 0
    # The inner `where` keeps sqrt away from 0, whose gradient is infinite even when its value is not used.
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def _squares(maps: Tensor) -> Tensor:
    """The squared maps, in float32 or better: sums over 16-bit squares would lose what they compare."""
    return maps.to(torch.promote_types(maps.dtype, torch.float32)).square()


def _pooled(maps: Tensor) -> Tensor:
    """Sums over the width and over the height, concatenated and normalised as one vector per row."""
    strips = torch.cat([maps.sum(dim=3).flatten(1), maps.sum(dim=2).flatten(1)], dim=1)
    return F.normalize(strips)


def _unit_channels(maps: Tensor) -> Tensor:
    """The squared map of each channel as a unit vector (B, C, positions), in single precision at least."""
    squares = _squares(maps)
    return F.normalize(squares.flatten(2), dim=2)
