"""Linear CKA against its definition by HSIC, written out in NumPy, and against what must hold of it."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ccfa.errors import DataError
from ccfa.evaluation import similarity
from ccfa.evaluation.similarity import aligned, gram, linear_cka


def features(num: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, (num, *shape)))


def hsic(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """tr(K H L H) / (n - 1)^2."""
    n = len(first)
    centring = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(first @ centring @ second @ centring)) / (n - 1) ** 2


def cka_by_definition(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x.reshape(len(x), -1), y.reshape(len(y), -1)
    first, second = x @ x.T, y @ y.T
    return hsic(first, second) / math.sqrt(hsic(first, first) * hsic(second, second))


def unbiased_hsic(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Mean over all ordered fours of different images a, b, c, d of K_ab (L_ab + L_cd - 2 L_ac)."""
    a, b, c, d = np.array(list(permutations(range(len(first)), 4))).T
    return float(np.mean(first[a, b] * (second[a, b] + second[c, d] - 2 * second[a, c])))


def test_unbiased_is_the_ratio_of_means_over_fours_of_images() -> None:
    x, y = features(9, 3, 2, 2), features(9, 7, seed=1)
    y[:, :2] += x[:, 0, 0]
    first, second = (part.flatten(1).numpy() @ part.flatten(1).numpy().T for part in (x, y))
    expected = unbiased_hsic(first, second) / math.sqrt(unbiased_hsic(first, first) * unbiased_hsic(second, second))
    assert linear_cka(x, y, "unbiased") == pytest.approx(expected, rel=1e-9)


def test_independent_maps_have_no_unbiased_alignment() -> None:
    """Many more features than images, where the biased value is far from 0."""
    pairs = [(features(60, 16, 4, 4, seed=seed), features(60, 16, 4, 4, seed=seed + 100)) for seed in range(20)]
    assert np.mean([linear_cka(*pair) for pair in pairs]) > 0.7
    assert abs(np.mean([linear_cka(*pair, "unbiased") for pair in pairs])) < 0.01


def test_unbiased_keeps_what_must_hold() -> None:
    x, y = features(25, 6), features(25, 5, seed=1)
    assert linear_cka(x, x, "unbiased") == pytest.approx(1.0, abs=1e-12)
    assert linear_cka(3 * x + 100, y - 7, "unbiased") == pytest.approx(linear_cka(x, y, "unbiased"), rel=1e-8)
    many = features(3000, 6)
    noisy = many + 0.3 * features(3000, 6, seed=1)
    assert linear_cka(many, noisy, "unbiased") == pytest.approx(linear_cka(many, noisy), abs=0.01)


def test_is_the_ratio_of_hsics() -> None:
    x, y = features(20, 3, 4, 4), features(20, 7, seed=1)
    y[:, :3] += x[:, 0, 0, :3]
    assert linear_cka(x, y) == pytest.approx(cka_by_definition(x.numpy(), y.numpy()), rel=1e-12)


def test_is_the_ratio_of_norms_of_products_of_features() -> None:
    """||Y'X||^2 / (||X'X|| ||Y'Y||) on centred features, the other form in the literature."""
    x, y = features(30, 5), features(30, 4, seed=1)
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    expected = (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert linear_cka(x, y) == pytest.approx(float(expected), rel=1e-12)


def test_identical_features_are_aligned_entirely() -> None:
    x = features(15, 6)
    assert linear_cka(x, x) == pytest.approx(1.0, abs=1e-12)


def test_rotation_scale_and_shift_change_nothing() -> None:
    x, y = features(25, 6), features(25, 5, seed=1)
    rotation, _ = torch.linalg.qr(features(6, 6, seed=2))
    assert linear_cka(x @ rotation, y) == pytest.approx(linear_cka(x, y), rel=1e-10)
    assert linear_cka(0.01 * x, 300 * y) == pytest.approx(linear_cka(x, y), rel=1e-10)
    assert linear_cka(x + 100, y - 7) == pytest.approx(linear_cka(x, y), rel=1e-9)


def test_another_scale_of_one_feature_changes_it() -> None:
    """CKA is not invariant to every invertible linear map: that would make it useless for wide maps."""
    x = features(25, 6)
    assert linear_cka(x * torch.tensor([20.0, 1, 1, 1, 1, 1]), x) < 0.9


def test_is_symmetric() -> None:
    x, y = features(25, 6), features(25, 5, seed=1)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), rel=1e-12)


def test_independent_features_are_hardly_aligned() -> None:
    assert linear_cka(features(2000, 4), features(2000, 4, seed=1)) < 0.01


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features(23, 3, 5), features(23, 11, seed=1)
    whole = linear_cka(x, y)
    monkeypatch.setattr(similarity, "COLUMNS_AT_ONCE", 4)
    monkeypatch.setattr(similarity, "ROWS_AT_ONCE", 5)
    assert linear_cka(x, y) == pytest.approx(whole, rel=1e-12)


def test_gram_matrices_of_channels_add_up() -> None:
    maps = features(12, 6, 3, 3)
    parts = gram(maps[:, :2]) + gram(maps[:, 2:])
    torch.testing.assert_close(parts, gram(maps))
    assert aligned(parts, gram(maps)) == pytest.approx(1.0, abs=1e-12)


def test_float32_maps_lose_little() -> None:
    """Maps with a large common part, in single precision, against the definition in double."""
    x = features(200, 16, 8, 8) + 50
    y = x + features(200, 16, 8, 8, seed=1)
    single = linear_cka(x.float(), y.float())
    assert single == pytest.approx(cka_by_definition(x.float().double().numpy(), y.float().double().numpy()), abs=1e-6)


def test_constant_features_have_no_alignment() -> None:
    assert math.isnan(linear_cka(torch.full((9, 4), 0.1), features(9, 4)))


@pytest.mark.parametrize("shape", [(5,), (1, 3), (4, 0)])
def test_refuses_what_is_not_features_of_several_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="at least 2 images"):
        gram(torch.zeros(shape))


def test_unbiased_refuses_fewer_than_four_images() -> None:
    with pytest.raises(DataError, match="at least 4 images, got 3"):
        linear_cka(features(3, 2), features(3, 2), "unbiased")


def test_refuses_features_of_different_images() -> None:
    with pytest.raises(DataError, match="got 5 and 6"):
        linear_cka(features(5, 3), features(6, 3))
