"""Our convolution and the batch norm after it are PyTorch's; on a GPU the kernels are compared with float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ccfa.kernels import Conv3x3, Normalise, normalised

SHAPES = [
    (3, 16, 1, 32),
    (16, 16, 1, 32),
    (16, 32, 2, 32),
    (32, 32, 1, 16),
    (32, 64, 2, 16),
    (64, 64, 1, 8),
    (16, 16, 2, 7),
]


def seeded(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def parts(channels, out, stride):
    conv, norm = Conv3x3(channels, out, stride), nn.BatchNorm2d(out)
    with torch.no_grad():
        conv.weight.copy_(seeded(*conv.weight.shape, scale=channels**-0.5 / 3))
        norm.weight.copy_(1 + 0.2 * seeded(out))
        norm.bias.copy_(seeded(out))
    return conv, norm


@pytest.mark.parametrize("stride", [1, 2])
def test_on_a_cpu_it_is_torchs_convolution(stride):
    torch.manual_seed(0)
    start = Conv3x3(3, 16).weight
    torch.manual_seed(0)
    assert torch.equal(start, nn.Conv2d(3, 16, 3, padding=1, bias=False).weight)
    conv, norm = parts(16, 32, stride)
    x = seeded(4, 16, 7, 7)
    plain = F.conv2d(x, conv.weight, stride=stride, padding=1)
    assert torch.equal(conv(x), plain)
    assert torch.equal(normalised(conv, copy.deepcopy(norm), x), norm(plain))


@pytest.mark.parametrize(("out", "num", "known"), [(32, 2**30 - 16, True), (32, 2**30, False), (48, 16, False)])
def test_the_kernel_takes_narrow_maps_counted_in_32_bits(monkeypatch, out, num, known):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    on_gpu = SimpleNamespace(is_cuda=True, requires_grad=False, numel=lambda: num)
    assert Conv3x3(16, out).by_kernel(on_gpu) == known


def test_normalise_has_batch_norms_gradients():
    norm = parts(3, 5, 1)[1].double()
    y, gradient = seeded(4, 5, 3, 3).double().requires_grad_(), seeded(4, 5, 3, 3).double()
    mean, variance = y.detach().mean((0, 2, 3)), y.detach().var((0, 2, 3), unbiased=False)
    found = Normalise.apply(y, mean, (variance + norm.eps).rsqrt(), norm.weight, norm.bias)
    expected = norm(y)
    torch.testing.assert_close(found, expected)
    inputs = (y, norm.weight, norm.bias)
    for one, other in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def close(found, expected, tolerance):
    assert (found.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "out", "stride", "side"), SHAPES)
def test_the_kernels_convolve_and_differentiate(channels, out, stride, side):
    conv = parts(channels, out, stride)[0].cuda()
    with torch.no_grad():
        conv.weight.copy_(conv.weight.bfloat16())  # so that both sides see the same numbers
    x = seeded(5, channels, side, side).bfloat16().cuda().requires_grad_(channels > 3)
    with torch.autocast("cuda", torch.bfloat16):
        assert conv.by_kernel(x)
        y = conv(x)
    gradient = seeded(*y.shape).bfloat16().cuda()
    *of_x, of_weight = torch.autograd.grad(y, (x, conv.weight) if channels > 3 else (conv.weight,), gradient)
    exact_x, exact_weight = x.detach().double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    exact = F.conv2d(exact_x, exact_weight, stride=stride, padding=1)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), gradient.double())
    close(y, exact, 1e-2)
    for found in of_x:
        close(found, expected[0], 1e-2)
    close(of_weight, expected[1], 1e-4)  # summed and kept in float32
    assert of_weight.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "out", "stride", "side"), SHAPES)
def test_sums_taken_on_the_way_give_batch_norm(channels, out, stride, side):
    conv, norm = (part.cuda() for part in parts(channels, out, stride))
    with torch.no_grad():
        conv.weight.copy_(conv.weight.bfloat16())
    reference = copy.deepcopy(norm).double()
    x = seeded(5, channels, side, side).bfloat16().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        found = normalised(conv, norm, x)
    expected = reference(F.conv2d(x.double(), conv.weight.double(), stride=stride, padding=1))
    close(found, expected, 1e-2)
    close(norm.running_mean, reference.running_mean, 1e-4)
    close(norm.running_var, reference.running_var, 1e-4)
    assert norm.num_batches_tracked == 1
