"""Linear CKA against its definition by HSIC in NumPy, and t-SNE: neighbours stay neighbours, length does not count."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ccfa.errors import DataError
from ccfa.evaluation import features as module
from ccfa.evaluation.features import Estimator, linear_cka, tsne


def features(num: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, (num, *shape)))


def biased_hsic(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """tr(K H L H) / (n - 1)^2."""
    n = len(first)
    centring = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(first @ centring @ second @ centring)) / (n - 1) ** 2


def unbiased_hsic(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Mean over all ordered fours of different images a, b, c, d of K_ab (L_ab + L_cd - 2 L_ac)."""
    a, b, c, d = np.array(list(permutations(range(len(first)), 4))).T
    return float(np.mean(first[a, b] * (second[a, b] + second[c, d] - 2 * second[a, c])))


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_is_the_ratio_of_hsics(estimator: Estimator) -> None:
    x, y = features(9, 3, 2, 2), features(9, 7, seed=1)
    y[:, :2] += x[:, 0, 0]
    first, second = (part.flatten(1).numpy() @ part.flatten(1).numpy().T for part in (x, y))
    hsic = biased_hsic if estimator == "biased" else unbiased_hsic
    expected = hsic(first, second) / math.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(x, y, estimator) == pytest.approx(expected, rel=1e-9)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features(23, 3, 5), features(23, 11, seed=1)
    whole = linear_cka(x, y)
    monkeypatch.setattr(module, "COLUMNS_AT_ONCE", 4)
    assert linear_cka(x, y) == pytest.approx(whole, rel=1e-12)


def test_float32_maps_lose_little() -> None:
    """Maps with a large common part, in single precision."""
    x = (features(100, 16, 4, 4) + 50).float()
    y = (x + features(100, 16, 4, 4, seed=1)).float()
    assert linear_cka(x, y) == pytest.approx(linear_cka(x.double(), y.double()), abs=1e-6)


def test_constant_features_have_no_alignment() -> None:
    assert math.isnan(linear_cka(torch.full((9, 4), 0.1), features(9, 4)))


def test_wrong_numbers_of_images_are_refused() -> None:
    with pytest.raises(DataError, match="got 3"):
        linear_cka(features(3, 2), features(3, 2), "unbiased")
    with pytest.raises(DataError, match="5 and 6"):
        linear_cka(features(5, 3), features(6, 3))


def test_clusters_of_directions_stay_apart() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 12)
    noisy = np.eye(8)[labels] + random.normal(0, 0.05, (len(labels), 8))
    points = tsne(noisy, perplexity=6, seed=0)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert points.shape == (36, 2)
    assert (labels[distances.argmin(axis=1)] == labels).all()
    lengths = np.exp2(random.integers(-3, 4, (len(noisy), 1)))  # exact in floating point
    np.testing.assert_array_equal(points, tsne(noisy * lengths, 6, seed=0))


def test_features_of_length_zero_are_points() -> None:
    with_zero = np.random.default_rng(0).normal(size=(20, 3))
    with_zero[0] = 0
    assert np.isfinite(tsne(with_zero, 5, seed=0)).all()
