"""Losses on the remembered Gaussians of old classes, and the distance that keeps features in place."""

import torch
from torch import Tensor
from torch.nn import functional as F


def semantic_augmentation(
    prototypes: Tensor,
    covariances: Tensor,
    labels: Tensor,
    weights: Tensor,
    biases: Tensor,
    strength: float,
    scale: Tensor,
) -> Tensor:
    """IL2A's L_seman: cross-entropy of scale * (w_c m_y + b_c + (strength / 2) (w_c - w_y)^T S_y (w_c - w_y)).

    At scale 1 it bounds the expected cross-entropy of features drawn from N(m_y, strength * S_y) from above. Rows of
    `prototypes` and `covariances` belong to `labels`.
    """
    differences = weights - weights[labels][:, None]  # (B, classes, dim)
    variances = (differences @ covariances * differences).sum(dim=2)
    logits = F.linear(prototypes, weights, biases) + strength / 2 * variances
    return F.cross_entropy(scale * logits, labels)


def frobenius_distance(previous: Tensor, current: Tensor, weights: Tensor) -> Tensor:
    """|| diag(weights) (current - previous) ||_F over the whole batch, neither squared nor averaged."""
    distance: Tensor = torch.linalg.vector_norm(weights[:, None] * (current - previous))
    return distance
