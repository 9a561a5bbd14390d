"""How networks see images: linear centred kernel alignment (CKA) of their maps, and features in a plane by t-SNE.

CKA(X, Y) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with HSIC(K, L) = tr(K H L H) / (n - 1)^2, the Gram matrices
K = X X' and L = Y Y' and the centring H = I - 11'/n (Kornblith, Norouzi, Lee & Hinton, ICML 2019). Maps are flattened
as they do it: every channel at every position is a feature of its own.

That HSIC is biased: with more features than images, independent features have a CKA far above 0, which falls as n
grows. The estimator "unbiased" uses the unbiased HSIC (Song, Smola, Gretton, Bedo & Borgwardt, JMLR 2012).

Maps have more features than there are images, so CKA is computed from Gram matrices: n x n numbers for any map.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
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


def perplexity_for(num_points: int) -> float:
    """Return the usual perplexity of 30, or less for few points.

    >>> perplexity_for(2200), perplexity_for(31)
    (30.0, 10.0)
    """
    return min(30.0, (num_points - 1) / 3)


def tsne(features: NDArray[Any], perplexity: float, seed: int) -> NDArray[np.float64]:
    """Return points (n, 2) whose neighbours are those of the features' directions (n, d).

    Features are brought to unit length first: herding, nearest means and normalising heads compare directions as well.
    The first positions are the principal components. The same input gives the same points on one machine. Another
    machine rounds differently, and t-SNE makes small differences large.
    """
    from sklearn.manifold import TSNE  # slow to import

    features = np.asarray(features, dtype=np.float32)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(norms, np.finfo(np.float32).tiny)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(directions)
    return np.asarray(points, dtype=np.float64)
