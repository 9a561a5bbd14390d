import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn, optim

from ccfa.data import Stage
from ccfa.learning.loop import descend, set_learning_rate
from ccfa.methods.podnet import podnet

MAIN = podnet().phases(Stage(0, 0, 50))[0]


def parameters(*values: list[float]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(value)) for value in values]


def test_gradients_are_clamped_element_by_element():
    (x,) = parameters([0.0, 0.0, 0.0, 0.0])
    slopes = torch.tensor([100.0, -7.0, 1.0, 5.0])
    descend((slopes * x).sum(), optim.SGD([x], lr=1.0), [x], clip_value=5.0)
    assert x.tolist() == [-5, 5, -1, -5]  # clipping the norm would have scaled the third as well


def test_without_a_limit_gradients_pass():
    (x,) = parameters([0.0])
    descend(100 * x.sum(), optim.SGD([x], lr=1.0), [x], clip_value=None)
    assert x.tolist() == [-100]


def test_gradients_do_not_pile_up():
    (x,) = parameters([0.0])
    optimiser = optim.SGD([x], lr=1.0)
    for _ in range(3):
        descend(2 * x.sum(), optimiser, [x], clip_value=5.0)
    assert x.tolist() == [-6]


def test_only_the_phase_s_parameters_get_gradients():
    trained, frozen = parameters([1.0], [1.0])
    descend((trained * frozen).sum(), optim.SGD([trained], lr=0.5), [trained], clip_value=None)
    assert trained.tolist() == [0.5]
    assert frozen.grad is None
    assert frozen.tolist() == [1.0]


def test_momentum_and_weight_decay_act_after_the_clamp():
    (x,) = parameters([10.0])
    optimiser = MAIN.optimiser([x], 0.1, 0.01)
    value, velocity = 10.0, 0.0
    for _ in range(4):
        descend(50 * x.sum(), optimiser, [x], clip_value=5.0)
        velocity = 0.9 * velocity + 5.0 + 0.01 * value
        value -= 0.1 * velocity
    assert x.item() == pytest.approx(value, rel=1e-6)


def test_learning_rate_reaches_every_group():
    first, second = parameters([0.0], [0.0])
    optimiser = optim.SGD([{"params": [first]}, {"params": [second], "lr": 7.0}], lr=0.3)
    lr = set_learning_rate(optimiser, MAIN, 81)
    assert lr == pytest.approx(0.05)
    assert [group["lr"] for group in optimiser.param_groups] == [lr, lr]


def test_the_published_cosine_in_numbers():
    (x,) = parameters([0.0])
    optimiser = optim.SGD([x], lr=MAIN.lr)
    rates = [set_learning_rate(optimiser, MAIN, epoch) for epoch in range(160)]
    expected = 0.1 * (1 + np.cos(np.pi * np.maximum(np.arange(160) - 1, 0) / 160)) / 2
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert rates[:3] == pytest.approx([0.1, 0.1, 0.1 * (1 + math.cos(math.pi / 160)) / 2])
    assert rates[159] == pytest.approx(3.85e-5, abs=5e-8)


def test_the_rate_follows_the_length_of_the_phase():
    (x,) = parameters([0.0])
    short = replace(MAIN, epochs=2)
    optimiser = optim.SGD([x], lr=1.0)
    assert [set_learning_rate(optimiser, short, epoch) for epoch in range(2)] == pytest.approx([0.1, 0.1])
