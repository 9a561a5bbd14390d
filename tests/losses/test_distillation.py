"""The distillation penalties against the NumPy reference, and what holds for every input."""

import numpy as np
import pytest
import torch

import reference
from ccfa.losses import (
    cosine_distance,
    frobenius_distance,
    pod_spatial,
    pod_spatial_paper,
    sigmoids_for_labels,
    softened_cross_entropy,
    softened_sigmoids,
    squared_distance,
    weighted_discrepancy,
    weighted_discrepancy_paper,
)

SHAPES = [(4, 3, 6, 5), (4, 5, 3, 3), (4, 2, 1, 4)]
IMPORTANCE = [np.random.default_rng(2).uniform(0, 3, shape[1]) for shape in SHAPES]
ONES = [torch.ones(shape[1], dtype=torch.float64) for shape in SHAPES]
MAP_LOSSES = {
    pod_spatial: reference.pod_spatial,
    pod_spatial_paper: reference.pod_spatial_paper,
    weighted_discrepancy: reference.weighted_discrepancy,
    weighted_discrepancy_paper: reference.weighted_discrepancy_paper,
}
every_map_loss = pytest.mark.parametrize("loss", MAP_LOSSES)
of_afc = pytest.mark.parametrize("loss", [weighted_discrepancy, weighted_discrepancy_paper])


def random_maps(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in SHAPES]


def tensors(arrays: list[np.ndarray], requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.tensor(array, requires_grad=requires_grad) for array in arrays]


def weighed(loss, levels: slice = slice(None)) -> list[list[np.ndarray]]:
    """What the loss takes besides the maps."""
    return [IMPORTANCE[levels]] if "discrepancy" in loss.__name__ else []


@every_map_loss
@pytest.mark.parametrize("num_levels", [1, 3])
def test_map_losses_as_the_reference(loss, num_levels):
    parts = [random_maps(0)[:num_levels], random_maps(1)[:num_levels], *weighed(loss, slice(num_levels))]
    value = loss(*map(tensors, parts))
    assert value.shape == ()
    assert value.item() == pytest.approx(MAP_LOSSES[loss](*parts), rel=1e-12)


@every_map_loss
def test_map_loss_gradients_as_the_reference(loss):
    previous, maps, others = random_maps(6)[1:2], random_maps(7)[1:2], weighed(loss, slice(1, 2))
    current = tensors(maps, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(tensors(previous), current, *map(tensors, others)), current)
    for place in [(0, 0, 0, 0), (1, 4, 2, 1), (3, 2, 1, 2)]:
        step = np.zeros_like(maps[0])
        step[place] = 1e-6
        above, below = (MAP_LOSSES[loss](previous, [maps[0] + sign * step], *others) for sign in (1, -1))
        assert gradient[place].item() == pytest.approx((above - below) / 2e-6, abs=1e-6)


@every_map_loss
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["all-zero maps", "random maps"])
def test_identical_maps_cost_nothing(loss, factor):
    maps = [factor * level for level in random_maps(3)]
    current = tensors(maps, requires_grad=True)
    value = loss(tensors(maps), current, *map(tensors, weighed(loss)))
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert not any(gradient.any() for gradient in torch.autograd.grad(value, current))


@every_map_loss
def test_dead_maps_do_not_spoil_the_gradient(loss):
    previous, maps = random_maps(4), random_maps(5)
    maps[0][1] = previous[0][1]  # an identical row
    maps[1][2] = maps[1][:, 1] = previous[1][:, 0] = 0  # a dead row and dead channels
    current = tensors(maps, requires_grad=True)
    gradients = torch.autograd.grad(loss(tensors(previous), current, *map(tensors, weighed(loss))), current)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][1].any()
    assert gradients[0][0].any()


