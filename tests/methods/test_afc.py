import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import reference_afc
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.learning.step import step_losses
from ccfa.losses.distillation import weighted_discrepancy, weighted_discrepancy_paper
from ccfa.methods.afc import WeightedDiscrepancy, afc, divided_by_mean, squared_gradients
from ccfa.methods.podnet import podnet
from toys import STAGES, Only, Recorder, begun, learned, tiny

CHANNELS = [16, 32, 64]  # of the small backbone


def test_podnet_but_for_the_terms():
    method, base = afc(), podnet()
    assert method.name == "afc"
    (term,) = (term() for term in method.terms)
    assert (term.name, term.weight, term.loss) == ("discrepancy", 4.0, weighted_discrepancy)
    assert replace(method, name="", terms=(), head=None) == replace(base, name="", terms=(), head=None)
    assert isinstance(method.head, partial)
    assert (method.head.func, method.head.keywords) == (base.head.func, base.head.keywords)


def test_the_paper_s_formula_is_there():
    (term,) = (term() for term in afc(discrepancy="paper", lambda_disc=0.5).terms)
    assert (term.loss, term.weight) == (weighted_discrepancy_paper, 0.5)
    with pytest.raises(UsageError, match="'paper'"):
        afc(discrepancy="papr")


def gradients_of(loss: torch.Tensor, maps: list[torch.Tensor]) -> list[np.ndarray]:
    return [gradient.numpy() for gradient in torch.autograd.grad(loss, maps, retain_graph=True)]


def test_importance_as_the_reference():
    random = np.random.default_rng(0)
    sums, gradients = [], []
    for _ in range(3):
        maps = [torch.tensor(random.standard_normal((5, c, 2, 3)), requires_grad=True) for c in (4, 7)]
        loss = torch.stack([level.pow(3).mean() for level in maps]).sum()
        gradients.append(gradients_of(loss, maps))
        sums.append(squared_gradients(loss, maps))
    values = [divided_by_mean(sum(parts)) for parts in zip(*sums, strict=True)]
    for value, expected in zip(values, reference_afc.importance(gradients), strict=True):
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12)


def test_nothing_matters_more_where_nothing_matters():
    assert divided_by_mean(torch.zeros(3)).tolist() == [1, 1, 1]
    assert divided_by_mean(torch.tensor([1.0, 3.0])).tolist() == [0.5, 1.5]


def test_importance_has_mean_one():
    learner = learned(tiny("afc"), 1)
    (term,) = learner.terms
    first = term.importance.clone()
    assert [part.mean().item() for part in first.split(CHANNELS)] == pytest.approx([1, 1, 1], abs=1e-5)
    assert first.min() >= 0
    assert first.std() > 0.1
    assert not first.requires_grad
    learner.learn(STAGES[1])
    assert term.importance.shape == first.shape
    assert not torch.equal(term.importance, first)
    assert torch.equal(term.state_dict()["importance"], term.importance)


def test_importance_estimate_matches_the_reference():
    learner = learned(tiny("afc"), 1)
    (term,) = learner.terms
    start = learner.network.frozen_copy().requires_grad_(True)
    learner.network = start
    term.conclude(learner)
    values = term.importance.split(CHANNELS)

    network = start.frozen_copy().requires_grad_(True).train()
    gradients = []
    for images, labels in learner.training_batches(16, "discrepancy"):
        features = network.backbone(images)
        logits = network.head(network.head.embed(features.embedding))
        gradients.append(gradients_of(learner.method.criterion(logits, labels).mean(), features.maps))
    assert len(gradients) == 2  # 24 images
    for value, expected in zip(values, reference_afc.importance(gradients), strict=True):
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-3, atol=1e-5)


def test_the_pass_moves_running_statistics_and_nothing_else():
    learner = learned(tiny("afc"), 1)
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    learner.terms[0].conclude(learner)
    moved = {key for key, value in learner.network.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {f"backbone.{key}" for key, _ in learner.network.backbone.named_buffers()}


def test_one_class_makes_channels_equal():
    learner = begun(tiny("afc"), Stage(0, 0, 1))
    learner.terms[0].conclude(learner)
    assert learner.terms[0].importance.tolist() == [1.0] * sum(CHANNELS)


def test_importance_one_is_plain_discrepancy():
    learner = begun(tiny("afc"), STAGES[1])
    (term,) = learner.terms
    assert isinstance(term, WeightedDiscrepancy)
    term.importance = torch.ones_like(term.importance)
    learner.network.train()  # batch statistics make the maps differ
    main = learner.method.phases(STAGES[1])[0]
    rows = learner.training_rows()
    losses = step_losses(learner, rows, main, learner.generator("step"))
    images = learner.method.transforms.train(learner.train.images[rows], learner.generator("step"))
    old, new = learner.previous.backbone(images).maps, learner.network.backbone(images).maps
    plain = reference_afc.weighted_discrepancy(
        [level.detach().numpy() for level in old],
        [level.detach().numpy() for level in new],
        [np.ones(channels) for channels in CHANNELS],
    )
    assert plain > 0
    assert losses["discrepancy"].item() == pytest.approx(4 * math.sqrt(2) * plain, rel=1e-4)


def test_later_stages_use_the_importance():
    def losses(importance: float) -> list[float]:
        recorder = Recorder()
        learner = learned(tiny("afc"), 1, observer=recorder)
        learner.terms[0].importance = torch.full_like(learner.terms[0].importance, importance)
        learner.method = replace(learner.method, phases=Only(learner.method.phases, ("main",)))
        learner.learn(STAGES[1])
        return [losses["discrepancy"] for progress, losses in recorder.batches if progress.stage.index == 1]

    ones, zeros = losses(1.0), losses(0.0)
    assert ones[1] > 0
    assert zeros == [0.0] * len(zeros)
