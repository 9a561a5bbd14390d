import math

import numpy as np
import pytest
import torch

import reference
from ccfa.data import Stage
from ccfa.learning.loop import optimise
from ccfa.learning.step import step_losses
from ccfa.methods.ucir import ucir
from toys import STAGES, Recorder, begun, tiny


def step_of(stage: Stage):
    """The terms' losses of one batch, and what they were computed from."""
    learner = begun(tiny("ucir"), stage)
    learner.network.eval()
    rows = learner.training_rows()
    method = learner.method
    images, labels = method.transforms.test(learner.train.images[rows]), learner.train.labels[rows]
    with torch.no_grad():
        embedding = learner.network.backbone(images).embedding.double().numpy()
        previous = learner.previous.backbone(images).embedding.double().numpy()
    losses = step_losses(learner, rows, method.phases(stage)[0], learner.generator("step"))
    return learner, labels.numpy(), embedding, previous, losses


def test_losses_are_sums_of_batch_means(monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    learner, labels, embedding, previous, losses = step_of(STAGES[1])
    weights = learner.network.head.weights.detach().double().numpy()
    cosines = np.array([[reference.cosine(row, weight) for weight in weights] for row in embedding])
    scale = learner.network.head.scale.item()
    expected = reference.cross_entropy(scale * cosines, labels).mean()
    assert losses["classification"].item() == pytest.approx(expected, rel=1e-4)
    expected = 5 * math.sqrt(2 / 2) * reference.cosine_distance(previous, embedding)
    assert losses["less-forget"].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    pairs = [
        max(0, 0.5 - cosines[row, label] + negative)
        for row, label in enumerate(labels)
        if label < 2
        for negative in sorted(cosines[row, 2:])[-2:]
    ]
    assert len(pairs) == 2 * 6
    assert losses["margin-ranking"].item() == pytest.approx(np.mean(pairs), rel=1e-4)


def test_single_new_class_has_a_negative(monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    _, _, _, _, losses = step_of(Stage(1, 2, 3))
    assert losses["margin-ranking"].isfinite()
    assert losses["margin-ranking"] > 0


def test_old_classes_stay_and_all_else_moves():
    learner = begun(tiny("ucir"), STAGES[1])
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    (main,) = learner.method.phases(STAGES[1])
    optimise(learner, main, 0)
    after = learner.network.state_dict()
    assert torch.equal(after["head.old"], before["head.old"])
    still = [key for key in after if torch.equal(after[key], before[key])]
    assert still == ["head.old"]


def test_balanced_phase_of_imagenet1000():
    method = ucir(balanced_epochs=20, epochs=90, milestones=(1 / 3, 2 / 3))
    assert len(method.phases(Stage(0, 0, 500))) == 1
    main, balanced = method.phases(Stage(1, 500, 600))
    assert [main.schedule(epoch, 90) for epoch in (29, 30, 59, 60)] == pytest.approx([1, 0.1, 0.1, 0.01])
    assert (balanced.epochs, balanced.lr) == (20, 0.01)
    assert [balanced.schedule(epoch, 20) for epoch in (9, 10)] == pytest.approx([1, 0.1])
    assert method.needs_memory
    assert not ucir().needs_memory


def test_balanced_phase_trains_the_classes_alone():
    recorder = Recorder()
    learner = begun(tiny("ucir", balanced_epochs=2), STAGES[1], observer=recorder)
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    optimise(learner, learner.method.phases(STAGES[1])[1], 1)
    moved = {key for key, value in learner.network.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"head.old", "head.new"}  # neither the scale nor the batch norms' statistics
    assert set(recorder.batches[-1][1]) == {"classification", "less-forget", "margin-ranking", "loss"}
