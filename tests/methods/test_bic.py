import numpy as np
import pytest
import torch

import reference
import reference_rivals as rivals
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Learner
from ccfa.learning.loop import optimise
from ccfa.learning.step import step_losses
from ccfa.losses.distillation import softened_cross_entropy, softened_sigmoids
from ccfa.methods import Budget, with_memory
from ccfa.methods.bic import (
    CorrectedLinearHead,
    bic,
    correction_alone,
    held_out,
    herd_apart,
    herd_beside_held_out,
    num_held_out,
    parted,
    sgd_decaying_the_last,
)
from toys import STAGES, Recorder, begun, learned, rows_of, tiny, toy_images


def test_softened_cross_entropy_as_the_reference():
    previous, current = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    expected = rivals.softened_cross_entropy(previous.numpy(), current.numpy(), 2.0)
    assert softened_cross_entropy(previous, current, 2.0).item() == pytest.approx(expected, rel=1e-12)
    shifted = softened_cross_entropy(previous + 5, current - 3, 2.0)
    assert shifted.item() == pytest.approx(expected, rel=1e-12)


def test_softened_sigmoids_as_the_reference():
    previous, current = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    expected = rivals.softened_sigmoids(previous.numpy(), current.numpy(), 2.0)
    assert softened_sigmoids(previous, current, 2.0).item() == pytest.approx(expected, rel=1e-12)
    previous.requires_grad_()
    (gradient,) = torch.autograd.grad(softened_sigmoids(previous.detach(), previous, 2.0), previous)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_correction_acts_on_newest_classes():
    head = CorrectedLinearHead(4, bias=False)
    head.grow(2)
    head.grow(3)
    features = torch.randn(5, 4)
    plain = head(features)
    with torch.no_grad():
        head.beta.fill_(0.5)
        head.gamma.fill_(-1)
    corrected = head(features)
    assert torch.equal(corrected[:, :2], plain[:, :2])
    assert torch.allclose(corrected[:, 2:], 0.5 * plain[:, 2:] - 1)
    head.grow(1)
    assert torch.allclose(head(features)[:, :5], plain)
    assert (head.beta.item(), head.gamma.item()) == (1, 0)


