"""FOSTER: three branches during a stage and one after it, its losses, and what each phase moves."""

import numpy as np
import pytest
import torch

import reference
from ccfa.augmentation import CCFA, Samples
from ccfa.errors import UsageError
from ccfa.learning import step as step_module
from ccfa.learning.loop import set_modes
from ccfa.learning.step import step_losses
from ccfa.losses import balanced_distillation, cross_entropy, effective_number_weights, softened_cross_entropy
from ccfa.methods.foster import BOOSTING, STUDENT, BoostedHead, annealed, foster
from ccfa.models import Branches
from toys import STAGES, begun, learned, moved_by, seeded, tiny

DIM = 64  # of the small backbone
MAIN, COMPRESSION = range(2)


def prepared(phase):
    """A learner at a phase of stage 1, and the phase."""
    learner = begun(tiny("foster", epochs=1), STAGES[1])
    chosen = learner.method.phases(STAGES[1])[phase]
    set_modes(learner.network, chosen)
    return learner, chosen


def losses_and_features(learner, phase):
    """The losses of a step, the features it has seen, as NumPy has them, and the labels."""
    rows = learner.training_rows()[::3]
    losses = {name: loss.item() for name, loss in step_losses(learner, rows, phase, seeded(0)).read().items()}
    images = learner.method.transforms.train(learner.train.images[rows], seeded(0))
    features = learner.network.backbone(images).embedding.detach()
    return losses, features, learner.train.labels[rows].numpy()


def numbers(tensor):
    return tensor.detach().double().numpy()


def test_weights_and_distillation_are_those_of_numpy():
    counts = [3, 3, 12]
    weights = effective_number_weights(torch.tensor(counts).double(), 0.9)
    np.testing.assert_allclose(weights, reference.effective_number_weights(counts, 0.9), rtol=1e-12)
    assert weights.mean() == pytest.approx(1)
    assert weights[0] > weights[2]
    teacher, student = torch.randn(2, 4, 3, generator=seeded(0), dtype=torch.float64)
    found = balanced_distillation(teacher, student, weights, 2.0)
    assert float(found) == pytest.approx(
        reference.balanced_distillation(teacher.numpy(), student.numpy(), weights.numpy(), 2.0)
    )
    even = balanced_distillation(teacher, student, torch.ones(3), 2.0)
    torch.testing.assert_close(even, softened_cross_entropy(teacher, student, 2.0))


def test_classes_count_with_all_rows_that_are_learned_from():
    learner = learned(tiny("foster", epochs=1), 1)
    learner.additional = learner.train.rows(0, 1)[:5]
    learner.begin(STAGES[1])
    assert learner.network.head.counts.tolist() == [3 + 5, 3, 12, 12]


def test_a_stage_begins_with_what_the_last_one_knew():
    learner = begun(tiny("foster", epochs=1), STAGES[1])
    network, previous = learner.network.eval(), learner.previous
    assert isinstance(network.backbone, Branches)
    images = learner.method.transforms.test(learner.train.images[:5])
    embedding = previous.backbone(images).embedding
    assert torch.equal(network.backbone(images).embedding, embedding.repeat(1, 3))
    head = network.head
    torch.testing.assert_close(head(embedding.repeat(1, 3))[:, :2], previous(images))
    old_alone = torch.cat([embedding, torch.zeros_like(embedding)], dim=1)
    torch.testing.assert_close(head(old_alone)[:, :2], previous(images))  # the head over two branches
    torch.testing.assert_close(previous.head(old_alone), previous(images))
    assert head.counts.tolist() == [3, 3, 12, 12]


