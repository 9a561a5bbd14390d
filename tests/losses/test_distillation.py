"""The distillation penalties against the NumPy reference, and what holds for every input."""

import numpy as np
import pytest
import torch

import reference
from ccfa.losses.distillation import cosine_distance, pod_spatial, pod_spatial_paper, squared_distance

SHAPES = [(4, 3, 6, 5), (4, 5, 3, 3), (4, 2, 1, 4)]
MAP_LOSSES = [
    pytest.param(pod_spatial, reference.pod_spatial, id="pod_spatial"),
    pytest.param(pod_spatial_paper, reference.pod_spatial_paper, id="pod_spatial_paper"),
]
VECTOR_LOSSES = [
    pytest.param(cosine_distance, reference.cosine_distance, id="cosine_distance"),
    pytest.param(squared_distance, reference.squared_distance, id="squared_distance"),
]


def random_maps(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in SHAPES]


def as_tensors(maps: list[np.ndarray], requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.tensor(level, requires_grad=requires_grad) for level in maps]


@pytest.mark.parametrize(("loss", "expected"), MAP_LOSSES)
@pytest.mark.parametrize("num_levels", [1, 3])
def test_map_losses_as_the_reference(loss, expected, num_levels: int):
    previous, current = random_maps(0)[:num_levels], random_maps(1)[:num_levels]
    value = loss(as_tensors(previous), as_tensors(current))
    assert value.shape == ()
    assert value.item() == pytest.approx(expected(previous, current), rel=1e-12)


@pytest.mark.parametrize(("loss", "expected"), VECTOR_LOSSES)
def test_vector_losses_as_the_reference(loss, expected):
    random = np.random.default_rng(2)
    previous, current = random.standard_normal((2, 9, 6))
    value = loss(torch.tensor(previous), torch.tensor(current))
    assert value.shape == ()
    assert value.item() == pytest.approx(expected(previous, current), rel=1e-12)


@pytest.mark.parametrize("loss", [pod_spatial, pod_spatial_paper])
@pytest.mark.parametrize("zero", [False, True], ids=["random maps", "all-zero maps"])
def test_identical_maps_give_zero_and_a_zero_gradient(loss, zero: bool):
    maps = [level * (0.0 if zero else 1.0) for level in random_maps(3)]
    current = as_tensors(maps, requires_grad=True)
    value = loss(as_tensors(maps), current)
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    for gradient in torch.autograd.grad(value, current):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("loss", [pod_spatial, pod_spatial_paper])
def test_one_identical_row_or_dead_map_does_not_spoil_the_gradient(loss):
    previous, maps = random_maps(4), random_maps(5)
    maps[0][1] = previous[0][1]
    maps[1][2] = 0.0
    current = as_tensors(maps, requires_grad=True)
    gradients = torch.autograd.grad(loss(as_tensors(previous), current), current)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert torch.equal(gradients[0][1], torch.zeros_like(gradients[0][1]))
    assert gradients[0][0].abs().max() > 0


@pytest.mark.parametrize(("loss", "expected"), MAP_LOSSES)
def test_map_loss_gradients_as_the_reference(loss, expected):
    previous, maps = random_maps(6)[1:2], random_maps(7)[1:2]
    current = as_tensors(maps, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(as_tensors(previous), current), current)
    for place in [(0, 0, 0, 0), (1, 4, 2, 1), (3, 2, 1, 2)]:
        above, below = maps[0].copy(), maps[0].copy()
        above[place] += 1e-6
        below[place] -= 1e-6
        numeric = (expected(previous, [above]) - expected(previous, [below])) / 2e-6
        assert gradient[place].item() == pytest.approx(numeric, abs=1e-7)


def test_published_pod_ignores_sign_and_scale_of_a_map():
    previous, maps = random_maps(8), random_maps(9)
    value = pod_spatial(as_tensors(previous), as_tensors(maps))
    changed = [-3.0 * level for level in maps]
    torch.testing.assert_close(pod_spatial(as_tensors(previous), as_tensors(changed)), value)
    assert 0.0 <= value.item() <= np.sqrt(2.0)


def test_published_pod_of_disjoint_maps_is_the_square_root_of_two():
    first, second = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3)
    first[0, 0], second[0, 1] = 1.0, 1.0
    assert pod_spatial([first], [second]).item() == pytest.approx(np.sqrt(2.0))


def test_the_papers_pod_grows_linearly_and_adds_over_levels():
    previous, maps = as_tensors(random_maps(10)), as_tensors(random_maps(11))
    value = pod_spatial_paper(previous, maps)
    doubled = pod_spatial_paper([2 * level for level in previous], [2 * level for level in maps])
    torch.testing.assert_close(doubled, 2 * value)
    by_level = [pod_spatial_paper([old], [new]) for old, new in zip(previous, maps, strict=True)]
    torch.testing.assert_close(sum(by_level), value)


def test_maps_that_differ_only_by_a_zero_sum_pattern_look_alike_to_the_papers_pod():
    maps = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    pattern = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert pod_spatial_paper([maps], [maps + pattern]).item() == 0.0


def test_cosine_distance_is_zero_one_two():
    first = torch.tensor([[1.0, 0.0]])
    for other, expected in [([[5.0, 0.0]], 0.0), ([[0.0, 2.0]], 1.0), ([[-3.0, 0.0]], 2.0)]:
        assert cosine_distance(first, torch.tensor(other)).item() == pytest.approx(expected, abs=1e-6)


def test_squared_distance_of_unit_features_is_twice_the_cosine_distance():
    random = np.random.default_rng(12)
    previous, current = (torch.nn.functional.normalize(torch.tensor(x)) for x in random.normal(size=(2, 5, 4)))
    torch.testing.assert_close(squared_distance(previous, current), 2 * cosine_distance(previous, current))


@pytest.mark.parametrize("loss", [cosine_distance, squared_distance])
def test_identical_or_zero_embeddings_have_a_zero_gradient(loss):
    random = np.random.default_rng(13)
    rows = torch.tensor(random.standard_normal((4, 3)))
    current = rows.clone().requires_grad_()
    value = loss(rows, current)
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    (gradient,) = torch.autograd.grad(value, current)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)
    dead = torch.zeros(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(torch.zeros(4, 3), dead), dead)
    assert torch.equal(gradient, torch.zeros(4, 3))
