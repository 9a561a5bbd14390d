"""UCIR's margin ranking against the NumPy reference, and its edges."""

import numpy as np
import pytest
import torch

import reference
from ccfa.losses.ranking import margin_ranking


def random_cosines(seed: int, num_rows: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.uniform(-1, 1, (num_rows, num_classes)), random.integers(0, num_classes, num_rows)


@pytest.mark.parametrize("num_new", [1, 2, 5])
@pytest.mark.parametrize(("margin", "num_negatives"), [(0.5, 2), (0.2, 1), (1.0, 4)])
def test_as_the_reference(num_new: int, margin: float, num_negatives: int):
    similarities, labels = random_cosines(num_new, 30, 6 + num_new)
    value = margin_ranking(torch.tensor(similarities), torch.tensor(labels), 6, margin, num_negatives)
    assert value.shape == ()
    expected = reference.margin_ranking(similarities, labels, 6, margin, num_negatives)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert expected > 0


def test_the_defaults_are_the_published_margin_and_two_negatives():
    similarities, labels = random_cosines(9, 20, 9)
    value = margin_ranking(torch.tensor(similarities), torch.tensor(labels), 5)
    assert value.item() == pytest.approx(reference.margin_ranking(similarities, labels, 5, 0.5, 2), rel=1e-12)


def test_a_batch_without_old_rows_costs_nothing_and_has_a_zero_gradient():
    similarities = torch.rand(6, 5, requires_grad=True)
    value = margin_ranking(similarities, torch.tensor([3, 4, 3, 4, 3, 4]), 3)
    assert value.item() == 0.0
    (gradient,) = torch.autograd.grad(value, similarities)
    assert torch.equal(gradient, torch.zeros(6, 5))


def test_new_rows_and_far_negatives_do_not_matter():
    similarities, labels = random_cosines(10, 25, 9)
    value = margin_ranking(torch.tensor(similarities), torch.tensor(labels), 4)
    changed = similarities.copy()
    changed[labels >= 4] = 0.9
    for row in range(25):
        changed[row, 4 + np.argsort(changed[row, 4:])[:3]] = -1.0
    assert margin_ranking(torch.tensor(changed), torch.tensor(labels), 4).item() == pytest.approx(value.item())


def test_the_gradient_pulls_the_label_up_and_the_two_nearest_new_classes_down():
    similarities = torch.tensor([[0.3, 0.9, 0.1, 0.2, 0.25]], requires_grad=True)
    (gradient,) = torch.autograd.grad(margin_ranking(similarities, torch.tensor([0]), 2), similarities)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.0, 0.0, 0.5, 0.5]]))


def test_well_separated_old_rows_cost_nothing():
    similarities = torch.tensor([[0.9, 0.0, 0.3, 0.2], [0.0, 1.0, 0.4, -0.5]])
    assert margin_ranking(similarities, torch.tensor([0, 1]), 2).item() == 0.0