def test_published_formulas_ignore_sign_and_scale():
    previous, maps = tensors(random_maps(8)), tensors(random_maps(9))
    value = pod_spatial(previous, maps)
    torch.testing.assert_close(pod_spatial(previous, [-3 * level for level in maps]), value)
    assert 0 <= value.item() <= np.sqrt(2)
    by_channel = [level * torch.linspace(-3, 2, level.shape[1])[:, None, None] for level in maps]
    value = weighted_discrepancy(previous, maps, ONES)
    torch.testing.assert_close(weighted_discrepancy(previous, by_channel, ONES), value)
    assert 0 <= value.item() <= np.sqrt(2)


def test_pod_of_disjoint_maps():
    first, second = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3)
    first[0, 0], second[0, 1] = 1.0, 1.0
    assert pod_spatial([first], [second]).item() == pytest.approx(np.sqrt(2.0))


def test_the_papers_pod_compares_sums_over_strips():
    maps, pattern = torch.zeros(1, 1, 2, 2), torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert pod_spatial_paper([maps], [maps + pattern]).item() == 0.0


@of_afc
def test_discrepancy_is_linear_in_the_importance(loss):
    previous, maps = tensors(random_maps(8)), tensors(random_maps(9))
    first = tensors(IMPORTANCE)
    both = [2 * one + 3 * other for one, other in zip(first, ONES, strict=True)]
    expected = 2 * loss(previous, maps, first) + 3 * loss(previous, maps, ONES)
    torch.testing.assert_close(loss(previous, maps, both), expected)


@of_afc
def test_an_unimportant_channel_is_free(loss):
    previous, importance = tensors(random_maps(12)), tensors(IMPORTANCE)
    importance[1][2] = 0
    maps = [level.clone() for level in previous]
    maps[1][:, 2] += torch.randn(4, 3, 3, dtype=torch.float64)
    assert loss(previous, maps, importance).item() == 0
    maps[1][:, 3] += 1
    assert loss(previous, maps, importance).item() > 0


def test_maps_in_16_bits_are_compared_in_32():
    rounded = [[level.bfloat16() for level in tensors(random_maps(seed))] for seed in (19, 20)]
    exact = [[level.double() for level in part] for part in rounded]
    importance = [torch.tensor(weights, dtype=torch.float32) for weights in IMPORTANCE]
    value = weighted_discrepancy(*rounded, importance)
    assert value.dtype == torch.float32
    expected = weighted_discrepancy(*exact, [weights.double() for weights in importance])
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


VECTOR_LOSSES = {
    cosine_distance: (reference.cosine_distance, ()),
    squared_distance: (reference.squared_distance, ()),
    softened_cross_entropy: (reference.softened_cross_entropy, (2.0,)),
    softened_sigmoids: (reference.softened_sigmoids, (2.0,)),
    frobenius_distance: (reference.frobenius_distance, (np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]),)),
}


@pytest.mark.parametrize("loss", VECTOR_LOSSES)
def test_vector_losses_as_the_reference(loss):
    expected, others = VECTOR_LOSSES[loss]
    previous, current = 3 * np.random.default_rng(2).standard_normal((2, 6, 4))
    others_here = [other if isinstance(other, float) else torch.tensor(other) for other in others]
    value = loss(torch.tensor(previous), torch.tensor(current), *others_here)
    assert value.shape == ()
    assert value.item() == pytest.approx(expected(previous, current, *others), rel=1e-12)
    same = torch.tensor(previous, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(torch.tensor(previous), same, *others_here), same)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


@pytest.mark.parametrize("loss", [cosine_distance, squared_distance])
def test_zero_embeddings_have_a_zero_gradient(loss):
    dead = torch.zeros(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(torch.zeros(4, 3), dead), dead)
    assert torch.equal(gradient, torch.zeros(4, 3))


def test_the_same_sigmoids_as_labels_cancel():
    logits, targets = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
    far = (2 * targets - 1) * 1e3  # sigmoids of exactly 0 and 1
    assert torch.equal(sigmoids_for_labels(far, logits, targets, torch.tensor(1.0)), torch.zeros(4))
