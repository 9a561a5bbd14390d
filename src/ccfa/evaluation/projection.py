"""Features in a plane: t-SNE, with everything it depends on given."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import DataError

PERPLEXITY = 30.0


def perplexity_for(num_points: int) -> float:
    """The usual 30, or less where there are too few points to have so many neighbours."""
    return min(PERPLEXITY, (num_points - 1) / 3)


def tsne(features: NDArray[Any], perplexity: float, seed: int) -> NDArray[np.float64]:
    """Points (n, 2) whose neighbours are those of the features' directions (n, d).

    Features are brought to unit length first: herding, nearest means and normalising heads compare directions as well.
    The first positions are the principal components. The same input gives the same points on one machine; other
    machines round otherwise, and t-SNE makes small differences large.
    """
    from sklearn.manifold import TSNE  # slow to import

    features = np.asarray(features, dtype=np.float32)
    if features.ndim != 2 or not 1 < perplexity < len(features):
        raise DataError(
            f"t-SNE needs features (n, d) with n above its perplexity and that above 1; "
            f"got the shape {features.shape} and a perplexity of {perplexity:g}."
        )
    if not np.isfinite(features).all():
        raise DataError("t-SNE needs finite features; these hold NaN or infinity. Did the run diverge?")
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(norms, np.finfo(np.float32).tiny)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(directions)
    return np.asarray(points, dtype=np.float64)
