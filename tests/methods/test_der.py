"""DER: a branch per stage, heads that start anew, the auxiliary loss, and what an attack on the old head changes."""

import numpy as np
import pytest
import torch

import reference
from ccfa.augmentation import CCFA, Samples
from ccfa.data import split
from ccfa.errors import UsageError
from ccfa.learning import step as step_module
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.loop import optimise, set_modes
from ccfa.learning.step import step_losses
from ccfa.losses import cross_entropy
from ccfa.methods.der import WideningHead, der, rising
from ccfa.methods.parts import trainable
from ccfa.models import BACKBONES, Branches
from toys import STAGES, begun, learned, moved_by, seeded, tiny

DIM = 64  # of the small backbone
WARM_UP, MAIN, CLASSIFIER = range(3)


def prepared(stage=STAGES[1], phase=MAIN):
    """A learner at a phase of a stage, and the phase, whose heads are ready."""
    learner = begun(tiny("der", epochs=1), stage)
    chosen = learner.method.phases(stage)[phase]
    chosen.prepare(learner)
    set_modes(learner.network, chosen)
    return learner, chosen


def test_a_new_branch_starts_as_the_last_one():
    learner = begun(tiny("der", epochs=1), STAGES[2])
    first, second, third = learner.network.eval().backbone.branches
    images = learner.method.transforms.test(learner.train.images[:5])
    embeddings = [branch(images).embedding for branch in (first, second, third)]
    assert torch.equal(embeddings[1], embeddings[2])
    assert not torch.equal(embeddings[0], embeddings[1])
    features = learner.network.backbone(images)
    assert torch.equal(features.embedding, torch.cat(embeddings, dim=1))
    assert all(map(torch.equal, features.maps, third(images).maps))
    assert torch.equal(features.embedding[:, : 2 * DIM], learner.previous.backbone(images).embedding)


def test_each_phase_moves_its_own_parts():
    learner, _ = prepared(STAGES[2], WARM_UP)
    frozen = ("backbone.branches.0", "backbone.branches.1")
    expected = {key for key in learner.network.state_dict() if not key.startswith(frozen)} - {"head.auxiliary.old"}
    for phase in (WARM_UP, MAIN):
        assert moved_by(learner, phase) == expected - {"head.scale", "head.auxiliary.scale"}
    assert {key.split(".")[0] for key in moved_by(learner, CLASSIFIER)} == {"head"}


def test_only_the_newest_branch_and_the_heads_train():
    learner, _ = prepared(STAGES[2])
    num_backbone = sum(parameter.numel() for parameter in BACKBONES["small"](3).parameters())
    num_heads = 6 * 3 * DIM + 3 * DIM  # over all branches; two new classes and the old ones over the newest
    assert sum(parameter.numel() for parameter in trainable(learner.network)) == num_backbone + num_heads


def test_losses_are_those_of_numpy():
    learner, main = prepared(STAGES[2])
    rows = learner.training_rows()[::3]
    losses = {name: loss.item() for name, loss in step_losses(learner, rows, main, seeded(0)).read().items()}
    images = learner.method.transforms.train(learner.train.images[rows], seeded(0))
    features = learner.network.backbone(images).embedding.detach().double().numpy()
    head, labels = learner.network.head, learner.train.labels[rows].numpy()
    logits = features @ head.weights.detach().double().numpy().T
    assert losses["classification"] == pytest.approx(reference.cross_entropy(logits, labels).mean(), rel=1e-5)
    weights = head.auxiliary.weights.detach().double().numpy()
    expected = reference.der_auxiliary(features[:, 2 * DIM :], labels, weights, STAGES[2].num_old)
    assert losses["auxiliary"] == pytest.approx(expected, rel=1e-5)
    assert {*losses} == {"classification", "auxiliary", "loss"}


def test_the_previous_network_is_not_run(monkeypatch):
    monkeypatch.setattr(step_module, "frozen_features", None)
    learned(tiny("der", epochs=1), 2)


def test_heads_start_anew_before_each_phase():
    learner, main = prepared()
    head = learner.network.head
    started = head.weights.detach().clone()
    assert started.abs().max() <= 1 / np.sqrt(2 * DIM)
    assert started.std() == pytest.approx(1 / np.sqrt(3 * 2 * DIM), rel=0.1)
    optimise(learner, main, MAIN)
    learner.method.phases(STAGES[1])[CLASSIFIER].prepare(learner)
    assert (head.weights != started).all()
    assert head.weights.abs().max() <= 1 / np.sqrt(2 * DIM)
    features = torch.randn(3, 2 * DIM)
    torch.testing.assert_close(head(features), features @ head.weights.T / 5)  # the temperature
    main.prepare(learner)
    assert head.scale == 1
    assert torch.equal(head.weights, started)  # drawn from the seed alone


