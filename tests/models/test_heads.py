"""The heads' scores against the NumPy reference, how they grow, and the network that they make."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import optim

import reference
from ccfa.models import BACKBONES, CosineHead, Head, LinearHead, LocalSimilarityHead, Network

DIM = 6
FEATURES = 3.0 * np.random.default_rng(1).standard_normal((9, DIM))


def without_bias(weights: np.ndarray, scale: float) -> reference.LinearHead:
    return reference.LinearHead(scale * weights, np.zeros(len(weights)))


def with_bias(weights: np.ndarray, scale: float) -> reference.LinearHead:
    return reference.LinearHead(scale * weights[:, :-1], scale * weights[:, -1])


HEADS = {
    "cosine": (CosineHead, reference.CosineHead),
    "local similarity": (partial(LocalSimilarityHead, num_proxies=5), reference.LocalSimilarityHead),
    "one proxy": (partial(LocalSimilarityHead, num_proxies=1), reference.LocalSimilarityHead),
    "linear": (partial(LinearHead, uniform=True), with_bias),
    "linear without bias": (partial(LinearHead, bias=False), without_bias),
}
every_head = pytest.mark.parametrize("name", HEADS)


def grown(make, scale: float = 2.0) -> Head:
    """The head in float64 after two stages of 4 and 3 classes, with its scale set."""
    generator, head = torch.Generator().manual_seed(0), make(DIM).double()
    head.grow(4, generator)
    head.grow(3, generator)
    head.scale.data.fill_(scale)
    return head


def numpy_weights(head: Head) -> np.ndarray:
    return np.concatenate([head.old.detach().numpy(), head.new.detach().numpy()])


@every_head
def test_logits_as_the_reference(name):
    make, in_numpy = HEADS[name]
    head = grown(make, scale=3.5)
    expected = [in_numpy(numpy_weights(head), 3.5).logits(row) for row in FEATURES]
    np.testing.assert_allclose(head(torch.tensor(FEATURES)).detach(), expected, atol=1e-12)
    similarities = head.similarities(torch.tensor(FEATURES)).detach()
    np.testing.assert_allclose(similarities, np.array(expected) / 3.5, atol=1e-12)


def test_the_margin_comes_off_the_given_labels():
    head, labels = grown(partial(LocalSimilarityHead, num_proxies=5, margin=0.6)), np.arange(9) % 7
    expected = reference.LocalSimilarityHead(numpy_weights(head), 2.0, margin=0.6)
    rows = torch.tensor(FEATURES)
    with_labels = [expected.logits(row, label) for row, label in zip(FEATURES, labels, strict=True)]
    np.testing.assert_allclose(head(rows, torch.tensor(labels)).detach(), with_labels, atol=1e-12)
    np.testing.assert_allclose(head(rows).detach(), [expected.logits(row) for row in FEATURES], atol=1e-12)


@pytest.mark.parametrize("name", ["cosine", "local similarity"])
def test_heads_on_the_sphere_ignore_lengths(name):
    head, features = grown(HEADS[name][0]), torch.tensor(FEATURES)
    torch.testing.assert_close(head(7.0 * features), head(features))
    torch.testing.assert_close(head(head.embed(features)), head(features))
    torch.testing.assert_close(head.embed(features).norm(dim=1), torch.ones(9, dtype=torch.float64))


@every_head
def test_growing_keeps_old_scores(name):
    head, features = grown(HEADS[name][0]), torch.tensor(FEATURES)
    before, weights = head(features).detach(), numpy_weights(head)
    head.grow(2, torch.Generator().manual_seed(5))
    after = head(features)
    assert after.shape == (9, 9)
    torch.testing.assert_close(after[:, :7], before)
    np.testing.assert_array_equal(head.old.detach().numpy(), weights)
    assert (head.num_classes, len(head.new), head.scale.item()) == (9, 2, 2.0)


def test_initial_values_have_the_published_spread():
    dim, generator = 64, torch.Generator().manual_seed(6)
    proxies = LocalSimilarityHead(dim).initial(200, generator)
    assert proxies.shape == (200, 10, dim)
    assert proxies.std().item() == pytest.approx(1 / 8, rel=0.01)
    for head, width in [(CosineHead, dim), (partial(LinearHead, uniform=True), dim + 1)]:
        rows = head(dim).initial(500, generator)
        assert rows.shape == (500, width)
        assert rows.abs().max().item() <= 1 / 8
        assert rows.std().item() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.01)
        assert rows[:, -1].std().item() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.05)
    assert torch.equal(LinearHead(dim).initial(500, generator)[:, -1], torch.zeros(500))


@pytest.mark.parametrize("head", [LinearHead, CosineHead, LocalSimilarityHead])
def test_a_frozen_copy_never_changes(head):
    torch.manual_seed(0)
    network, images = Network(BACKBONES["small"](3), head(64)), torch.randn(8, 3, 8, 8)
    network.head.grow(3)
    copy = network.frozen_copy()
    assert network.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    before = copy(images)
    embedding = network.eval().backbone(images).embedding
    torch.testing.assert_close(before, network.head(network.head.embed(embedding)))

    optimiser = optim.SGD(network.train().parameters(), lr=0.1)
    network(images).square().mean().backward()
    optimiser.step()
    network.head.grow(2)
    assert torch.equal(copy(images), before)
    assert not torch.equal(network.eval()(images)[:, :3], before)
