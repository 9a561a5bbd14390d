"""Linear centred kernel alignment (CKA): how alike two networks see the same images.

CKA(X, Y) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with HSIC(K, L) = tr(K H L H) / (n - 1)^2, the Gram matrices
K = X X' and L = Y Y' and the centring H = I - 11'/n (Kornblith, Norouzi, Lee & Hinton, ICML 2019). Maps are flattened
as they do it: every channel at every position is a feature of its own.

That HSIC is biased: with more features than images, independent features have a CKA far above 0, which falls as n
grows. The estimator "unbiased" uses the unbiased HSIC (Song, Smola, Gretton, Bedo & Borgwardt, JMLR 2012).

Maps have more features than there are images, so CKA is computed from Gram matrices: n x n numbers for any map.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ccfa.errors import DataError

COLUMNS_AT_ONCE = 4096  # products of so many features are summed in float64

Estimator = Literal["biased", "unbiased"]


def linear_cka(first: Tensor, second: Tensor, estimator: Estimator = "biased") -> float:
    """Return the CKA of two sets of features (n, ...) of the same images.

    It is NaN where one of them is the same for all images.

    >>> features = torch.tensor([[1.0, 2.0], [3.0, 5.0], [8.0, 1.0]])
    >>> round(linear_cka(features, 3 * features + 7), 6)
    1.0
    """
    return aligned(*(centred(gram(features), estimator) for features in (first, second)))


def gram(features: Tensor) -> Tensor:
    """Return H K H, the centred Gram matrix [n, n] in float64."""
    total = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for columns in features.flatten(1).split(COLUMNS_AT_ONCE, dim=1):
        # Centred features give a centred Gram matrix, and small numbers that products in float32 keep well.
        columns = columns - columns.mean(dim=0, dtype=torch.float64).to(columns.dtype)
        total += columns @ columns.T
    return total


def centred(matrix: Tensor, estimator: Estimator) -> Tensor:
    """Return a centred Gram matrix as the estimator compares it.

    The unbiased one leaves the diagonal out: with the diagonal set to 0, row sums s and their sum t, entries i != j
    become K_ij - (s_i + s_j) / (n - 2) + t / ((n - 1) (n - 2)). The mean product of two such matrices is its HSIC.
    """
    if estimator == "biased":
        return matrix
    if (n := len(matrix)) < 4:
        raise DataError(f"Unbiased CKA needs at least 4 images, got {n}.")
    matrix = matrix.clone().fill_diagonal_(0)
    sums = matrix.sum(dim=1)
    matrix += sums.sum() / ((n - 1) * (n - 2)) - sums[:, None] / (n - 2) - sums / (n - 2)
    return matrix.fill_diagonal_(0)


def aligned(first: Tensor, second: Tensor) -> float:
    """Return CKA from two centred Gram matrices: the cosine of the angle between them."""
    if first.shape != second.shape:
        raise DataError(f"CKA compares features of the same images, got {len(first)} and {len(second)} images.")
    norms = math.sqrt(_inner(first, first) * _inner(second, second))
    return _inner(first, second) / norms if norms else math.nan


def _inner(first: Tensor, second: Tensor) -> float:
    return float(first.flatten() @ second.flatten())
