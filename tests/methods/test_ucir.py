import math

import numpy as np
import pytest
import torch

import reference
from ccfa.data import Stage
from ccfa.learning.step import step_losses
from ccfa.methods.ucir import ucir
from toys import STAGES, begun, moved_by, tiny


@pytest.mark.parametrize("num_new", [1, 2])
def test_losses_are_sums_of_batch_means(num_new, monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    stage = Stage(1, 2, 2 + num_new)
    learner = begun(tiny("ucir", epochs=1), stage)
    learner.network.eval()
    rows, head = learner.training_rows(), learner.network.head
    images, labels = learner.method.transforms.test(learner.train.images[rows]), learner.train.labels[rows].numpy()
    with torch.no_grad():
        embedding = learner.network.backbone(images).embedding.double().numpy()
        previous = learner.previous.backbone(images).embedding.double().numpy()
    losses = step_losses(learner, rows, learner.method.phases(stage)[0], learner.generator("step")).read()
    weights = head.weights.detach().double().numpy()
    cosines = np.array([[reference.cosine(row, weight) for weight in weights] for row in embedding])
    expected = reference.cross_entropy(head.scale.item() * cosines, labels).mean()
    assert losses["classification"].item() == pytest.approx(expected, rel=1e-4)
    expected = 5 * math.sqrt(2 / num_new) * reference.cosine_distance(previous, embedding)
    assert losses["less-forget"].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    expected = reference.margin_ranking(cosines, labels, 2, 0.5, 2)
    assert expected > 0
    assert losses["margin-ranking"].item() == pytest.approx(expected, rel=1e-4)


def test_balanced_phase_of_imagenet1000():
    method = ucir(balanced_epochs=20, epochs=90, milestones=(1 / 3, 2 / 3))
    assert len(method.phases(Stage(0, 0, 500))) == 1
    main, balanced = method.phases(Stage(1, 500, 600))
    assert [main.schedule(epoch, 90) for epoch in (29, 30, 59, 60)] == pytest.approx([1, 0.1, 0.1, 0.01])
    assert [balanced.schedule(epoch, 20) for epoch in (9, 10)] == pytest.approx([1, 0.1])
    assert method.needs_memory
    assert not ucir().needs_memory


def test_each_phase_trains_its_parameters():
    learner = begun(tiny("ucir", epochs=1, balanced_epochs=2), STAGES[1])
    assert moved_by(learner, 0) == set(learner.network.state_dict()) - {"head.old"}
    assert moved_by(learner, 1) == {"head.old", "head.new"}  # neither the scale nor the batch norms' statistics
