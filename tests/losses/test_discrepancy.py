"""AFC's weighted discrepancy against the NumPy reference, and what holds for every input."""

import numpy as np
import pytest
import torch

import reference_afc
from ccfa.losses.distillation import row_norm, weighted_discrepancy, weighted_discrepancy_paper

SHAPES = [(4, 3, 6, 5), (4, 5, 3, 3), (4, 2, 1, 4)]
LOSSES = [
    pytest.param(weighted_discrepancy, reference_afc.weighted_discrepancy, id="code"),
    pytest.param(weighted_discrepancy_paper, reference_afc.weighted_discrepancy_paper, id="paper"),
]


def random_maps(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in SHAPES]


def random_importance(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.uniform(0, 3, shape[1]) for shape in SHAPES]


def tensors(arrays: list[np.ndarray], requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.tensor(array, requires_grad=requires_grad) for array in arrays]


ONES = [torch.ones(shape[1], dtype=torch.float64) for shape in SHAPES]


@pytest.mark.parametrize(("loss", "expected"), LOSSES)
@pytest.mark.parametrize("num_levels", [1, 3])
def test_as_the_reference(loss, expected, num_levels):
    previous, maps, importance = (part[:num_levels] for part in (random_maps(0), random_maps(1), random_importance(2)))
    value = loss(tensors(previous), tensors(maps), tensors(importance))
    assert value.shape == ()
    assert value.item() == pytest.approx(expected(previous, maps, importance), rel=1e-12)


@pytest.mark.parametrize(("loss", "expected"), LOSSES)
def test_gradients_as_the_reference(loss, expected):
    previous, maps, importance = (part[1:2] for part in (random_maps(3), random_maps(4), random_importance(5)))
    current = tensors(maps, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(tensors(previous), current, tensors(importance)), current)
    for place in [(0, 0, 0, 0), (1, 4, 2, 1), (3, 2, 1, 2)]:
        above, below = maps[0].copy(), maps[0].copy()
        above[place] += 1e-6
        below[place] -= 1e-6
        numeric = (expected(previous, [above], importance) - expected(previous, [below], importance)) / 2e-6
        assert gradient[place].item() == pytest.approx(numeric, abs=1e-6)


def test_importance_one_is_the_plain_discrepancy_of_channels():
    previous, maps = tensors(random_maps(6)), tensors(random_maps(7))
    unit = torch.nn.functional.normalize
    plain = [
        row_norm(unit(old.square().flatten(2), dim=2) - unit(new.square().flatten(2), dim=2)).mean()
        for old, new in zip(previous, maps, strict=True)
    ]
    assert torch.equal(weighted_discrepancy(previous, maps, ONES), torch.stack(plain).mean())


@pytest.mark.parametrize("loss", [weighted_discrepancy, weighted_discrepancy_paper])
def test_linear_in_the_importance(loss):
    previous, maps = tensors(random_maps(8)), tensors(random_maps(9))
    first, second = tensors(random_importance(10)), tensors(random_importance(11))
    both = [2 * one + 3 * other for one, other in zip(first, second, strict=True)]
    expected = 2 * loss(previous, maps, first) + 3 * loss(previous, maps, second)
    torch.testing.assert_close(loss(previous, maps, both), expected)


@pytest.mark.parametrize("loss", [weighted_discrepancy, weighted_discrepancy_paper])
def test_an_unimportant_channel_is_free(loss):
    previous, importance = tensors(random_maps(12)), tensors(random_importance(13))
    importance[1][2] = 0
    maps = [level.clone() for level in previous]
    maps[1][:, 2] += torch.randn(4, 3, 3, dtype=torch.float64)
    assert loss(previous, maps, importance).item() == 0
    maps[1][:, 3] += 1
    assert loss(previous, maps, importance).item() > 0


def test_published_code_ignores_sign_and_scale_of_each_channel():
    previous, maps = tensors(random_maps(14)), tensors(random_maps(15))
    changed = [level * torch.linspace(-3, 2, level.shape[1])[:, None, None] for level in maps]
    value = weighted_discrepancy(previous, maps, ONES)
    torch.testing.assert_close(weighted_discrepancy(previous, changed, ONES), value)
    assert 0 <= value.item() <= np.sqrt(2)


@pytest.mark.parametrize("loss", [weighted_discrepancy, weighted_discrepancy_paper])
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["all-zero maps", "random maps"])
def test_identical_maps_give_zero_and_a_zero_gradient(loss, factor):
    maps = [factor * level for level in random_maps(16)]
    current = tensors(maps, requires_grad=True)
    value = loss(tensors(maps), current, ONES)
    assert value.item() == 0
    for gradient in torch.autograd.grad(value, current):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_dead_channel_does_not_spoil_the_gradient():
    previous, maps = random_maps(17), random_maps(18)
    maps[0][:, 1] = previous[1][:, 0] = 0
    current = tensors(maps, requires_grad=True)
    gradients = torch.autograd.grad(weighted_discrepancy(tensors(previous), current, ONES), current)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 0].abs().max() > 0


def test_maps_in_16_bits_are_compared_in_32():
    previous, maps = tensors(random_maps(19)), tensors(random_maps(20))
    rounded = [[level.bfloat16() for level in part] for part in (previous, maps)]
    exact = [[level.double() for level in part] for part in rounded]
    importance = [weights.float() for weights in tensors(random_importance(21))]
    value = weighted_discrepancy(*rounded, importance)
    assert value.dtype == torch.float32
    expected = weighted_discrepancy(*exact, [weights.double() for weights in importance])
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
