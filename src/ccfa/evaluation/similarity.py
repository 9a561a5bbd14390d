"""Linear centred kernel alignment (CKA): how alike two networks see the same images.

CKA(X, Y) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with HSIC(K, L) = tr(K H L H) / (n - 1)^2, the Gram matrices
K = X X' and L = Y Y' and the centring H = I - 11'/n (Kornblith, Norouzi, Lee & Hinton, ICML 2019). Maps are flattened
as they do it: every channel at every position is a feature of its own.

It is computed in Gram form, exactly and over all n images together, because maps have more features than there are
images: n x n numbers are kept, whatever the size of a map, and a map may come in parts.
"""

import math

import torch
from torch import Tensor

from ccfa.errors import DataError

COLUMNS_AT_ONCE = 4096  # products of so many features are summed in float64
ROWS_AT_ONCE = 1024


def linear_cka(first: Tensor, second: Tensor) -> float:
    """CKA of two sets of features (n, ...) of the same images; NaN where one of them is the same for all images."""
    return aligned(gram(first), gram(second))


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
