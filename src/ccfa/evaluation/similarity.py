"""Linear centred kernel alignment (CKA): how alike two networks see the same images.

CKA(X, Y) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with HSIC(K, L) = tr(K H L H) / (n - 1)^2, the Gram matrices
K = X X' and L = Y Y' and the centring H = I - 11'/n (Kornblith, Norouzi, Lee & Hinton, ICML 2019). Maps are flattened
as they do it: every channel at every position is a feature of its own.

That HSIC is biased: with more features than images, independent features have a CKA far above 0, which falls as n
grows. The unbiased HSIC (Song, Smola, Gretton, Bedo & Borgwardt, JMLR 2012) takes its place where asked for.

It is computed in Gram form, exactly and over all n images together, because maps have more features than there are
images: n x n numbers are kept, whatever the size of a map, and a map may come in parts.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ccfa.errors import DataError

COLUMNS_AT_ONCE = 4096  # products of so many features are summed in float64
ROWS_AT_ONCE = 1024


Estimator = Literal["biased", "unbiased"]


def linear_cka(first: Tensor, second: Tensor, estimator: Estimator = "biased") -> float:
    """CKA of two sets of features (n, ...) of the same images; NaN where one of them is the same for all images."""
    return aligned(*(centred(gram(features), estimator) for features in (first, second)))


def gram(features: Tensor) -> Tensor:
    """H K H, the centred Gram matrix [n, n] in float64; Gram matrices of parts of the features add up."""
    if features.ndim < 2 or len(features) < 2 or features[0].numel() == 0:
        raise DataError(f"CKA needs features (n, ...) of at least 2 images, got the shape {tuple(features.shape)}.")
    total = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for columns in features.flatten(1).split(COLUMNS_AT_ONCE, dim=1):
        # Centred features give a centred Gram matrix, and small numbers that products in float32 keep well.
        columns = columns - columns.mean(dim=0, dtype=torch.float64).to(columns.dtype)
        for start in range(0, len(columns), ROWS_AT_ONCE):  # the lower triangle is enough
            stop = start + ROWS_AT_ONCE
            total[start:stop, :stop] += columns[start:stop] @ columns[:stop].T
    total.tril_()
    return total.add_(total.tril(-1).T)


def centred(matrix: Tensor, estimator: Estimator) -> Tensor:
    """A Gram matrix as the estimator compares it: centred as it is or, without bias, off its diagonal alone.

    With the diagonal set to 0, row sums s and their sum t, entries i != j become K_ij - (s_i + s_j) / (n - 2)
    + t / ((n - 1) (n - 2)); the mean product of two such matrices is the unbiased HSIC.
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
    """CKA from two centred Gram matrices: the cosine of the angle between them."""
    if first.shape != second.shape:
        raise DataError(
            f"CKA compares features of the same images, got {len(first)} and {len(second)}. "
            "Give both networks the same images in the same order."
        )
    norms = math.sqrt(_inner(first, first) * _inner(second, second))
    return _inner(first, second) / norms if norms else math.nan


def _inner(first: Tensor, second: Tensor) -> float:
    return float(first.flatten() @ second.flatten())
