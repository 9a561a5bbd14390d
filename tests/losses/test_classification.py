"""Losses on class scores against the NumPy reference, and the identities that tie them together."""

import numpy as np
import pytest
import torch

import reference
from ccfa.losses import (
    binary_cross_entropy,
    cross_entropy,
    margin_ranking,
    nca,
    nca_exclusive,
    semantic_augmentation,
)

CRITERIA = {
    cross_entropy: reference.cross_entropy,
    nca: reference.nca,
    nca_exclusive: reference.nca_exclusive,
    binary_cross_entropy: reference.binary_cross_entropy,
}
SHIFT_FREE = [cross_entropy, nca, nca_exclusive]


def random_rows(seed: int, num_rows: int = 12, num_classes: int = 7, scale: float = 4.0):
    random = np.random.default_rng(seed)
    logits = scale * random.standard_normal((num_rows, num_classes))
    return logits, random.integers(0, num_classes, num_rows)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("num_classes", [2, 7])
def test_one_value_per_row_as_the_reference(criterion, num_classes):
    logits, labels = random_rows(0, num_classes=num_classes)
    expected = CRITERIA[criterion](logits, labels)
    values = criterion(torch.tensor(logits), torch.tensor(labels))
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-13)
    single = criterion(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(criterion(torch.tensor(logits[:1]), torch.tensor(labels[:1])), values[:1])


@pytest.mark.parametrize("criterion", SHIFT_FREE)
def test_gradients_as_the_reference(criterion):
    logits, labels = random_rows(1, num_rows=5)
    rows = torch.tensor(logits, requires_grad=True)
    (gradient,) = torch.autograd.grad(criterion(rows, torch.tensor(labels)).sum(), rows)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-6
        above, below = (CRITERIA[criterion](logits + sign * step, labels).sum() for sign in (1, -1))
        assert gradient[place].item() == pytest.approx((above - below) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("criterion", SHIFT_FREE)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_shifted_logits_cost_the_same(criterion, shift):
    logits, labels = random_rows(2)
    values = criterion(torch.tensor(logits + shift), torch.tensor(labels))
    np.testing.assert_allclose(values, CRITERIA[criterion](logits, labels), atol=1e-8)


def test_nca_is_cross_entropy_where_the_target_is_the_argmax():
    logits, _ = random_rows(4)
    rows, labels = torch.tensor(logits, requires_grad=True), torch.tensor(logits.argmax(axis=1))
    torch.testing.assert_close(nca(rows, labels), cross_entropy(rows, labels))
    gradients = [torch.autograd.grad(criterion(rows, labels).sum(), rows)[0] for criterion in (nca, cross_entropy)]
    torch.testing.assert_close(*gradients)


def test_both_ncas_lie_around_cross_entropy():
    logits, labels = (torch.tensor(array) for array in random_rows(5, num_rows=200, num_classes=9))
    excess = nca(logits, labels) - cross_entropy(logits, labels)
    assert (excess >= -1e-12).all()
    assert (excess <= np.log(2.0)).all()
    assert (excess[logits.argmax(dim=1) != labels] > 0).all()
    assert (nca_exclusive(logits, labels) <= cross_entropy(logits, labels) + 1e-12).all()


def test_the_exclusive_nca_is_a_hinge():
    logits = torch.tensor([[5.0, 1.0, 1.0], [1.0, 5.0, 1.0]], dtype=torch.float64, requires_grad=True)
    values = nca_exclusive(logits, torch.tensor([0, 0]))
    assert values[0] == 0.0
    assert values[1] > 4.0
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert (gradient[0] == 0.0).all()
    assert gradient[1, 0] == -1.0


@pytest.mark.parametrize("criterion", SHIFT_FREE)
def test_a_single_class_costs_nothing(criterion):
    logits = torch.tensor([[2.0], [-3.0]], requires_grad=True)
    values = criterion(logits, torch.tensor([0, 0]))
    assert torch.equal(values, torch.zeros(2))
    assert torch.equal(torch.autograd.grad(values.sum(), logits)[0], torch.zeros(2, 1))


def random_cosines(seed: int, num_rows: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.uniform(-1, 1, (num_rows, num_classes)), random.integers(0, num_classes, num_rows)


@pytest.mark.parametrize("num_new", [1, 2, 5])
@pytest.mark.parametrize("options", [(), (0.2, 1), (1.0, 4)])
def test_margin_ranking_as_the_reference(num_new, options):
    similarities, labels = random_cosines(num_new, 30, 6 + num_new)
    value = margin_ranking(torch.tensor(similarities), torch.tensor(labels), 6, *options)
    expected = reference.margin_ranking(similarities, labels, 6, *(options or (0.5, 2)))
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert expected > 0


def test_margin_ranking_moves_old_rows_alone():
    similarities = torch.tensor([[0.3, 0.9, 0.1, 0.2, 0.25], [0, 0, 0.1, 0.9, 0.9]], requires_grad=True)
    (gradient,) = torch.autograd.grad(margin_ranking(similarities, torch.tensor([0, 2]), 2), similarities)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0, 0, 0.5, 0.5], [0, 0, 0, 0, 0]]))
    without_old = margin_ranking(similarities, torch.tensor([3, 4]), 2)
    assert without_old.item() == 0
    assert not torch.autograd.grad(without_old, similarities)[0].any()
    apart = torch.tensor([[0.9, 0.0, 0.3, 0.2], [0.0, 1.0, 0.4, -0.5]])
    assert margin_ranking(apart, torch.tensor([0, 1]), 2).item() == 0


def gaussians(seed: int, num_rows: int = 6, dim: int = 5, num_classes: int = 4) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    factors = random.standard_normal((num_rows, dim, dim))
    return [
        random.standard_normal((num_rows, dim)),
        factors @ factors.transpose(0, 2, 1) / dim,
        random.integers(0, num_classes, num_rows),
        random.standard_normal((num_classes, dim)),
        random.standard_normal(num_classes),
    ]


@pytest.mark.parametrize(("strength", "scale"), [(2.5, 10.0), (0.3, 1.0), (0.0, 1.0)])
def test_semantic_augmentation_as_the_reference(strength, scale):
    parts = gaussians(0)
    value = semantic_augmentation(*map(torch.tensor, parts), strength, torch.tensor(scale, dtype=torch.float64))
    assert value.item() == pytest.approx(reference.semantic_augmentation(*parts, strength, scale), rel=1e-10)


def test_semantic_augmentation_bounds_the_loss_of_drawn_features():
    prototypes, covariances, labels, weights, biases = gaussians(2, num_rows=1)
    drawn = np.random.default_rng(0).multivariate_normal(prototypes[0], 0.1 * covariances[0], 20000)
    sampled = reference.cross_entropy(drawn @ weights.T + biases, np.repeat(labels, len(drawn))).mean()
    parts = map(torch.tensor, (prototypes, covariances, labels, weights, biases))
    assert sampled < semantic_augmentation(*parts, 0.1, torch.tensor(1.0)).item() < 1.5 * sampled
