import numpy as np
import pytest
import torch

import reference
from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.step import step_losses
from ccfa.methods import Budget, with_memory
from ccfa.methods.bic import (
    CorrectedLinearHead,
    bic,
    held_out_exemplars,
    herd_apart,
    herd_beside_held_out,
    num_held_out,
    parted,
    sgd_decaying_the_last,
)
from toys import STAGES, begun, learned, moved_by, rows_of, tiny, toy_images


@pytest.fixture
def untransformed(monkeypatch):
    """Training images are seen as test images."""
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))


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
def test_loss_uses_the_corrected_teacher(loss, untransformed):
    stage = STAGES[2]  # the previous head has old classes, new classes and a correction
    learner = begun(tiny("bic", epochs=1, loss=loss), stage)
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
    losses = step_losses(learner, rows, learner.method.phases(stage)[0], learner.generator("step")).read()
    reference_loss = {"authors": reference.softened_cross_entropy, "inclearn": reference.softened_sigmoids}[loss]
    weight, rest = {"authors": (4 / 6, 2 / 6), "inclearn": (1, 1)}[loss]
    expected = weight * reference_loss(teacher, logits[:, :4], 2.0)
    assert losses["distillation"].item() == pytest.approx(expected, rel=1e-4)
    expected = rest * reference.cross_entropy(logits, labels.numpy()).mean()
    assert losses["classification"].item() == pytest.approx(expected, rel=1e-4)


def test_correction_phase_trains_two_numbers(untransformed):
    learner = begun(tiny("bic", epochs=1), STAGES[1])
    assert moved_by(learner, 1) == {"head.beta", "head.gamma"}
    rows, correction = held_out_exemplars(learner), learner.method.phases(STAGES[1])[1]
    with torch.no_grad():
        logits = learner.network.eval()(learner.method.transforms.test(learner.train.images[rows]))
    losses = step_losses(learner, rows, correction, learner.generator("step")).read()
    expected = reference.cross_entropy(logits.double().numpy(), learner.train.labels[rows].numpy()).mean()
    assert losses["loss"].item() == pytest.approx(expected, rel=1e-5)  # not weighted by 1 - lambda
    assert set(losses) == {"classification", "loss"}
    assert not moved_by(learner, 0) & {"head.beta", "head.gamma"}


def test_only_gamma_decays():
    beta, gamma = (torch.nn.Parameter(torch.tensor(value)) for value in (3.0, 2.0))
    optimiser = sgd_decaying_the_last([beta, gamma], 0.5, 0.1)
    for parameter in (beta, gamma):
        parameter.grad = torch.zeros(())
    optimiser.step()
    assert beta.item() == 3
    assert gamma.item() == pytest.approx(2 - 0.5 * 0.1 * 2)  # the gradient of 0.1 * gamma^2 / 2
    network = begun(tiny("bic"), STAGES[0]).network
    correction = bic().phases(STAGES[1])[1].parameters(network)
    assert list(map(id, correction)) == [id(network.head.beta), id(network.head.gamma)]


def test_each_loss_has_its_own_decay():
    for options, expected in [({}, 0.1), ({"loss": "inclearn"}, 0.0), ({"correction_decay": 0.3}, 0.3)]:
        assert bic(**options).phases(STAGES[1])[1].weight_decay == expected
    with pytest.raises(UsageError, match="authors, inclearn"):
        bic(loss="inclern")


@pytest.mark.parametrize(("memory", "expected"), [(1, 0), (2, 1), (11, 1), (12, 2), (20, 2), (40, 4)])
def test_one_in_ten_is_held_out(memory, expected):
    kept, held = parted(torch.arange(100), memory)
    assert len(held) == num_held_out(memory) == expected
    assert sorted(kept.tolist() + held.tolist()) == list(range(100))
    assert all(row < memory for row in held.tolist())