def test_the_auxiliary_head_lives_for_a_stage():
    learner = begun(tiny("der", epochs=1), STAGES[0])
    assert not learner.network.head.auxiliary.num_classes
    learner = begun(tiny("der", epochs=1), STAGES[1])
    assert learner.network.head.auxiliary.weights.shape == (1 + 2, DIM)
    learner.optimise()
    assert not learner.network.head.auxiliary.num_classes


def test_an_attack_leaves_the_newest_branch_alone():
    old, now = WideningHead(DIM), WideningHead(DIM)
    old.grow(3, seeded(1))
    now.grow(3, seeded(1))
    now.grow(2, seeded(2))
    now.widen(2 * DIM)
    now.restart(1.0, seeded(3))
    samples = Samples.of(torch.randn(4, 2 * DIM, generator=seeded(4)), torch.tensor([0, 2, 3, 4]))
    augmented = CCFA(count=2, gradient_to_backbone=True)(samples, now, old, cross_entropy, seeded(5))
    made, sources = augmented.features[4:], samples.features.repeat(2, 1)
    torch.testing.assert_close(made[:, DIM:], sources[:, DIM:])
    assert torch.equal(augmented.labels[4:, 0], (made[:, :DIM] @ old.weights.T).argmax(dim=1))
    assert augmented.weights[:, 0].tolist() == [1, 1, 1, 1, *[1, 1, 0, 0] * 2]  # columns of new classes contradict
    lengths = sources[:, :DIM].norm(dim=1, keepdim=True)
    moves = (made[:, :DIM] - sources[:, :DIM]) / lengths
    low, high = CCFA().step_size_for(DIM)  # of the columns that move
    assert moves.abs().max() <= 10 * high + 1e-6
    one = CCFA(count=2, steps=1)(samples, now, old, cross_entropy, seeded(5)).features[4:]
    steps = ((one - sources)[:, :DIM] / lengths).abs()
    assert ((steps > low - 1e-6) & (steps < high + 1e-6)).all()


def test_augmentations_leave_the_classifier_phase_alone():
    later = split(100, 50, 10)[1]
    assert der().phases(later)[CLASSIFIER].name not in CCFA().phases


def test_the_classifier_learns_from_balanced_exemplars():
    classifier = der().phases(split(100, 50, 10)[1])[CLASSIFIER]
    assert classifier.lr == 0.05
    learner = begun(tiny("der", epochs=1), STAGES[2])
    rows = learner.method.phases(STAGES[2])[CLASSIFIER].rows(learner)
    counts = learner.train.labels[rows].bincount()
    assert len(counts) == 6
    assert len(set(counts.tolist())) == 1


def test_branches_run_one_by_one_as_together():
    """Each branch is compiled by itself, so that a stage more is not another compilation."""
    torch.manual_seed(0)
    backbone = Branches([BACKBONES["small"](3) for _ in range(3)]).eval()
    images = torch.randn(2, 3, 8, 8)
    for one, other in zip(Acceleration().features(backbone, images), backbone(images), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_schedules_and_phases_left_out():
    assert [rising(epoch, 10) for epoch in (0, 4, 9)] == [0.1, 0.5, 1.0]
    first, later = split(100, 50, 10)[:2]
    names = [[phase.name for phase in der().phases(stage)] for stage in (first, later)]
    assert names == [["main"], ["warm-up", "main", "classifier"]]
    phases = der().phases(first)[0], der().phases(later)[CLASSIFIER]
    assert [phase.epochs for phase in phases] == [200, 50]
    assert der().phases(later)[MAIN].epochs == 160
    for phase, epochs in zip(phases, [(59, 60, 119, 120, 160), (14, 15, 29, 30, 49)], strict=True):
        rates = [phase.schedule(epoch, phase.epochs) for epoch in epochs]
        assert rates == pytest.approx([1, 0.1, 0.1, 0.01, 0.001 if phase.epochs == 200 else 0.01])
    short = der(warmup_epochs=0, balanced_epochs=0, memory=0)
    assert [phase.name for phase in short.phases(later)] == ["main"]
    with pytest.raises(UsageError, match="exemplars"):
        der(memory=0)


def test_the_first_stage_may_have_a_warm_up():
    """As published for a start from 0 classes."""
    (plain,), (warmup, main) = (der(warmup_first=first).phases(STAGES[0]) for first in (False, True))
    assert [(one.name, one.epochs) for one in (plain, warmup, main)] == [("main", 200), ("warm-up", 10), ("main", 200)]
    assert main.schedule == plain.schedule
    learner = learned(tiny("der", epochs=1, warmup_epochs=1, warmup_first=True), 1)
    assert torch.isfinite(learner.network.head.weights).all()
