import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from ccfa.data import Stage
from ccfa.learning.step import step_losses
from ccfa.losses import weighted_discrepancy, weighted_discrepancy_paper
from ccfa.methods.afc import afc, divided_by_mean
from ccfa.methods.podnet import podnet
from toys import STAGES, begun, learned, tiny

CHANNELS = [16, 32, 64]  # of the small backbone


def test_podnet_but_for_the_terms():
    method, base = afc(), podnet()
    assert replace(method, name="", terms=(), head=None) == replace(base, name="", terms=(), head=None)
    assert (method.head.func, method.head.keywords) == (base.head.func, base.head.keywords)
    for options, expected in [({}, weighted_discrepancy), ({"discrepancy": "paper"}, weighted_discrepancy_paper)]:
        (term,) = (term() for term in afc(**options).terms)
        assert term.loss is expected


def test_importance_has_mean_one():
    assert divided_by_mean(torch.zeros(3)).tolist() == [1, 1, 1]
    assert divided_by_mean(torch.tensor([1.0, 3.0])).tolist() == [0.5, 1.5]


@pytest.mark.parametrize("name", ["afc", "aanet-afc"])
def test_importance_as_the_reference(name):
    learner = learned(tiny(name, epochs=1), 2)
    (term,) = learner.terms
    start = learner.network.frozen_copy().requires_grad_(True)
    learner.network = start
    before = {key: value.clone() for key, value in start.state_dict().items()}
    earlier = term.importance.clone()
    term.conclude(learner)
    moved = {key for key, value in start.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key, _ in start.named_buffers() if "running" in key or "num_batches" in key}
    assert not torch.equal(term.importance, earlier)
    assert not term.importance.requires_grad
    assert torch.equal(term.state_dict()["importance"], term.importance)

    start.load_state_dict(before)
    gradients = []
    for images, labels in learner.training_batches(16, "discrepancy"):
        features = start.backbone(images)
        logits = start.head(start.head.embed(features.embedding))
        loss = learner.method.criterion(logits, labels).mean()
        gradients.append([gradient.numpy() for gradient in torch.autograd.grad(loss, features.maps)])
    assert len(gradients) > 1
    for value, expected in zip(term.importance.split(CHANNELS), reference.importance(gradients), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)
        assert value.mean().item() == pytest.approx(1, abs=1e-5)


def test_one_class_makes_channels_equal():
    learner = begun(tiny("afc"), Stage(0, 0, 1))
    learner.terms[0].conclude(learner)
    assert learner.terms[0].importance.tolist() == [1.0] * sum(CHANNELS)


@pytest.mark.parametrize("importance", [0.0, 1.0])
def test_the_term_weighs_by_importance(importance):
    learner = begun(tiny("afc", epochs=1), STAGES[1])
    learner.terms[0].importance.fill_(importance)
    learner.network.train()  # batch statistics make the maps differ
    rows, main = learner.training_rows(), learner.method.phases(STAGES[1])[0]
    losses = step_losses(learner, rows, main, learner.generator("step")).read()
    images = learner.method.transforms.train(learner.train.images[rows], learner.generator("step"))
    maps = [
        [level.detach().numpy() for level in network.backbone(images).maps]
        for network in (learner.previous, learner.network)
    ]
    plain = reference.weighted_discrepancy(*maps, [np.ones(channels) for channels in CHANNELS])
    assert plain > 0
    assert losses["discrepancy"].item() == pytest.approx(importance * 4 * math.sqrt(2) * plain, rel=1e-4)
