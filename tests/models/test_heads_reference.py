"""The heads' scores against the NumPy reference, and how they grow."""

from functools import partial

import numpy as np
import pytest
import torch

import reference
from ccfa.models import KeepingLinearHead
from ccfa.models.heads import CosineHead, Head, LinearHead, LocalSimilarityHead

DIM = 6


def grown(head: Head, scale: float | None = None) -> Head:
    """The head in float64 after two stages of 4 and 3 classes, with its scale set."""
    generator = torch.Generator().manual_seed(0)
    head = head.double()
    head.grow(4, generator)
    head.grow(3, generator)
    if scale is not None:
        head.scale.data.fill_(scale)
    return head


def random_features(num_rows: int = 9) -> np.ndarray:
    return 3.0 * np.random.default_rng(1).standard_normal((num_rows, DIM))


def numpy_weights(head: Head) -> np.ndarray:
    return np.concatenate([head.old.detach().numpy(), head.new.detach().numpy()])


HEADS = [
    pytest.param(lambda: CosineHead(DIM), id="cosine"),
    pytest.param(lambda: LocalSimilarityHead(DIM, num_proxies=5), id="local similarity"),
    pytest.param(lambda: LinearHead(DIM), id="linear"),
    pytest.param(lambda: LinearHead(DIM, bias=False), id="linear without bias"),
]


def test_cosine_head_as_the_reference():
    head, features = grown(CosineHead(DIM), scale=3.5), random_features()
    expected = reference.CosineHead(numpy_weights(head), 3.5)
    logits, similarities = head(torch.tensor(features)), head.similarities(torch.tensor(features))
    np.testing.assert_allclose(logits.detach(), [expected.logits(row) for row in features], atol=1e-12)
    np.testing.assert_allclose(similarities.detach(), [expected.similarities(row) for row in features], atol=1e-12)


@pytest.mark.parametrize("num_proxies", [1, 10])
def test_local_similarity_head_as_the_reference(num_proxies: int):
    head, features = grown(LocalSimilarityHead(DIM, num_proxies), scale=3.5), random_features()
    expected = reference.LocalSimilarityHead(numpy_weights(head), 3.5)
    logits, similarities = head(torch.tensor(features)), head.similarities(torch.tensor(features))
    np.testing.assert_allclose(logits.detach(), [expected.logits(row) for row in features], atol=1e-12)
    np.testing.assert_allclose(similarities.detach(), [expected.similarities(row) for row in features], atol=1e-12)


def test_the_margin_comes_off_the_label_only_and_only_where_labels_are_given():
    head, features = grown(LocalSimilarityHead(DIM, 5, margin=0.6), scale=2.0), random_features()
    labels = np.arange(len(features)) % 7
    expected = reference.LocalSimilarityHead(numpy_weights(head), 2.0, margin=0.6)
    rows = torch.tensor(features)
    with_labels = [expected.logits(row, label) for row, label in zip(features, labels, strict=True)]
    np.testing.assert_allclose(head(rows, torch.tensor(labels)).detach(), with_labels, atol=1e-12)
    np.testing.assert_allclose(head(rows).detach(), [expected.logits(row) for row in features], atol=1e-12)


def test_linear_head_as_the_reference():
    head, features = grown(LinearHead(DIM)), random_features()
    with torch.no_grad():
        head.new.copy_(torch.randn(head.new.shape, generator=torch.Generator().manual_seed(4)))
    weights = numpy_weights(head)
    expected = reference.LinearHead(weights[:, :-1], weights[:, -1])
    np.testing.assert_allclose(
        head(torch.tensor(features)).detach(), [expected.logits(row) for row in features], atol=1e-12
    )


def test_linear_head_without_bias_as_the_reference():
    head, features = grown(LinearHead(DIM, bias=False)), random_features()
    expected = reference.LinearHead(numpy_weights(head), np.zeros(7))
    np.testing.assert_allclose(
        head(torch.tensor(features)).detach(), [expected.logits(row) for row in features], atol=1e-12
    )


@pytest.mark.parametrize("make", [HEADS[0], HEADS[1]])
def test_heads_on_the_sphere_ignore_lengths_and_embed_there(make):
    head, features = grown(make(), scale=2.0), torch.tensor(random_features())
    torch.testing.assert_close(head(7.0 * features), head(features))
    torch.testing.assert_close(head(head.embed(features)), head(features))
    torch.testing.assert_close(head.embed(features).norm(dim=1), torch.ones(9, dtype=torch.float64))


def test_local_similarities_lie_between_minus_four_and_zero():
    head = grown(LocalSimilarityHead(DIM, 1))
    proxies = head.new.detach().squeeze(1)
    values = head.similarities(torch.cat([proxies, -proxies]))
    torch.testing.assert_close(values[:3, 4:].diagonal(), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(values[3:, 4:].diagonal(), torch.full((3,), -4.0, dtype=torch.float64))


@pytest.mark.parametrize("make", HEADS)
def test_growing_keeps_every_old_score_and_appends_new_classes(make):
    head, features = grown(make(), scale=2.0), torch.tensor(random_features())
    before, weights, scale = head(features).detach(), numpy_weights(head), head.scale.item()
    head.grow(2, torch.Generator().manual_seed(5))
    after = head(features).detach()
    assert after.shape == (9, 9)
    assert head.num_classes == 9
    torch.testing.assert_close(after[:, :7], before)
    np.testing.assert_array_equal(head.old.detach().numpy(), weights)
    assert len(head.new) == 2
    assert head.scale.item() == scale
    assert head.old.requires_grad
    assert head.new.requires_grad


@pytest.mark.parametrize("make", HEADS)
def test_freezing_the_old_block_leaves_the_new_one_trainable(make):
    head, features = grown(make()), torch.tensor(random_features())
    head.old.requires_grad_(False)
    head(features).square().sum().backward()
    assert head.old.grad is None
    assert head.new.grad.abs().max() > 0


def test_initial_values_have_the_published_spread():
    dim, generator = 64, torch.Generator().manual_seed(6)
    proxies = LocalSimilarityHead(dim).initial(200, generator)
    assert proxies.shape == (200, 10, dim)
    assert proxies.std().item() == pytest.approx(1 / 8, rel=0.01)
    weights = CosineHead(dim).initial(500, generator)
    assert weights.abs().max().item() <= 1 / 8
    assert weights.std().item() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.01)
    for rows in (head(dim).initial(500, generator) for head in (partial(LinearHead, uniform=True), KeepingLinearHead)):
        assert rows.shape == (500, dim + 1)
        assert rows.abs().max().item() <= 1 / 8
        assert rows.std().item() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.01)
        assert rows[:, -1].std().item() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.05)
    linear = LinearHead(dim).initial(500, generator)
    assert torch.equal(linear[:, -1], torch.zeros(500))
