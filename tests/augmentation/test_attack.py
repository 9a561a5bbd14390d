"""Every way to attack is the same attack: autograd, the written-out gradient, the kernel."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ccfa.augmentation.attack import attack_on, autograd_gradient, sign_steps
from ccfa.augmentation.balanced import ITERATIONS, PRICE_WEIGHT, RESTART, assign, solve
from ccfa.augmentation.closed_form import closed_form_gradient
from ccfa.losses.classification import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, KeepingLinearHead, LinearHead, LocalSimilarityHead

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])

HEADS = {
    "linear": lambda dim: LinearHead(dim),
    "linear, outputs kept": lambda dim: KeepingLinearHead(dim, temperature=0.1),
    "linear without bias": lambda dim: LinearHead(dim, bias=False, temperature=0.1),
    "cosine": lambda dim: CosineHead(dim),
    "local similarity": lambda dim: LocalSimilarityHead(dim, num_proxies=3),
}
CRITERIA = [cross_entropy, nca, nca_exclusive]


class Foreign(CosineHead):
    """A head whose gradient nobody has written out."""


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


def way(attack):
    """Which function makes the gradient of an attack by sign steps."""
    assert attack.func is sign_steps
    return attack.args[1].__qualname__.partition(".")[0]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("name", HEADS)
def test_our_heads_are_attacked_in_closed_form_and_foreign_ones_by_autograd(name, criterion):
    head = grown(HEADS[name](8))
    ours = attack_on(head, criterion, on_gpu=False)
    foreign = attack_on(lambda features: head(features), criterion, on_gpu=False)
    assert (way(ours), way(foreign)) == ("closed_form_gradient", "autograd_gradient")
    start, norms, targets, alpha = problem()
    attacked, labels = ours(start, norms, targets, alpha, 10)
    expected, expected_labels = foreign(start, norms, targets, alpha, 10)
    torch.testing.assert_close(attacked, expected, rtol=0, atol=1e-12)
    assert torch.equal(labels, expected_labels)
    assert (attacked - start * norms).abs().max() > 0.05
    assert (labels == targets).sum() > (head(start * norms).argmax(dim=1) == targets).sum()


@pytest.mark.parametrize(
    ("head", "criterion"),
    [(Foreign(8), cross_entropy), (CosineHead(8), lambda logits, labels: cross_entropy(logits, labels))],
    ids=["head", "criterion"],
)
def test_an_unknown_part_leaves_it_to_autograd(head, criterion):
    head = grown(head)
    attack = attack_on(head, criterion, on_gpu=False)
    assert way(attack) == "autograd_gradient"
    plain = attack_on(grown(CosineHead(8)), cross_entropy, on_gpu=False)
    start, norms, targets, alpha = problem()
    for ours, theirs in zip(
        attack(start, norms, targets, alpha, 5), plain(start, norms, targets, alpha, 5), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_margin_stands_in_both_gradients():
    head = grown(LocalSimilarityHead(8, num_proxies=3, margin=0.6))
    start, norms, targets, alpha = problem()
    by_autograd = sign_steps(head, autograd_gradient(head, nca_exclusive), start, norms, targets, alpha, 10)
    for ours, theirs in zip(
        attack_on(head, nca_exclusive, on_gpu=False)(start, norms, targets, alpha, 10), by_autograd, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_attack_on_a_linear_head_written_in_numpy():
    head = grown(LinearHead(8, temperature=0.5))
    start, norms, targets, alpha = problem()
    attacked, labels = attack_on(head, cross_entropy, on_gpu=False)(start, norms, targets, alpha, 10)
    weights, biases = head.weights[:, :-1].numpy(), head.weights[:, -1].numpy()
    z, lengths, one_hot = start.numpy(), norms.numpy(), np.eye(7)[targets.numpy()]
    for _ in range(10):
        powers = np.exp(2 * (z * lengths @ weights.T + biases))
        z = z - alpha.numpy() * np.sign((powers / powers.sum(axis=1, keepdims=True) - one_hot) @ weights)
    np.testing.assert_allclose(attacked, z * lengths, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(labels, (z * lengths @ weights.T + biases).argmax(axis=1))


@pytest.mark.parametrize("name", HEADS)
def test_no_steps_leave_the_features_where_they_are(name):
    head = grown(HEADS[name](8))
    start, norms, targets, alpha = problem()
    attacked, labels = attack_on(head, cross_entropy, on_gpu=False)(start, norms, targets, alpha, 0)
    assert torch.equal(attacked, start * norms)
    assert torch.equal(labels, head(start * norms).argmax(dim=1))


@on_gpu
@pytest.mark.parametrize("num_classes", [7, 50, 90])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("make", [CosineHead, LocalSimilarityHead], ids=lambda kind: kind.__name__)
def test_the_kernel_makes_the_same_attack(device, make, criterion, num_classes):
    pytest.importorskip("triton")
    from ccfa.augmentation.attack_kernel import fused_attack

    head = grown(make(64), num_classes).to(device)
    start, norms, targets, alpha = (tensor.to(device) for tensor in problem(64, num_classes, 645))  # no whole tiles
    gradient = closed_form_gradient(head, criterion)
    expected, expected_labels = sign_steps(head, gradient, start, norms, targets, alpha, 10)
    attack = attack_on(head.float(), criterion, on_gpu=True)
    assert attack.func is fused_attack
    attacked, labels = attack(start.float(), norms.float(), targets, alpha.float(), 10)
    # A sign is a matter of rounding where the gradient is almost 0; a wrong gradient would change most of them.
    assert ((attacked - expected).abs() > 1e-4).double().mean() < 0.005
    assert (labels == expected_labels).double().mean() > 0.99


@on_gpu
def test_what_the_kernel_does_not_know_is_attacked_without_it(device):
    pytest.importorskip("triton")
    for head, criterion in (
        (LinearHead(64), cross_entropy),
        (CosineHead(48), cross_entropy),
        (LocalSimilarityHead(64, margin=0.6), nca),
    ):
        assert way(attack_on(grown(head).to(device), criterion, on_gpu=True)) == "closed_form_gradient"
    assert way(attack_on(grown(Foreign(64)).to(device), cross_entropy, on_gpu=True)) == "autograd_gradient"


@on_gpu
@pytest.mark.parametrize("num_places", [3, 10])
@pytest.mark.parametrize("num_old", [50, 90, 950])
def test_the_kernel_s_assignment_is_as_good_and_as_balanced(device, num_old, num_places):
    pytest.importorskip("triton")
    from ccfa.augmentation.balanced_kernel import fused_solve

    num_rows = 128
    scores = 3 * torch.randn(num_rows, num_old, generator=torch.Generator().manual_seed(0))
    confidences, classes = scores.to(device).softmax(dim=1).topk(num_places)
    share = torch.tensor(num_rows / num_old, device=device)

    def objective(assigned):
        sums = torch.zeros(num_old, device=device).index_add(0, classes.flatten(), assigned.flatten())
        return float((confidences * assigned).sum() - (sums - share).abs().sum()) / num_rows

    plain = solve(confidences, classes, num_old, share)
    fused = fused_solve(confidences, classes, num_old, share, ITERATIONS, RESTART, PRICE_WEIGHT)
    assert objective(fused) == pytest.approx(objective(plain), abs=1e-3)
    assert objective(assign(confidences, classes, num_old, share)) == pytest.approx(objective(plain), abs=1e-3)
    torch.testing.assert_close(fused.sum(dim=1), torch.ones(num_rows, device=device), rtol=0, atol=1e-4)
    assert fused.min() >= 0
