"""t-SNE: neighbours stay neighbours, the same seed gives the same points, length does not count."""

import numpy as np
import pytest

from ccfa.errors import DataError
from ccfa.evaluation.projection import perplexity_for, tsne


def clusters(num_clusters: int = 3, per_cluster: int = 20, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(num_clusters), per_cluster)
    centres = np.eye(dim)[:num_clusters]
    return centres[labels] + random.normal(0, 0.05, (len(labels), dim)), labels


def test_separate_clusters_stay_apart() -> None:
    features, labels = clusters()
    points = tsne(features, perplexity=10, seed=0)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert points.shape == (60, 2)
    assert (labels[distances.argmin(axis=1)] == labels).all()


def test_repeats_itself_and_differs_by_input() -> None:
    features, _ = clusters()
    points = tsne(features, 10, seed=0)
    np.testing.assert_array_equal(points, tsne(features, 10, seed=0))
    assert not np.allclose(points, tsne(features, 15, seed=0))


def test_only_directions_count() -> None:
    features, _ = clusters()
    lengths = np.exp2(np.random.default_rng(1).integers(-3, 4, (len(features), 1)))  # exact in floating point
    np.testing.assert_array_equal(tsne(features, 10, seed=0), tsne(features * lengths, 10, seed=0))


def test_a_feature_of_length_zero_is_a_point_too() -> None:
    features, _ = clusters()
    features[0] = 0
    assert np.isfinite(tsne(features, 10, seed=0)).all()


def test_perplexity_fits_the_number_of_points() -> None:
    assert perplexity_for(2200) == 30
    assert perplexity_for(31) == 10


@pytest.mark.parametrize(("shape", "perplexity"), [((5, 3), 5.0), ((5,), 2.0), ((2, 3), 1 / 3)])
def test_refuses_too_few_points(shape: tuple[int, ...], perplexity: float) -> None:
    with pytest.raises(DataError, match="perplexity"):
        tsne(np.ones(shape), perplexity, seed=0)


def test_refuses_numbers_that_are_not_finite() -> None:
    with pytest.raises(DataError, match="finite"):
        tsne(np.full((40, 3), np.nan), 10, seed=0)
