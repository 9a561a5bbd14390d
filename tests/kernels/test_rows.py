"""Functions of rows against torch's in float64."""

import pytest
import torch
from torch.nn import functional as F

from ccfa import losses
from ccfa.kernels.rows import cosine_distance, unit_rows


def rows(device, num, dim, seed, zero=True):
    made = torch.randn(num, dim, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, num)[:, None]
    if zero:
        made[num // 2] = 0
    return made.to(device)


def test_without_a_gpu_they_are_torchs():
    x = rows("cpu", 5, 8, 0).requires_grad_()
    assert torch.equal(unit_rows(x), F.normalize(x))
    assert cosine_distance(x.detach(), x) is None


@pytest.mark.parametrize(("num", "dim"), [(1, 64), (7, 5), (128, 64), (130, 512)])
def test_unit_rows_and_their_gradient(device, num, dim):
    x, gradient = rows(device, num, dim, 0).requires_grad_(), rows(device, num, dim, 1, zero=False)
    exact = x.detach().double().requires_grad_()
    found, expected = unit_rows(x), F.normalize(exact)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    (one,), (other,) = torch.autograd.grad(found, x, gradient), torch.autograd.grad(expected, exact, gradient.double())
    torch.testing.assert_close(one.double() / other.norm(dim=1, keepdim=True), F.normalize(other), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("num", "dim"), [(2, 64), (7, 5), (128, 64), (130, 512)])
def test_cosine_distance_and_its_gradient(device, num, dim):
    previous, x = rows(device, num, dim, 0), rows(device, num, dim, 1).requires_grad_()
    previous[1] = x.detach()[1]  # where the distance is 0
    exact = x.detach().double().requires_grad_()
    found, expected = cosine_distance(previous, x), losses.cosine_distance(previous.double(), exact)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    (one,), (other,) = torch.autograd.grad(3 * found, x), torch.autograd.grad(3 * expected, exact)
    size = 1 / x.detach().double().norm(dim=1, keepdim=True).clamp(min=1e-8) / num
    torch.testing.assert_close(one.double() / size, other / size, atol=1e-5, rtol=1e-4)
    assert torch.equal(found, cosine_distance(previous, x))
