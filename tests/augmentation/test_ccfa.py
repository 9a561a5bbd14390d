"""CCFA against algorithm 1 written out row by row in NumPy, and the pure function for other loops."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import reference
from ccfa.augmentation.ccfa import CCFA, cross_class_features
from ccfa.augmentation.samples import Samples, classification_loss
from ccfa.augmentation.targets import TARGETS, random_class, target_rule
from ccfa.errors import UsageError
from ccfa.losses import cross_entropy, nca
from ccfa.models.heads import CosineHead, Head, LinearHead, LocalSimilarityHead
from toys import seeded

DIM, NUM_OLD, NUM_NEW = 16, 6, 3


def pair_of_heads(head: Head) -> tuple[Head, Head]:
    """A current head over old and new classes, and the previous one it moved away from."""
    old_head = head.double()
    old_head.grow(NUM_OLD, seeded(0))
    old_head.scale.data.fill_(4.0)
    head = copy.deepcopy(old_head)
    head.new.data.add_(head.initial(NUM_OLD, seeded(1)))
    head.grow(NUM_NEW, seeded(2))
    head.scale.data.fill_(2.5)
    return head, old_head


def local_similarity():
    heads = pair_of_heads(LocalSimilarityHead(DIM, num_proxies=3))
    in_numpy = [reference.LocalSimilarityHead(h.weights.detach().numpy(), h.scale.item()) for h in heads]
    return (*heads, nca), *in_numpy, reference.nca_gradient


def cosine():
    heads = pair_of_heads(CosineHead(DIM))
    in_numpy = [reference.CosineHead(h.weights.detach().numpy(), h.scale.item()) for h in heads]
    return (*heads, cross_entropy), *in_numpy, reference.cross_entropy_gradient


CASES = [
    pytest.param(local_similarity, id="local similarity, nca"),
    pytest.param(cosine, id="cosine, cross-entropy"),
]


def augment(features, labels, parts, seed: int = 0, **options):
    head, old_head, criterion = parts
    generator, num_old = seeded(seed), old_head.num_classes
    return cross_class_features(features, labels, head, old_head, criterion, num_old, generator=generator, **options)


def random_batch(num_rows: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.random.default_rng(3).standard_normal((num_rows, DIM))
    labels = np.arange(num_rows) % (NUM_OLD + NUM_NEW)
    return torch.nn.functional.normalize(torch.tensor(rows)), torch.tensor(labels)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step_size", [(0.013, 0.013), None], ids=["fixed", "drawn"])
def test_attack_as_the_reference(case, step_size):
    parts, numpy_head, numpy_old_head, logit_gradient = case()
    features, labels = random_batch()
    options = {"seed": 7, "count": 2, "step_size": step_size}
    # A single sign step moves every coordinate by alpha, and so shows what was drawn.
    moved = (augment(features, labels, parts, steps=1, **options)[0] - features.repeat(2, 1)).abs()
    alphas = moved.mean(dim=1)
    torch.testing.assert_close(moved, alphas[:, None].expand_as(moved))
    if step_size:
        torch.testing.assert_close(alphas, torch.full_like(alphas, 0.013))
    augmented, pseudo_labels, weights = augment(features, labels, parts, **options)
    assert augmented.shape == (20, DIM)
    assert (weights == 1).all()
    for place, alpha in enumerate(alphas.tolist()):
        z, label = features[place % 10].numpy(), labels[place % 10].item()
        target = reference.target_class(z, label, numpy_head, NUM_OLD)
        expected, pseudo_label = reference.attack(z, target, numpy_old_head, logit_gradient, 10, alpha)
        np.testing.assert_allclose(augmented[place].numpy(), expected, atol=1e-11)
        assert pseudo_labels[place].item() == pseudo_label


def test_step_sizes_are_uniform_and_independent():
    parts, *_ = cosine()
    features, labels = random_batch(400)
    augmented, *_ = augment(features, labels, parts, seed=8, steps=1)
    alphas = (augmented - features.repeat(5, 1)).abs().mean(dim=1).numpy()
    low, high = 2 / 255 * 64 / DIM, 5 / 255 * 64 / DIM
    assert low <= alphas.min() < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < alphas.max() <= high
    assert alphas.mean() == pytest.approx((low + high) / 2, rel=0.02)
    assert alphas.var() == pytest.approx((high - low) ** 2 / 12, rel=0.1)
    assert len(np.unique(alphas)) == 2000


def test_step_size_follows_the_dimension():
    assert CCFA().step_size_for(64) == (2 / 255, 5 / 255)
    assert CCFA().step_size_for(512) == (2 / 2040, 5 / 2040)
    assert CCFA(step_size=(0.1, 0.2)).step_size_for(512) == (0.1, 0.2)


def test_target_rules_as_numpy():
    logits, labels = np.random.default_rng(5).standard_normal((20, 5)), np.arange(20) % 5
    chosen = {
        name: rule(torch.tensor(logits), torch.tensor(labels)[:, None], 3, 40, seeded(0))
        for name, rule in TARGETS.items()
    }
    for row, label in enumerate(labels):
        others = [old for old in range(3) if old != label]
        expected = {
            "most-confident": {max(others, key=lambda old: logits[row, old])},
            "least-confident": {min(others, key=lambda old: logits[row, old])},
            "random": set(others),
        }
        for name, classes in expected.items():
            assert set(chosen[name].classes[:, row].tolist()) == classes
            assert chosen[name].valid[:, row].all()
    own = chosen["own-label"]
    assert torch.equal(own.valid, torch.tensor(labels < 3).expand(40, -1))
    assert torch.equal(own.classes[own.valid], torch.tensor(labels).expand(40, -1)[own.valid])


def test_longer_features_are_attacked_at_unit_length():
    parts, *_ = local_similarity()
    features, labels = random_batch()
    lengths = torch.linspace(0.2, 9.0, 10, dtype=torch.float64)[:, None]
    unit, scaled = (augment(rows, labels, parts, count=1) for rows in (features, features * lengths))
    torch.testing.assert_close(scaled[0], unit[0] * lengths)
    assert torch.equal(scaled[1], unit[1])


def test_a_linear_head_sees_the_features_at_their_own_length():
    head, old_head = pair_of_heads(LinearHead(DIM, bias=False))
    features, labels = random_batch()
    features = 5.0 * features
    augmented, *_ = augment(features, labels, (head, old_head, cross_entropy), count=1, steps=1, step_size=(0.01, 0.01))
    weights = old_head.weights.detach().numpy()
    for z, label, moved in zip(features.numpy(), labels.tolist(), augmented.numpy(), strict=True):
        scores = 2.5 * head.weights.detach().numpy()[:NUM_OLD] @ z
        target = max((c for c in range(NUM_OLD) if c != label), key=lambda c: scores[c])
        gradient = reference.cross_entropy_gradient(4.0 * weights @ z, target) @ weights
        np.testing.assert_allclose(moved, z - 5.0 * 0.01 * np.sign(gradient), atol=1e-12)


def test_features_stop_at_their_targets_on_request():
    head, old_head = pair_of_heads(LinearHead(DIM, bias=False))
    features, labels = random_batch()
    parts = head, old_head, cross_entropy
    whole, *_ = augment(features, labels, parts, count=1, steps=10, step_size=(0.05, 0.05))
    stopped, pseudo, _ = augment(
        features, labels, parts, count=1, steps=10, step_size=(0.05, 0.05), stop_at_target=True
    )
    paths = [augment(features, labels, parts, count=1, steps=n, step_size=(0.05, 0.05))[:2] for n in range(11)]
    targets = target_rule("most-confident")(head(features), labels[:, None], NUM_OLD, 1, seeded(0)).classes[0]
    for row in range(len(features)):
        steps = next((n for n, (_, found) in enumerate(paths) if found[row] == targets[row]), 10)
        torch.testing.assert_close(stopped[row], paths[steps][0][row])
    assert (stopped != whole).any()
    assert (pseudo == targets).sum() >= (paths[10][1] == targets).sum()


def test_no_copies_and_no_previous_head_change_nothing():
    parts, *_ = cosine()
    samples = Samples.of(*random_batch())
    assert CCFA(count=0)(samples, *parts, seeded(0)) is samples
    assert CCFA()(samples, parts[0], None, parts[2], seeded(0)) is samples
    augmented, pseudo_labels, _ = augment(samples.features, samples.labels[:, 0], parts, count=0)
    assert augmented.shape == (0, DIM)
    assert pseudo_labels.shape == (0,)


def test_real_samples_come_first():
    parts, *_ = local_similarity()
    samples = Samples.of(*random_batch())
    result = CCFA()(samples, *parts, seeded(5))
    features, labels, weights = augment(samples.features, samples.labels[:, 0], parts, seed=5)
    assert torch.equal(result.features, torch.cat([samples.features, features]))
    assert torch.equal(result.labels[:, 0], torch.cat([samples.labels[:, 0], labels]))
    assert torch.equal(result.weights[:, 0], torch.cat([samples.weights[:, 0], weights]))


@pytest.mark.parametrize(("weight", "backbone_weight"), [(1.0, None), (1.0, 1.0), (0.2, None), (0.2, 0.5)])
def test_backbone_and_head_get_their_shares_of_the_loss(weight, backbone_weight):
    (head, old_head, criterion), *_ = local_similarity()
    samples = Samples.of(*random_batch())
    samples.features.requires_grad_()
    options = CCFA(count=2, weight=weight, backbone_weight=backbone_weight)
    loss = classification_loss(options(samples, head, old_head, criterion, seeded(5)), head, criterion)
    features_gradient, *head_gradients = torch.autograd.grad(loss, [samples.features, head.old, head.new])

    def mean_gradients(rows, labels):
        mean = criterion(head(rows), labels).mean()
        return torch.autograd.grad(mean, [rows, head.old, head.new])

    moved, labels, _ = augment(samples.features, samples.labels[:, 0], (head, old_head, criterion), seed=5, count=2)
    real = mean_gradients(samples.features, samples.labels[:, 0])
    augmented = mean_gradients(moved.requires_grad_(), labels)
    share = 1 / (1 + 2 * weight)
    torch.testing.assert_close(features_gradient, (backbone_weight or share) * real[0])
    for found, of_real, of_augmented in zip(head_gradients, real[1:], augmented[1:], strict=True):
        torch.testing.assert_close(found, share * of_real + (1 - share) * of_augmented)


@pytest.mark.parametrize("to_backbone", [False, True])
def test_gradients_reach_the_backbone_on_request(to_backbone):
    parts, *_ = local_similarity()
    features, labels = random_batch()
    features.requires_grad_()
    augmented, *_ = augment(features, labels, parts, count=2, gradient_to_backbone=to_backbone)
    assert augmented.requires_grad == to_backbone
    assert all(parameter.grad is None for parameter in [*parts[0].parameters(), *parts[1].parameters()])
    if to_backbone:
        (gradient,) = torch.autograd.grad(augmented.sum(), features)
        torch.testing.assert_close(gradient, torch.full_like(gradient, 2.0))
        torch.testing.assert_close(augmented.detach(), augment(features, labels, parts, count=2)[0])


def test_noise_has_no_gradient_to_the_backbone():
    with pytest.raises(UsageError, match="start=noise"):
        CCFA(start="noise", gradient_to_backbone=True)


def test_noise_can_be_the_start():
    parts, *_ = cosine()
    features, labels = random_batch(400)
    augmented, *_ = augment(features, labels, parts, count=1, steps=0, start="noise")
    assert augmented.std().item() == pytest.approx(1, rel=0.05)
    assert (augmented * features).sum(dim=1).mean().item() == pytest.approx(0, abs=0.2)


def test_rows_without_a_target_weigh_nothing():
    old_head, head = CosineHead(DIM).double(), CosineHead(DIM).double()
    old_head.grow(1, seeded(0))
    head.grow(3, seeded(1))
    features, _ = random_batch(3)
    features[2] = 0.0
    augmented, pseudo_labels, weights = augment(
        features, torch.tensor([0, 1, 2]), (head, old_head, cross_entropy), count=2
    )
    assert weights.tolist() == [0, 1, 1, 0, 1, 1]
    assert pseudo_labels.tolist() == [0] * 6
    assert torch.isfinite(augmented).all()


@pytest.mark.parametrize("options", [{"count": -1}, {"steps": -1}, {"step_size": (0.2, 0.1)}, {"start": "z"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(UsageError, match="CCFA"):
        CCFA(**options)


def in_a_foreign_loop(num_rows=6, dim=8, head=4, old=2, num_old=2, **options):
    torch.manual_seed(0)
    parts = nn.Linear(dim, head), nn.Linear(dim, old)
    labels = torch.arange(num_rows) % 4
    return cross_class_features(torch.randn(num_rows, dim), labels, *parts, cross_entropy, num_old, **options)


def test_the_default_generator_draws_without_one():
    first, second = in_a_foreign_loop(), in_a_foreign_loop()
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], in_a_foreign_loop(generator=seeded(7))[0])
    assert in_a_foreign_loop(target="balanced-2", start="noise", count=2)[0].shape == (12, 8)


def test_targets_by_name_or_function():
    by_name, by_function = (
        in_a_foreign_loop(target=target, generator=seeded(0)) for target in ("random", random_class)
    )
    assert all(map(torch.equal, by_name, by_function))
    with pytest.raises(UsageError, match="'random'"):
        in_a_foreign_loop(target="randm")


@pytest.mark.parametrize(
    ("sizes", "named"), [({"num_old": 5, "old": 3}, "head"), ({"old": 3}, "old_head"), ({"head": 1}, "head")], ids=str
)
def test_heads_of_other_sizes_are_refused(sizes, named):
    with pytest.raises(UsageError, match=named):
        in_a_foreign_loop(**sizes)


def test_shapes_that_do_not_fit():
    head, old_head = nn.Linear(8, 4), LinearHead(8)
    old_head.grow(2)
    for features, labels in [(torch.randn(3, 8, 1), torch.zeros(3)), (torch.randn(3, 8), torch.zeros(4))]:
        with pytest.raises(UsageError, match="labels"):
            cross_class_features(features, labels.long(), head, old_head, cross_entropy, 2)
    with pytest.raises(UsageError, match="num_old"):
        cross_class_features(torch.randn(3, 8), torch.zeros(3).long(), head, old_head, cross_entropy, 3)
