"""SGD's kernel against NumPy, and where torch's step is taken instead."""

import numpy as np
import pytest
import torch
from torch import nn, optim

from ccfa.kernels.sgd import MOST, sgd_step

SHAPES = [(64, 32, 3, 3), (10, 10, 64), (), (1,), (2049,), (0, 3), *[(5,)] * MOST]


def made(shapes, device):
    """Parameters with gradients, of which some are clipped; one lies in memory as convolutions do."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    parameters[0].data = parameters[0].data.contiguous(memory_format=torch.channels_last)
    for parameter in parameters:
        drawn = 10 * torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.empty_like(parameter).copy_(drawn)
    return parameters


def sgd(parameters, **changes):
    rate = torch.tensor(0.1, device=parameters[0].device)
    return optim.SGD(parameters, **{"lr": rate, "momentum": 0.9, "weight_decay": 5e-4} | changes)


@pytest.mark.parametrize("clip_value", [None, 5.0])
def test_three_steps_against_numpy(device, clip_value):
    parameters = made(SHAPES, device)
    values = [parameter.detach().cpu().double().numpy() for parameter in parameters]
    gradients = [parameter.grad.cpu().double().numpy() for parameter in parameters]
    limit = np.inf if clip_value is None else clip_value
    optimiser, velocities = sgd(parameters), [0.0] * len(values)
    for _ in range(3):
        assert sgd_step(optimiser, clip_value)
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            velocities[place] = 0.9 * velocities[place] + np.clip(gradient, -limit, limit) + 5e-4 * value
            values[place] = value - 0.1 * velocities[place]
    for parameter, value, velocity in zip(parameters, values, velocities, strict=True):
        np.testing.assert_allclose(parameter.detach().cpu(), value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(optimiser.state[parameter]["momentum_buffer"].cpu(), velocity, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_so(device):
    parameters = made([(3, 1, 1, 1)], device)
    parameters[0].grad[1] = float("nan")
    assert sgd_step(sgd(parameters), 5.0)
    assert parameters[0].isnan().flatten().tolist() == [False, True, False]


def test_a_momentum_that_lies_in_another_order_is_torchs(device):
    parameters = made(SHAPES[:1], device)
    optimiser = sgd(parameters)
    optimiser.state[parameters[0]]["momentum_buffer"] = torch.zeros(SHAPES[0], device=device)
    assert not sgd_step(optimiser)


@pytest.mark.parametrize("changes", [{"nesterov": True}, {"momentum": 0.0}, {"lr": 0.1}, {"maximize": True}])
def test_other_steps_are_torchs(device, changes):
    parameters = made(SHAPES[:3], device)
    before = [parameter.clone() for parameter in parameters]
    assert not sgd_step(sgd(parameters, **changes))
    assert all(torch.equal(one, other) for one, other in zip(before, parameters, strict=True))


def test_without_a_gpu_it_is_torchs():
    assert not sgd_step(sgd(made(SHAPES[:3], "cpu")), 5.0)
