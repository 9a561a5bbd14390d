"""Batches, learning rates and single steps of the loop."""

import numpy as np
import pytest
import torch
from torch import nn, optim

from ccfa.data import Stage
from ccfa.learning.loop import batches, descend, named_generator, num_batches, set_learning_rate
from ccfa.methods.podnet import podnet

CPU = torch.device("cpu")
MAIN = podnet().phases(Stage(0, 0, 50))[0]


def drawn(num_rows, batch_size, *purpose):
    rows = 100 + torch.arange(num_rows)
    return [batch.tolist() for batch in batches(rows, batch_size, named_generator(CPU, *purpose))]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "count"), [(10, 4, 3), (12, 4, 3), (5, 5, 1), (3, 16, 1), (17, 16, 2)]
)
def test_each_row_once_then_filled_up(num_rows, batch_size, count):
    epoch = drawn(num_rows, batch_size, "epoch")
    assert len(epoch) == num_batches(num_rows, batch_size) == count
    assert {len(batch) for batch in epoch} == {min(batch_size, num_rows)}
    flat = [row for batch in epoch for row in batch]
    assert sorted(flat[:num_rows]) == list(range(100, 100 + num_rows))
    assert set(flat[num_rows:]) <= set(flat[:num_rows])


def test_rows_keep_how_often_they_occur():
    (batch,) = batches(torch.tensor([7, 7, 7, 2]), 8, named_generator(CPU))
    assert sorted(batch.tolist()) == [2, 7, 7, 7]


def test_order_depends_on_the_purpose_alone():
    assert drawn(50, 10, 0, "batches", 1) == drawn(50, 10, 0, "batches", 1)
    orders = [drawn(50, 10, seed, "batches", epoch) for seed in (0, 1, "1") for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 6


def test_the_seed_of_a_purpose_never_changes():
    # Stored traces and resumed runs rely on it, also between processes (unlike hash()).
    assert named_generator(CPU, 0, 1, "batches").initial_seed() == 2456056753479729668


def parameters(*values):
    return [nn.Parameter(torch.tensor(value)) for value in values]


@pytest.mark.parametrize(("limit", "expected"), [(5.0, [-5, 5, -1, -5]), (None, [-100, 7, -1, -5])])
def test_gradients_are_clamped_one_by_one(limit, expected):
    (x,) = parameters([0.0, 0.0, 0.0, 0.0])
    slopes = torch.tensor([100.0, -7.0, 1.0, 5.0])
    descend((slopes * x).sum(), optim.SGD([x], lr=1.0), [x], clip_value=limit)
    assert x.tolist() == expected


def test_only_the_phases_parameters_get_gradients():
    trained, frozen = parameters([1.0], [1.0])
    descend((trained * frozen).sum(), optim.SGD([trained], lr=0.5), [trained], clip_value=None)
    assert trained.tolist() == [0.5]
    assert frozen.grad is None


def test_momentum_and_decay_act_after_the_clamp():
    (x,) = parameters([10.0])
    optimiser = MAIN.optimiser([x], 0.1, 0.01)
    value, velocity = 10.0, 0.0
    for _ in range(4):
        descend(50 * x.sum(), optimiser, [x], clip_value=5.0)
        velocity = 0.9 * velocity + 5.0 + 0.01 * value
        value -= 0.1 * velocity
    assert x.item() == pytest.approx(value, rel=1e-6)


def test_the_published_cosine_reaches_every_group():
    first, second = parameters([0.0], [0.0])
    optimiser = optim.SGD([{"params": [first]}, {"params": [second], "lr": 7.0}], lr=MAIN.lr)
    rates = []
    for epoch in range(160):
        rates.append(set_learning_rate(optimiser, MAIN, epoch))
        assert [group["lr"] for group in optimiser.param_groups] == rates[-1:] * 2
    expected = 0.1 * (1 + np.cos(np.pi * np.maximum(np.arange(160) - 1, 0) / 160)) / 2
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
