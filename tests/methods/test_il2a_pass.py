"""IL2A and PASS: what they remember of old classes, and what their terms make of it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import reference
from ccfa.augmentation import CCFA, Samples
from ccfa.learning import Learner
from ccfa.learning.step import step_losses
from ccfa.losses import semantic_augmentation
from ccfa.methods import with_augmentation
from ccfa.methods.il2a_pass import FeatureDistance
from ccfa.methods.method import Step
from ccfa.models import Features
from toys import STAGES, TOY, begun, learned, tiny, toy_images

PLAIN = replace(TOY, padding=0, flip=False, brightness=0.0)  # training images are then the test images


@cache
def after_each_stage(name: str, **options) -> list[Learner]:
    """Learners after one, two and three stages, under transforms without chance."""
    return [learned(replace(tiny(name, epochs=1, **options), transforms=PLAIN), count) for count in (1, 2, 3)]


def gaussians(learner: Learner, label: int) -> tuple[np.ndarray, np.ndarray]:
    embeddings = learner.embeddings(learner.train.rows(label, label + 1)).double().numpy()
    return embeddings.mean(axis=0), np.cov(embeddings.T)


def step_of(learner: Learner, seed: int = 0) -> Step:
    features = Features((), torch.randn(4, 64, generator=torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(seed)
    labels, network = torch.tensor([4, 5, 4, 5]), learner.network
    samples = Samples.of(features.embedding, labels)
    return Step(learner.stage, labels, network, features, network, features, generator, samples, samples.weights.sum)


@pytest.mark.parametrize("name", ["il2a", "pass"])
def test_prototypes_are_the_means_of_their_own_stage(name):
    learners = after_each_stage(name)
    for learner, stage in zip(learners, STAGES, strict=True):
        term = learner.terms[1]
        assert term.prototypes.shape == (stage.num_seen, 64)
        for label in range(stage.num_old, stage.num_seen):
            np.testing.assert_allclose(term.prototypes[label], gaussians(learner, label)[0], atol=1e-5)
    assert torch.equal(learners[0].terms[1].prototypes, learners[2].terms[1].prototypes[:2]), "old ones stay"


@pytest.mark.parametrize("published", [False, True])
def test_covariances_and_the_published_mistake(published):
    learners = after_each_stage("il2a", published_covariances=published)
    expected = np.stack([gaussians(learners[label // 2], label)[1] for label in range(6)])
    order = [4, 5, 2, 3, 0, 1] if published else range(6)
    np.testing.assert_allclose(learners[2].terms[1].covariances, expected[list(order)], atol=1e-4)


def test_the_radius_is_the_first_stage_s():
    learners = after_each_stage("pass")[::2]
    traces = [np.trace(gaussians(learners[0], label)[1]) for label in (0, 1)]
    assert learners[0].terms[1].radius.item() == pytest.approx(np.sqrt(np.mean(traces) / 64), rel=1e-4)
    assert torch.equal(learners[1].terms[1].radius, learners[0].terms[1].radius)


def test_semantic_term_sees_the_seen_classes():
    learner = begun(tiny("il2a", epochs=1), STAGES[2])
    term, step = learner.terms[1], step_of(learner)
    assert step.head.num_auxiliary == 1
    classes = torch.randint(4, (64,), generator=torch.Generator().manual_seed(0))
    weights, biases = step.head.weights[:6].split([64, 1], dim=1)
    gaussians = term.prototypes[classes], term.covariances[classes]
    expected = semantic_augmentation(*gaussians, classes, weights, biases[:, 0], 2.5, torch.tensor(10.0))
    assert term(step).item() == pytest.approx(10 * expected.item(), rel=1e-6)


def test_prototype_term_as_numpy():
    learner = begun(tiny("pass", epochs=1), STAGES[2])
    term, step = learner.terms[1], step_of(learner)
    value = term(step)
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(4, (64,), generator=generator).numpy()
    noise = torch.randn(64, 64, generator=generator).double().numpy()
    features = term.prototypes.double().numpy()[classes] + term.radius.item() * noise
    weights = step.head.weights.detach().double().numpy()
    logits = 10 * (features @ weights[:, :-1].T + weights[:, -1])
    assert value.item() == pytest.approx(10 * reference.cross_entropy(logits, classes).mean(), rel=1e-4)


def test_images_of_weight_zero_may_move():
    learner = begun(tiny("il2a", epochs=1), STAGES[1])
    step = step_of(learner)
    step = replace(step, samples=step.samples._replace(weights=torch.tensor([[1.0], [0.0], [1.0], [0.0]])))
    moved = Features((), step.features.embedding + 1)
    value = FeatureDistance(2.0)(replace(step, features=moved))
    assert value.item() == pytest.approx(2 * np.sqrt(2 * 64), rel=1e-6)


def test_turned_classes_come_back_with_the_next_stage():
    learner = Learner(tiny("pass", epochs=1), toy_images())
    classes, turned = torch.empty(0, 65), torch.empty(0, 65)
    for stage in STAGES:
        learner.begin(stage)
        outputs = learner.network.head.weights.detach().clone()
        assert len(outputs) == 4 * stage.num_seen
        assert torch.equal(outputs[: stage.num_old], classes)
        assert torch.equal(outputs[len(outputs) - 3 * stage.num_old :], turned)
        learner.optimise()
        learner.conclude()
        classes, turned = learner.network.head.weights.detach(), learner.network.head.kept
        assert len(classes) == stage.num_seen  # auxiliary outputs serve training only
        trained = torch.cat([classes, turned])
        assert (trained != outputs).any(dim=1).all(), "all of them train on"


def test_turned_classes_compete_in_the_classification():
    """The loss as published, with output 4 c + t for class c turned t times, in NumPy."""
    learner = begun(replace(tiny("pass", epochs=1), transforms=PLAIN), STAGES[2])
    learner.network.eval()
    rows, head = learner.train.rows(4, 6), learner.network.head
    losses = step_losses(learner, rows, learner.method.phases(STAGES[2])[0], learner.generator("step")).read()
    images = PLAIN.test(learner.train.images[rows])
    turned = torch.cat([torch.rot90(images, turns, (2, 3)) for turns in range(4)])
    with torch.no_grad():
        features = learner.network.backbone(turned).embedding.double().numpy()
    place = {(label, 0): label for label in range(6)}
    for stage in STAGES:
        for label in range(stage.num_old, stage.num_seen):
            first = 6 + 3 * (6 - stage.num_seen + label - stage.num_old)  # newest stage first
            place |= {(label, turns): first + turns - 1 for turns in (1, 2, 3)}
    outputs = head.weights.detach().double().numpy()[[place[label, turns] for label in range(6) for turns in range(4)]]
    logits = 10 * (features @ outputs[:, :-1].T + outputs[:, -1])
    labels = np.concatenate([4 * learner.train.labels[rows].numpy() + turns for turns in range(4)])
    assert losses["classification"].item() == pytest.approx(reference.cross_entropy(logits, labels).mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["il2a", "pass"])
def test_augmentation_starts_from_own_images(name):
    seen = []

    class Watching(CCFA):
        def __call__(self, samples, *arguments):
            seen.append((len(samples.features), samples.labels.max().item()))
            return super().__call__(samples, *arguments)

    learned(with_augmentation(tiny(name, epochs=1), Watching(count=1, steps=1)), 2)
    assert {size for size, _ in seen} == {16}
    assert max(label for _, label in seen) == 3
