"""t-SNE: neighbours stay neighbours, the same seed gives the same points, length does not count."""

import numpy as np

from ccfa.evaluation.projection import tsne


def test_clusters_of_directions_stay_apart() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 12)
    features = np.eye(8)[labels] + random.normal(0, 0.05, (len(labels), 8))
    points = tsne(features, perplexity=6, seed=0)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert points.shape == (36, 2)
    assert (labels[distances.argmin(axis=1)] == labels).all()
    lengths = np.exp2(random.integers(-3, 4, (len(features), 1)))  # exact in floating point
    np.testing.assert_array_equal(points, tsne(features * lengths, 6, seed=0))


def test_features_of_length_zero_are_points() -> None:
    features = np.random.default_rng(0).normal(size=(20, 3))
    features[0] = 0
    assert np.isfinite(tsne(features, 5, seed=0)).all()
