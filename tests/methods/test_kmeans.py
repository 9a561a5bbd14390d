"""k-means against scikit-learn, and exactly on clusters nobody can confuse."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from ccfa.methods.parts import kmeans


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inertia(points: np.ndarray, centres: np.ndarray) -> float:
    return sum(min(np.sum((point - centre) ** 2) for centre in centres) for point in points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_inertia_is_as_good_as_scikit_learns(seed: int, dtype: torch.dtype):
    random = np.random.default_rng(seed)
    points = random.standard_normal((150, 5))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    expected = KMeans(10, n_init=10, random_state=seed).fit(points).inertia_
    centres = kmeans(torch.tensor(points, dtype=dtype), 10, seeded(seed))
    assert centres.shape == (10, 5)
    assert inertia(points, centres.numpy()) <= 1.03 * expected


@pytest.mark.parametrize("seed", range(5))
def test_well_separated_clusters_are_found_exactly(seed: int):
    random = np.random.default_rng(seed)
    means = 100.0 * np.eye(6)[:4]
    groups = [mean + 0.1 * random.standard_normal((count, 6)) for mean, count in zip(means, [3, 9, 20, 1], strict=True)]
    points = np.concatenate(groups)[random.permutation(33)]
    centres = kmeans(torch.tensor(points), 4, seeded(seed)).numpy()
    expected = np.array([group.mean(axis=0) for group in groups])
    order = np.argmax(centres @ means.T, axis=0)
    assert sorted(order) == [0, 1, 2, 3]
    np.testing.assert_allclose(centres[order], expected, atol=1e-10)


def test_centres_are_means_of_their_points():
    points = np.random.default_rng(4).standard_normal((80, 3))
    centres = kmeans(torch.tensor(points), 6, seeded(0)).numpy()
    nearest = np.argmin(((points[:, None] - centres[None]) ** 2).sum(axis=2), axis=1)
    for cluster in range(6):
        np.testing.assert_allclose(centres[cluster], points[nearest == cluster].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("num_points", [1, 3])
def test_few_points_are_centres_themselves(num_points: int):
    points = torch.tensor(np.random.default_rng(6).standard_normal((num_points, 4)))
    centres = kmeans(points, 5, seeded(0))
    assert centres.shape == (5, 4)
    assert inertia(points.numpy(), centres.numpy()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_points_have_defined_centres(dtype: torch.dtype):
    points = torch.ones(12, 3, dtype=dtype)
    torch.testing.assert_close(kmeans(points, 4, seeded(0)), torch.ones(4, 3, dtype=dtype))


def test_generator_alone_decides_the_result():
    points = torch.tensor(np.random.default_rng(7).standard_normal((60, 4)))
    torch.manual_seed(1)
    first = kmeans(points, 5, seeded(3))
    torch.manual_seed(2)
    assert torch.equal(first, kmeans(points, 5, seeded(3)))
