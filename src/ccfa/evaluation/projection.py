"""Features in a plane, by t-SNE."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PERPLEXITY = 30.0


def perplexity_for(num_points: int) -> float:
    """Return the usual perplexity of 30, or less for few points.

    >>> perplexity_for(2200), perplexity_for(31)
    (30.0, 10.0)
    """
    return min(PERPLEXITY, (num_points - 1) / 3)


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