@pytest.mark.parametrize(("size", "memory"), [(50, 20), (50, 2), (25, 30), (3, 20), (1, 4)])
@pytest.mark.parametrize("select", [herd_beside_held_out, herd_apart])
def test_exemplars_of_both_kinds(select, size, memory):
    embeddings = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    (order,) = select([embeddings], memory, torch.Generator())
    assert len(order) == len(set(order.tolist())) == min(size, memory)
    candidates = parted(torch.arange(size), memory if select is herd_beside_held_out else size)
    for kind, own in zip(parted(order, len(order)), candidates, strict=True):
        picks = reference.herd(embeddings[own].double().numpy(), len(kind)) if len(kind) else []
        if own is candidates[1] and select is herd_beside_held_out:
            picks = range(len(kind))  # held-out rows stay in storage order
        assert own[list(picks)].tolist() == kind.tolist()
    for quota in range(len(order) + 1):  # a memory that shrinks keeps its first rows
        assert set(parted(order[:quota], quota)[1].tolist()) <= set(candidates[1].tolist())


@pytest.mark.parametrize(
    ("loss", "budget", "per_class"),
    [
        ("authors", Budget(per_class=3), 12),
        ("authors", Budget(per_class=12), 12),
        ("authors", Budget(total=24), 12),
        ("inclearn", Budget(per_class=12), 30),
    ],
)
def test_held_out_images_are_never_trained_on(loss, budget, per_class, monkeypatch):
    trained: dict[str, set[int]] = {"main": set(), "correction": set()}
    balance = []

    def noted(learner, rows, phase, generator, images):
        trained[phase.name].update(rows.tolist())
        return step_losses(learner, rows, phase, generator, images)

    monkeypatch.setattr("ccfa.learning.loop.step_losses", noted)
    learner = Learner(with_memory(tiny("bic", epochs=1, loss=loss), budget), toy_images(per_class=per_class))
    held = set()
    for stage in STAGES:
        learner.learn(stage)
        limit = budget.quota(stage.num_seen) if loss == "authors" else per_class
        for label in range(stage.num_old, stage.num_seen):
            held.update(learner.train.rows(label, label + 1)[1:limit:10].tolist())
        counts = np.bincount(learner.train.labels[list(trained["correction"])].numpy(), minlength=stage.num_seen)
        balance.append(len(set(counts[: stage.num_seen].tolist())))
    assert trained["main"] == set(range(6 * per_class)) - held
    assert trained["correction"]
    assert trained["correction"] <= held
    assert {row for rows in rows_of(learner.memory.classes) for row in rows[1::10]} <= trained["correction"]
    if budget.total is None:
        assert balance == [1, 1, 1]  # as many of every seen class


@pytest.mark.parametrize("loss", ["authors", "inclearn"])
@pytest.mark.parametrize("budget", [Budget(per_class=3), Budget(per_class=30), Budget(total=50)], ids=str)
def test_more_images_of_old_classes_are_learned_unless_they_will_be_held_out(loss, budget):
    learner = Learner(tiny("bic", budget, 1, loss=loss), toy_images(per_class=60))
    few = learner.train.rows(0, 1)
    learner.train = learner.train.subset([*few[:15].tolist(), *range(int(few[14]) + 1, len(learner.train))])
    learner.learn(STAGES[0])
    of_class, kept = learner.train.rows(0, 1), learner.memory.classes[0]
    learner.additional = of_class[~torch.isin(of_class, kept)][:30]
    learner.begin(STAGES[1])
    trained = {row for row in learner.method.phases(STAGES[1])[0].rows(learner).tolist() if row in of_class}
    quota = budget.quota(4)
    reordered = torch.cat([kept[:quota], learner.additional])  # as they are when exemplars are chosen of them
    (chosen,) = learner.method.select_exemplars([learner.embeddings(reordered)], quota, torch.Generator())
    held = {*parted(reordered[chosen], quota)[1].tolist(), *parted(kept, len(kept))[1].tolist()}
    assert held
    assert not trained & held
    assert len(trained) >= 0.9 * len({*kept.tolist(), *learner.additional.tolist()}) - 2


def test_one_exemplar_is_too_few():
    with pytest.raises(UsageError, match="bic"):
        with_memory(bic(), Budget(per_class=1))


def test_predictions_use_the_correction():
    learner = learned(tiny("bic", epochs=1), 2)
    images = toy_images(seed=1).images
    with torch.no_grad():
        learner.network.head.gamma.fill_(1e6)
    assert learner.predict(images).min() >= 2
    with torch.no_grad():
        learner.network.head.gamma.fill_(-1e6)
    assert learner.predict(images).max() < 2
