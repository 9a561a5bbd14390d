"""The criteria against the NumPy reference, and the identities that tie them together."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from ccfa.losses.classification import cross_entropy, nca, nca_exclusive

PAIRS = [
    pytest.param(cross_entropy, reference.cross_entropy, id="cross_entropy"),
    pytest.param(nca, reference.nca, id="nca"),
    pytest.param(nca_exclusive, reference.nca_exclusive, id="nca_exclusive"),
]
Criterion = Callable[[Tensor, Tensor], Tensor]


def random_rows(seed: int, num_rows: int = 12, num_classes: int = 7, scale: float = 4.0):
    random = np.random.default_rng(seed)
    logits = scale * random.standard_normal((num_rows, num_classes))
    return logits, random.integers(0, num_classes, num_rows)


@pytest.mark.parametrize(("criterion", "expected"), PAIRS)
@pytest.mark.parametrize("num_classes", [2, 7])
def test_one_value_per_row_as_the_reference(criterion: Criterion, expected, num_classes: int):
    logits, labels = random_rows(0, num_classes=num_classes)
    values = criterion(torch.tensor(logits), torch.tensor(labels))
    assert values.shape == (12,)
    np.testing.assert_allclose(values.numpy(), expected(logits, labels), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("criterion", "expected"), PAIRS)
def test_gradient_is_that_of_the_reference(criterion: Criterion, expected):
    logits, labels = random_rows(1, num_rows=5)
    rows = torch.tensor(logits, requires_grad=True)
    criterion(rows, torch.tensor(labels)).sum().backward()
    numeric = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        above, below = logits.copy(), logits.copy()
        above[place] += 1e-6
        below[place] -= 1e-6
        numeric[place] = (expected(above, labels).sum() - expected(below, labels).sum()) / 2e-6
    np.testing.assert_allclose(rows.grad.numpy(), numeric, atol=1e-7)


@pytest.mark.parametrize(("criterion", "expected"), PAIRS)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_a_shift_of_every_logit_changes_nothing_and_never_overflows(criterion, expected, shift: float):
    logits, labels = random_rows(2)
    values = criterion(torch.tensor(logits + shift), torch.tensor(labels))
    np.testing.assert_allclose(values.numpy(), expected(logits, labels), atol=1e-8)


@pytest.mark.parametrize(("criterion", "expected"), PAIRS)
def test_single_precision_stays_close(criterion: Criterion, expected):
    logits, labels = random_rows(3, scale=20.0)
    values = criterion(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels))
    assert values.dtype == torch.float32
    np.testing.assert_allclose(values.numpy(), expected(logits, labels), rtol=1e-5, atol=1e-5)


def test_nca_is_cross_entropy_where_the_target_is_the_argmax():
    logits, _ = random_rows(4)
    rows, labels = torch.tensor(logits, requires_grad=True), torch.tensor(logits.argmax(axis=1))
    torch.testing.assert_close(nca(rows, labels), cross_entropy(rows, labels))
    (nca_gradient,) = torch.autograd.grad(nca(rows, labels).sum(), rows)
    (gradient,) = torch.autograd.grad(cross_entropy(rows, labels).sum(), rows)
    torch.testing.assert_close(nca_gradient, gradient)


@pytest.mark.parametrize("seed", range(5))
def test_nca_lies_between_cross_entropy_and_cross_entropy_plus_log_two(seed: int):
    logits, labels = (torch.tensor(array) for array in random_rows(seed, num_rows=50, num_classes=9))
    excess = nca(logits, labels) - cross_entropy(logits, labels)
    wrong = logits.argmax(dim=1) != labels
    assert (excess >= -1e-12).all()
    assert (excess <= np.log(2.0)).all()
    assert (excess[wrong] > 0).all()


def test_the_exclusive_nca_is_a_hinge():
    logits = torch.tensor([[5.0, 1.0, 1.0], [1.0, 5.0, 1.0]], dtype=torch.float64, requires_grad=True)
    values = nca_exclusive(logits, torch.tensor([0, 0]))
    assert values[0] == 0.0
    assert values[1] > 4.0
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert (gradient[0] == 0.0).all()
    assert gradient[1, 0] == -1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_exclusive_nca_never_exceeds_cross_entropy(seed: int):
    logits, labels = (torch.tensor(array) for array in random_rows(seed, num_rows=50))
    assert (nca_exclusive(logits, labels) <= cross_entropy(logits, labels) + 1e-12).all()


@pytest.mark.parametrize("criterion", [cross_entropy, nca])
def test_rows_do_not_influence_each_other(criterion: Criterion):
    logits, labels = (torch.tensor(array) for array in random_rows(6))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    whole = criterion(logits, labels)
    torch.testing.assert_close(criterion(logits[order], labels[order]), whole[order])
    torch.testing.assert_close(criterion(logits[:1], labels[:1]), whole[:1])


@pytest.mark.parametrize("criterion", [cross_entropy, nca, nca_exclusive])
def test_a_single_class_costs_nothing_and_has_a_zero_gradient(criterion: Criterion):
    logits = torch.tensor([[2.0], [-3.0]], requires_grad=True)
    values = criterion(logits, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert torch.equal(values, torch.zeros(2))
    assert torch.equal(gradient, torch.zeros(2, 1))