@pytest.mark.parametrize("loss", ["authors", "inclearn"])
def test_loss_uses_the_corrected_teacher(loss, monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    stage = STAGES[2]  # the previous head has old classes, new classes and a correction
    learner = begun(tiny("bic", loss=loss), stage)
    learner.network.eval()
    with torch.no_grad():
        learner.previous.head.beta.fill_(0.5)
        learner.previous.head.gamma.fill_(-0.25)
    rows = learner.method.phases(stage)[0].rows(learner)
    images, labels = learner.method.transforms.test(learner.train.images[rows]), learner.train.labels[rows]

    def scores(network):
        embedding = network.backbone(images).embedding.clamp(min=0)
        return (embedding @ network.head.weights.T).detach().double().numpy()

    teacher, logits = scores(learner.previous), scores(learner.network)
    teacher[:, 2:] = 0.5 * teacher[:, 2:] - 0.25
    losses = step_losses(learner, rows, learner.method.phases(stage)[0], learner.generator("step"))
    reference_loss = {"authors": rivals.softened_cross_entropy, "inclearn": rivals.softened_sigmoids}[loss]
    weight, rest = {"authors": (4 / 6, 2 / 6), "inclearn": (1, 1)}[loss]
    expected = weight * reference_loss(teacher, logits[:, :4], 2.0)
    assert losses["distillation"].item() == pytest.approx(expected, rel=1e-4)
    expected = rest * reference.cross_entropy(logits, labels.numpy()).mean()
    assert losses["classification"].item() == pytest.approx(expected, rel=1e-4)


def test_correction_phase_trains_two_numbers(monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    recorder = Recorder()
    learner = begun(tiny("bic"), STAGES[1], observer=recorder)
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    main, correction = learner.method.phases(STAGES[1])
    optimise(learner, correction, 1)
    after = learner.network.state_dict()
    assert {key for key in after if not torch.equal(after[key], before[key])} == {"head.beta", "head.gamma"}
    assert all(set(losses) == {"classification", "loss"} for _, losses in recorder.batches)
    rows = held_out(learner)
    with torch.no_grad():
        logits = learner.network.eval()(learner.method.transforms.test(learner.train.images[rows]))
    loss = step_losses(learner, rows, correction, learner.generator("step"))["loss"].item()
    expected = reference.cross_entropy(logits.double().numpy(), learner.train.labels[rows].numpy()).mean()
    assert loss == pytest.approx(expected, rel=1e-5)  # not weighted by 1 - lambda
    optimise(learner, main, 0)
    assert learner.network.head.beta.item() == after["head.beta"].item()


def test_only_gamma_decays():
    head = CorrectedLinearHead(4)
    with torch.no_grad():
        head.beta.fill_(3)
        head.gamma.fill_(2)
    optimiser = sgd_decaying_the_last([head.beta, head.gamma], 0.5, 0.1)
    for parameter in (head.beta, head.gamma):
        parameter.grad = torch.zeros(())
    optimiser.step()
    assert head.beta.item() == 3
    assert head.gamma.item() == pytest.approx(2 - 0.5 * 0.1 * 2)  # the gradient of 0.1 * gamma^2 / 2
    network = begun(tiny("bic"), STAGES[0]).network
    assert list(map(id, correction_alone(network))) == [id(network.head.beta), id(network.head.gamma)]


@pytest.mark.parametrize(("memory", "expected"), [(1, 0), (2, 1), (4, 1), (11, 1), (12, 2), (20, 2), (40, 4)])
def test_one_in_ten_is_held_out(memory, expected):
    assert num_held_out(memory) == expected
    kept, held = parted(torch.arange(100), memory)
    assert len(held) == expected
    assert sorted(kept.tolist() + held.tolist()) == list(range(100))
    assert all(row < memory for row in held.tolist())


@pytest.mark.parametrize(("size", "memory"), [(50, 20), (50, 2), (12, 20), (3, 20), (1, 4)])
def test_held_out_exemplars_keep_their_places(size, memory):
    embeddings = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    (order,) = herd_beside_held_out([embeddings], memory, torch.Generator())
    assert len(order) == min(size, memory)
    assert len(set(order.tolist())) == len(order)
    for quota in range(len(order) + 1):  # a memory that shrinks keeps its first rows
        assert set(parted(order[:quota], quota)[1].tolist()) <= set(parted(torch.arange(size), memory)[1].tolist())
    assert torch.equal(parted(order, len(order))[1], parted(torch.arange(size), memory)[1])
    candidates = parted(torch.arange(size), memory)[0]
    picks = reference.herd(embeddings[candidates].double().numpy(), len(order) - len(parted(order, len(order))[1]))
    assert candidates[picks].tolist() == parted(order, len(order))[0].tolist()


@pytest.fixture
def trained(monkeypatch) -> dict[str, set[int]]:
    """The rows that each phase has trained on so far."""
    rows_of_phase: dict[str, set[int]] = {"main": set(), "correction": set()}

    def noted(learner, rows, phase, generator):
        rows_of_phase[phase.name].update(rows.tolist())
        return step_losses(learner, rows, phase, generator)

    monkeypatch.setattr("ccfa.learning.loop.step_losses", noted)
    return rows_of_phase


@pytest.mark.parametrize("budget", [Budget(per_class=3), Budget(per_class=12), Budget(total=24)])
def test_held_out_images_are_never_trained_on(budget, trained):
    method = with_memory(tiny("bic"), budget)
    learner = Learner(method, toy_images())
    for stage in STAGES:
        learner.learn(stage)
        used = held_out(replace_memory(learner, stage))
        counts = np.bincount(learner.train.labels[used].numpy(), minlength=stage.num_seen)
        assert len(set(counts.tolist())) == 1  # as many of every seen class
        assert counts[0] >= 1
    assert trained["correction"]
    assert not trained["main"] & trained["correction"]
    stored = rows_of(learner.memory.classes)
    assert {row for rows in stored for row in rows[1::10]} <= trained["correction"]
    everything = set(range(len(learner.train)))
    assert trained["main"] == everything - set(first_held_out(learner, budget))


def test_inclearn_holds_out_a_tenth(trained):
    learner = Learner(with_memory(tiny("bic", loss="inclearn"), Budget(per_class=12)), toy_images(per_class=30))
    for stage in STAGES:
        learner.learn(stage)
    held = {row for label in range(6) for row in learner.train.rows(label, label + 1)[1::10].tolist()}
    assert len(held) == 18
    assert trained["main"] == set(range(180)) - held
    stored = {row for rows in rows_of(learner.memory.classes) for row in rows[1::10]}
    assert len(stored) == 12  # 2 of 12, herded from 3
    assert trained["correction"] == stored


@pytest.mark.parametrize(("size", "memory"), [(50, 20), (50, 2), (25, 30), (3, 20), (1, 4)])
def test_both_kinds_are_herded_apart(size, memory):
    embeddings = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    (order,) = herd_apart([embeddings], memory, torch.Generator())
    assert len(order) == len(set(order.tolist())) == min(size, memory)
    for kind, candidates in zip(parted(order, len(order)), parted(torch.arange(size), size), strict=True):
        picks = reference.herd(embeddings[candidates].double().numpy(), len(kind)) if len(kind) else []
        assert candidates[picks].tolist() == kind.tolist()


def test_each_loss_has_its_own_decay():
    for options, expected in [({}, 0.1), ({"loss": "inclearn"}, 0.0), ({"correction_decay": 0.3}, 0.3)]:
        assert bic(**options).phases(STAGES[1])[1].weight_decay == expected
    with pytest.raises(UsageError, match="'inclearn'"):
        bic(loss="inclern")


def replace_memory(learner, stage):
    """The learner as it stood before the stage's exemplars were stored."""
    view = Learner(learner.method, toy_images())
    view.stage = stage
    view.memory.classes = learner.memory.classes[: stage.num_old]
    return view


def first_held_out(learner, budget):
    """The rows held out of each class when it was new."""
    for stage in STAGES:
        for label in range(stage.num_old, stage.num_seen):
            rows = learner.train.rows(label, label + 1)
            yield from rows[1 : budget.quota(stage.num_seen) : 10].tolist()


def test_one_exemplar_is_too_few():
    with pytest.raises(UsageError, match="bic"):
        with_memory(bic(), Budget(per_class=1))
    with pytest.raises(UsageError, match="--memory-total 20"):
        resolve(Experiment("bic", memory_total=19))


def test_predictions_use_the_correction():
    learner = learned(tiny("bic"), 2)
    images = toy_images(seed=1).images
    with torch.no_grad():
        learner.network.head.gamma.fill_(1e6)
    assert learner.predict(images).min() >= 2
    with torch.no_grad():
        learner.network.head.gamma.fill_(-1e6)
    assert learner.predict(images).max() < 2
