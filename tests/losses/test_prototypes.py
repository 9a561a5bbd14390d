"""The losses of IL2A and PASS on remembered Gaussians, against NumPy and against sampling."""

import numpy as np
import pytest
import torch

import reference_mixing as reference
from ccfa.losses.classification import cross_entropy
from ccfa.losses.prototypes import frobenius_distance, semantic_augmentation

DIM, NUM_CLASSES = 5, 4


def gaussians(seed: int = 0, num_rows: int = 6) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    factors = random.standard_normal((num_rows, DIM, DIM))
    return [
        random.standard_normal((num_rows, DIM)),
        factors @ factors.transpose(0, 2, 1) / DIM,
        random.integers(0, NUM_CLASSES, num_rows),
        random.standard_normal((NUM_CLASSES, DIM)),
        random.standard_normal(NUM_CLASSES),
    ]


@pytest.mark.parametrize(("strength", "scale"), [(2.5, 10.0), (0.3, 1.0), (0.0, 1.0)])
def test_semantic_augmentation_as_the_reference(strength, scale):
    parts = gaussians()
    value = semantic_augmentation(*map(torch.tensor, parts), strength, torch.tensor(scale, dtype=torch.float64))
    assert value.item() == pytest.approx(reference.semantic_augmentation(*parts, strength, scale), rel=1e-10)


def test_without_strength_it_is_cross_entropy_of_the_prototypes():
    prototypes, covariances, labels, weights, biases = map(torch.tensor, gaussians(1))
    value = semantic_augmentation(prototypes, covariances, labels, weights, biases, 0.0, torch.tensor(1.0))
    expected = cross_entropy(prototypes @ weights.T + biases, labels).mean()
    torch.testing.assert_close(value, expected)


def test_it_bounds_the_loss_of_features_drawn_from_the_gaussian():
    prototypes, covariances, labels, weights, biases = gaussians(2, num_rows=1)
    strength = 0.1
    drawn = np.random.default_rng(0).multivariate_normal(prototypes[0], strength * covariances[0], 20000)
    sampled = reference.cross_entropy(drawn @ weights.T + biases, np.repeat(labels, len(drawn))).mean()
    bound = reference.semantic_augmentation(prototypes, covariances, labels, weights, biases, strength, 1.0)
    assert sampled < bound < 1.5 * sampled


def test_the_quadratic_term_teaches_the_head():
    prototypes, covariances, labels, weights, biases = map(torch.tensor, gaussians(3))
    weights.requires_grad_()
    with_spread, without = (
        torch.autograd.grad(
            semantic_augmentation(prototypes, covariances, labels, weights, biases, strength, torch.tensor(1.0)),
            weights,
        )[0]
        for strength in (2.5, 0.0)
    )
    assert not torch.allclose(with_spread, without)


def test_frobenius_distance_as_the_reference_and_rows_without_weight_do_not_count():
    random = np.random.default_rng(0)
    old, new = random.standard_normal((2, 6, DIM))
    weights = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    value = frobenius_distance(*map(torch.tensor, (old, new, weights)))
    assert value.item() == pytest.approx(reference.frobenius_distance(old, new, weights), rel=1e-12)
    kept = torch.tensor(old)[weights > 0], torch.tensor(new)[weights > 0]
    torch.testing.assert_close(value, torch.dist(*kept))


def test_no_distance_no_gradient():
    features = torch.ones(3, DIM, requires_grad=True)
    value = frobenius_distance(torch.ones(3, DIM), features, torch.ones(3))
    (gradient,) = torch.autograd.grad(value, features)
    assert value.item() == 0
    assert torch.equal(gradient, torch.zeros(3, DIM))
