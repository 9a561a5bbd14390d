"""POD-spatial's kernels against float64."""

import pytest
import torch

from ccfa import losses
from ccfa.kernels.pod import pod_spatial
from cuda_on_cpu import in_reverse

RESNET32 = [(16, 32, 32), (32, 16, 16), (64, 8, 8), (64, 8, 8)]  # PODNet's levels
ODD = [(8, 7, 7), (24, 5, 3), (8, 1, 4), (40, 13, 9), (8, 1, 1)]
LARGE = [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]  # the first ones do not fit into shared memory
ROUNDING = 2**-8  # of a number stored in bfloat16


def random_maps(device, shapes, batch, seed):
    batch = batch if device.type == "cuda" else min(batch, 5)
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn(batch, *shape, generator=generator) for shape in shapes]
    return [level.to(device, torch.bfloat16, memory_format=torch.channels_last) for level in maps]


def with_gradients(loss, previous, current, weight=3.7):
    current = [level.detach().requires_grad_() for level in current]
    value = loss(previous, current)
    return value.detach(), torch.autograd.grad(weight * value, current)


def in_float64(previous, current):
    return with_gradients(losses.pod_spatial, *([level.double() for level in maps] for maps in (previous, current)))


def test_without_a_gpu_no_kernel_is_used():
    assert pod_spatial(*(random_maps(torch.device("cpu"), ODD, 2, seed) for seed in (0, 1))) is None


@pytest.mark.parametrize("noise", [None, 0.1])
@pytest.mark.parametrize("batch", [1, 3, 128])
@pytest.mark.parametrize("shapes", [RESNET32, ODD, LARGE], ids=["resnet32", "odd", "large"])
def test_loss_and_gradients_against_float64(device, shapes, batch, noise):
    previous, current = random_maps(device, shapes, batch, 0), random_maps(device, shapes, batch, 1)
    if noise:
        current = [old + noise * old * torch.randn_like(old) for old in previous]
    value, gradients = with_gradients(pod_spatial, previous, current)
    expected, exact = in_float64(previous, current)
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, true, level in zip(gradients, exact, current, strict=True):
        assert found.dtype == torch.bfloat16
        assert found.stride() == level.stride()
        torch.testing.assert_close(found.double(), true, rtol=ROUNDING, atol=1e-4 * true.abs().max().item())


def test_same_maps_give_the_same_bits(device):
    previous, current = random_maps(device, RESNET32, 128, 0), random_maps(device, RESNET32, 128, 1)
    value, gradients = with_gradients(pod_spatial, previous, current)
    for _ in range(10 if device.type == "cuda" else 1):
        with in_reverse():
            again, others = with_gradients(pod_spatial, previous, current)
        assert torch.equal(value, again)
        assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


@pytest.mark.parametrize("shapes", [RESNET32, ODD, LARGE], ids=["resnet32", "odd", "large"])
@pytest.mark.parametrize("factor", [0, 1], ids=["all-zero maps", "random maps"])
def test_identical_maps_cost_nothing(device, shapes, factor):
    maps = [factor * level for level in random_maps(device, shapes, 5, 0)]
    value, gradients = with_gradients(pod_spatial, maps, [level.clone() for level in maps])
    assert value.item() == 0
    assert not any(gradient.any() for gradient in gradients)


def test_dead_maps_do_not_spoil_the_gradient(device):
    previous, current = random_maps(device, RESNET32, 3, 0), random_maps(device, RESNET32, 3, 1)
    current[0][1] = previous[0][1]  # an identical row
    current[1][2] = current[2][:, 1] = previous[2][:, 0] = 0  # a dead row and dead channels
    value, gradients = with_gradients(pod_spatial, previous, current)
    expected, exact = in_float64(previous, current)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert not gradients[0][1].any()
    for found, true in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=ROUNDING, atol=1e-4 * true.abs().max().item())


@pytest.mark.gpu
def test_a_captured_step_as_an_ordinary_one():
    device = torch.device("cuda")
    previous, current = random_maps(device, RESNET32, 16, 0), random_maps(device, RESNET32, 16, 1)
    expected, exact = with_gradients(pod_spatial, previous, current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, gradients = with_gradients(pod_spatial, previous, current)
    graph.replay()
    assert torch.equal(value, expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, exact, strict=True))


def test_where_no_kernel_can_be_used(device):
    previous, current = random_maps(device, RESNET32, 2, 0), random_maps(device, RESNET32, 2, 1)
    assert pod_spatial(previous, current) is not None
    assert pod_spatial(previous, [level.float() for level in current]) is None
    assert pod_spatial(previous, [level.contiguous() for level in current]) is None
    assert pod_spatial(previous[:3], current) is None
    assert pod_spatial(previous[::-1], current) is None
    assert pod_spatial([level.clone().requires_grad_() for level in previous], current) is None
    assert pod_spatial(3 * previous, 3 * current) is None
    assert pod_spatial(random_maps(device, [(12, 8, 8)], 2, 0), random_maps(device, [(12, 8, 8)], 2, 1)) is None
    assert pod_spatial(random_maps(device, [(512, 64, 64)], 2, 0), random_maps(device, [(512, 64, 64)], 2, 1)) is None