def test_boosting_losses_are_those_of_numpy():
    learner, main = prepared(MAIN)
    losses, features, labels = losses_and_features(learner, main)
    head, previous = learner.network.head, learner.previous.head
    logits = numbers(head.boosted(features))
    weights = reference.effective_number_weights([3, 3, 12, 12], 0.94)
    assert losses["classification"] == pytest.approx(reference.cross_entropy(logits / weights, labels).mean(), rel=1e-5)
    newest = numbers(head.auxiliary(features[:, DIM:]))
    assert losses["auxiliary"] == pytest.approx(reference.cross_entropy(newest, labels).mean(), rel=1e-5)
    old = numbers(previous(features[:, :DIM]))
    expected = reference.softened_cross_entropy(old, logits[:, :2], 2.0)
    assert losses["distillation"] == pytest.approx(expected, rel=1e-5)


def test_compression_is_distillation_alone():
    learner, compression = prepared(COMPRESSION)
    losses, features, _ = losses_and_features(learner, compression)
    head = learner.network.head
    teacher, student = numbers(head.boosted(features[:, : 2 * DIM])), numbers(head(features))
    weights = reference.effective_number_weights([3, 3, 12, 12], 0.97)
    assert losses["loss"] == pytest.approx(reference.balanced_distillation(teacher, student, weights, 2.0), rel=1e-5)


def test_each_phase_moves_its_own_parts():
    learner, _ = prepared(MAIN)
    parts = [(f"backbone.branches.{BOOSTING}", "head.boosted.new", "head.auxiliary.new")]
    parts += [(f"backbone.branches.{STUDENT}", "head.old", "head.new")]
    for phase, own in zip((MAIN, COMPRESSION), parts, strict=True):
        assert moved_by(learner, phase) == {key for key in learner.network.state_dict() if key.startswith(own)}


def test_one_backbone_is_left_after_a_stage():
    learner = learned(tiny("foster", epochs=1), 3)
    sizes = [sum(p.numel() for p in network.backbone.parameters()) for network in (learner.network, learner.initial)]
    assert sizes[0] == sizes[1]
    head = learner.network.head
    assert not head.boosted.num_classes + head.auxiliary.num_classes + len(head.counts)


def test_the_previous_network_is_not_run(monkeypatch):
    monkeypatch.setattr(step_module, "frozen_features", None)
    learned(tiny("foster", epochs=1), 2)


def test_an_attack_moves_rows_of_old_classes_in_the_old_branch():
    old, now = BoostedHead(DIM, beta=0.94), BoostedHead(DIM, beta=0.94)
    old.grow(2, seeded(0))
    now.grow(2, seeded(0))
    now.grow(2, seeded(1))
    samples = Samples.of(torch.randn(4, 2 * DIM, generator=seeded(4)), torch.tensor([0, 1, 2, 3]))
    augmented = CCFA(count=1)(samples, now, old.eval(), cross_entropy, seeded(5))
    torch.testing.assert_close(augmented.features[4:, DIM:], samples.features[:, DIM:])
    assert (augmented.features[4:, :DIM] != samples.features[:, :DIM]).any(dim=1).all()
    assert augmented.weights[4:, 0].tolist() == [1, 1, 0, 0]


def test_weights_act_in_the_classification_loss_alone():
    head = BoostedHead(DIM, beta=0.94)
    head.grow(2, seeded(0))
    head.grow(2, seeded(1))
    head.counts = torch.tensor([3.0, 3.0, 12.0, 12.0])
    features, labels = torch.randn(3, 2 * DIM), torch.tensor([0, 2, 3])
    torch.testing.assert_close(head(features, labels) * effective_number_weights(head.counts, 0.94), head(features))
    assert cross_entropy(head(features, labels), labels).isfinite().all()


def test_schedule_and_options():
    assert [annealed(epoch, 10) for epoch in (0, 5)] == pytest.approx([1, 0.5])
    boosting, compression = foster().phases(STAGES[1])
    assert (boosting.epochs, boosting.weight_decay, compression.epochs, compression.weight_decay) == (170, 5e-4, 130, 0)
    with pytest.raises(UsageError, match="beta"):
        foster(beta_boosting=1.0)
