"""The attack against NumPy, and the kernel against the plain version."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ccfa.augmentation import ccfa as module
from ccfa.augmentation.ccfa import attack
from ccfa.augmentation.samples import compared_directions
from ccfa.augmentation.targets import most_confident
from ccfa.kernels import confident_classes
from ccfa.losses import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, LinearHead, LocalSimilarityHead
from cuda_on_cpu import in_reverse

CRITERIA = [cross_entropy, nca, nca_exclusive]


class Foreign(CosineHead):
    """A head that the kernel does not know."""


def grown(head, num_classes=7):
    head.grow(num_classes - 3, torch.Generator().manual_seed(1))
    head.grow(3, torch.Generator().manual_seed(2))
    if isinstance(head.scale, torch.nn.Parameter):
        head.scale.data.fill_(4.0)
    return head.double().requires_grad_(False)


def problem(dim=8, num_classes=7, num_rows=40):
    """Unit features, their norms, targets and step sizes."""
    generator = torch.Generator().manual_seed(0)
    start = F.normalize(torch.randn(num_rows, dim, generator=generator, dtype=torch.float64))
    norms = 1 + torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(num_classes, (num_rows,), generator=generator)
    alpha = 0.008 + 0.012 * torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    return start, norms, targets, alpha


def test_linear_head_attacked_as_in_numpy():
    head = grown(LinearHead(8, temperature=0.5))
    start, norms, targets, alpha = problem()
    attacked, labels = attack(head, cross_entropy, start, norms, targets, alpha, 10)
    weights, biases = head.weights[:, :-1].numpy(), head.weights[:, -1].numpy()
    z, lengths, one_hot = start.numpy(), norms.numpy(), np.eye(7)[targets.numpy()]
    for _ in range(10):
        powers = np.exp(2 * (z * lengths @ weights.T + biases))
        z = z - alpha.numpy() * np.sign((powers / powers.sum(axis=1, keepdims=True) - one_hot) @ weights)
    np.testing.assert_allclose(attacked, z * lengths, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(labels, (z * lengths @ weights.T + biases).argmax(axis=1))


def test_margin_counts_in_the_gradient():
    plain, with_margin = (grown(LocalSimilarityHead(8, num_proxies=3, margin=margin)) for margin in (0.0, 0.6))
    attacked, _ = attack(with_margin, nca_exclusive, *problem(), 10)
    wanted, _ = attack(lambda z: plain(z) - 4 * 0.6 * F.one_hot(problem()[2], 7), nca_exclusive, *problem(), 10)
    torch.testing.assert_close(attacked, wanted, rtol=0, atol=1e-12)
    assert not torch.equal(attacked, attack(plain, nca_exclusive, *problem(), 10)[0])


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("make", [LinearHead, CosineHead, LocalSimilarityHead])
def test_attacks_reach_their_targets(make, criterion):
    head, (start, norms, targets, alpha) = grown(make(8)), problem()
    attacked, labels = attack(head, criterion, start, norms, targets, alpha, 10)
    unmoved, labels_before = attack(head, criterion, start, norms, targets, alpha, 0)
    assert torch.equal(unmoved, start * norms)
    assert torch.equal(labels_before, head(start * norms).argmax(dim=1))
    assert (labels == targets).sum() > (labels_before == targets).sum()
    assert (attacked - unmoved).abs().max() > 0.05


@pytest.mark.parametrize(
    ("head", "criterion", "known"),
    [
        (CosineHead(8), nca, "cosine"),
        (LocalSimilarityHead(8), cross_entropy, "distance"),
        (LocalSimilarityHead(8, margin=0.6), nca, None),
        (LinearHead(8), cross_entropy, None),
        (Foreign(8), cross_entropy, None),
        (CosineHead(8), lambda logits, labels: cross_entropy(logits, labels), None),
    ],
)
def test_known_heads_use_the_kernel(monkeypatch, head, criterion, known):
    asked, result = [], (torch.ones(40, 8), torch.zeros(40, dtype=torch.int64))
    monkeypatch.setattr(module, "sphere_attack", lambda *problem: asked.append(problem) or result)
    start, norms, targets, alpha = problem()
    attacked, _ = attack(grown(head), criterion, start, norms, targets, alpha, 3)
    assert [(proxies.shape[0], kind, name) for proxies, _, kind, name, *_ in asked] == (
        [(7, known, criterion.__name__)] if known else []
    )
    assert torch.equal(attacked, norms.expand(-1, 8)) == bool(known)


@pytest.mark.parametrize("num_classes", [7, 50, 90, 150])  # 150 need more than one tile
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("make", [CosineHead, LocalSimilarityHead], ids=lambda kind: kind.__name__)
def test_the_kernel_makes_the_same_attack(device, monkeypatch, make, criterion, num_classes):
    head = grown(make(64), num_classes).to(device)
    num_rows = 645 if device.type == "cuda" else 21  # no whole blocks
    start, norms, targets, alpha = (tensor.to(device) for tensor in problem(64, num_classes, num_rows))
    by_kernel, answers = module.sphere_attack, []
    monkeypatch.setattr(module, "sphere_attack", lambda *problem: None)
    expected, expected_labels = attack(head, criterion, start, norms, targets, alpha, 10)
    monkeypatch.setattr(module, "sphere_attack", lambda *problem: answers.append(by_kernel(*problem)) or answers[-1])
    attacked, labels = attack(head.float(), criterion, start.float(), norms.float(), targets, alpha.float(), 10)
    assert answers[0] is not None
    # A sign is a matter of rounding where the gradient is almost 0; a wrong gradient would change most of them.
    assert ((attacked - expected).abs() > 1e-4).double().mean() < 0.005
    assert (labels == expected_labels).double().mean() > 0.99
    with in_reverse():
        again = attack(head, criterion, start.float(), norms.float(), targets, alpha.float(), 10)
    assert torch.equal(again[0], attacked)
    assert torch.equal(again[1], labels)


def test_other_dimensions_are_attacked_without_the_kernel(device):
    head, (start, norms, targets, alpha) = grown(CosineHead(48)), problem(48)
    expected, _ = attack(head, cross_entropy, start, norms, targets, alpha, 5)
    found, _ = attack(head.to(device), cross_entropy, *(part.to(device) for part in (start, norms, targets, alpha)), 5)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("num_old", [1, 7, 50, 99])
@pytest.mark.parametrize("make", [CosineHead, LocalSimilarityHead], ids=lambda kind: kind.__name__)
def test_the_kernel_chooses_the_same_targets(device, make, num_old, num_labels):
    head = grown(make(64), num_old + 10).to(device)
    features = torch.randn(130, 64, generator=torch.Generator().manual_seed(3)).to(device)
    labels = torch.randint(num_old + 10, (130, num_labels), generator=torch.Generator().manual_seed(4)).to(device)
    expected = most_confident(head(features.double()), labels, num_old, 1, None)
    proxies, scale, similarity, _ = compared_directions(head.float(), nca)
    classes, valid = confident_classes(features, labels, proxies[:num_old], scale, similarity)
    with in_reverse():
        again = confident_classes(features, labels, proxies[:num_old], scale, similarity)
    assert torch.equal(classes, again[0])
    assert torch.equal(valid, again[1])
    assert torch.equal(valid, expected.valid[0])
    assert (classes == expected.classes[0])[valid].double().mean() > 0.99
