import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

import reference
from ccfa.augmentation import Samples
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.losses.distillation import cosine_distance, pod_spatial
from ccfa.methods import Budget, Step, with_memory
from ccfa.methods.parts import (
    EmbeddingDistillation,
    MapDistillation,
    Steps,
    all_but_old_classes,
    all_parameters,
    class_blocks,
    cosine,
    imprint,
    old_to_new,
    seen_to_new,
)
from ccfa.models import CosineHead, Features
from toys import STAGES, begun, learned, tiny


def test_cosine_rates_as_published():
    factors = [cosine(epoch, 160) for epoch in range(160)]
    assert factors[:2] == [1, 1]
    assert factors[2] == pytest.approx((1 + math.cos(math.pi / 160)) / 2)
    assert factors[81] == pytest.approx(0.5)
    assert sorted(factors, reverse=True) == factors
    assert factors[-1] > 0


def test_steps_drop_at_fractions_of_the_epochs():
    factors = [Steps((0.5, 0.75))(epoch, 160) for epoch in range(160)]
    assert factors == pytest.approx([1] * 80 + [0.1] * 40 + [0.01] * 40)
    thirds = [Steps((1 / 3, 2 / 3))(epoch, 90) for epoch in range(90)]
    assert thirds == pytest.approx([1] * 30 + [0.1] * 30 + [0.01] * 30)
    assert [Steps((0.7,), gamma=0.2)(epoch, 10) for epoch in (6, 7)] == pytest.approx([1, 0.2])


@pytest.mark.parametrize(
    ("stage", "seen", "old"),
    [(Stage(1, 50, 60), 2.449, 2.236), (Stage(5, 90, 100), 3.162, 3.0), (Stage(50, 99, 100), 10.0, 9.950)],
)
def test_factors_of_the_distillation_weights(stage, seen, old):
    assert seen_to_new(stage) == pytest.approx(seen, abs=1e-3)
    assert old_to_new(stage) == pytest.approx(old, abs=1e-3)


def test_parameter_selectors():
    network = begun(tiny("podnet"), STAGES[1]).network
    head = network.head
    everything = {id(parameter) for parameter in network.parameters()}
    assert {id(parameter) for parameter in all_parameters(network)} == everything
    assert {id(parameter) for parameter in all_but_old_classes(network)} == everything - {id(head.old)}
    assert [id(parameter) for parameter in class_blocks(network)] == [id(head.old), id(head.new)]


@pytest.fixture
def grown() -> tuple:
    """A UCIR learner whose head has grown, its new classes not yet imprinted, and their directions."""
    learner = learned(tiny("ucir"), 1)
    learner.stage = STAGES[1]
    learner.network.head.grow(2)
    directions = [reference_directions(learner, rows) for rows in learner.new_classes()]
    return learner, directions


def reference_directions(learner, rows) -> np.ndarray:
    pixels = (learner.train.images[rows].numpy().astype(np.float32) / 255 - 0.5) / 0.25
    with torch.no_grad():
        embeddings = learner.network.eval().backbone(torch.from_numpy(pixels)).embedding.numpy()
    return np.stack([reference.unit(row) for row in embeddings.astype(np.float64)])


def test_imprinting_a_cosine_head(grown):
    learner, directions = grown
    old = learner.network.head.old.detach().clone()
    imprint(learner)
    mean_norm = np.mean([np.linalg.norm(row) for row in old.numpy()])
    expected = [mean_norm * reference.unit(rows.mean(axis=0)) for rows in directions]
    np.testing.assert_allclose(learner.network.head.new.detach(), expected, atol=1e-5)
    assert torch.equal(learner.network.head.old, old)


def test_one_proxy_is_the_mean():
    learner = learned(tiny("podnet", num_proxies=1), 1)
    learner.stage = STAGES[1]
    learner.network.head.grow(2)
    mean_norm = np.mean([np.linalg.norm(proxy) for row in learner.network.head.old.detach() for proxy in row])
    expected = [mean_norm * reference_directions(learner, rows).mean(axis=0) for rows in learner.new_classes()]
    imprint(learner)
    np.testing.assert_allclose(learner.network.head.new.detach()[:, 0], expected, atol=1e-5)


def test_imprinting_many_proxies_follows_the_old_norm():
    learner = begun(tiny("podnet"), STAGES[1])
    old, new = (block.detach().norm(dim=2) for block in (learner.network.head.old, learner.network.head.new))
    assert new.shape == (2, 10)
    # 12 images, 10 clusters: most centres are one image, whose direction has length 1.
    assert new.max().item() == pytest.approx(old.mean().item(), rel=1e-5)
    assert (new <= old.mean() * (1 + 1e-5)).all()


def test_first_stage_imprints_nothing():
    learner = learned(tiny("podnet"), 0)
    learner.stage = STAGES[0]
    learner.network.head.grow(2, torch.Generator().manual_seed(0))
    before = learner.network.head.new.detach().clone()
    imprint(learner)
    assert torch.equal(learner.network.head.new, before)


def random_step(stage: Stage) -> Step:
    torch.manual_seed(0)
    head = CosineHead(5)
    head.grow(stage.num_seen)

    def features() -> Features:
        return Features((torch.randn(4, 2, 3, 3), torch.randn(4, 3, 2, 2)), torch.randn(4, 5))

    labels, current = torch.tensor([0, 1, 2, 3]), features()
    samples = Samples.of(current.embedding, labels)
    return Step(stage, labels, head, current, head, features(), torch.Generator(), samples, lambda: samples)


def test_embedding_distillation():
    step = random_step(Stage(1, 2, 4))
    term = EmbeddingDistillation("flat", 3.0, seen_to_new, cosine_distance)
    previous, current = step.previous_features.embedding, step.features.embedding
    expected = 3 * math.sqrt(2) * reference.cosine_distance(previous.double().numpy(), current.double().numpy())
    assert term(step).item() == pytest.approx(expected, rel=1e-5)
    assert term.name == "flat"
    assert term(replace(step, features=step.previous_features)).item() == pytest.approx(0, abs=1e-6)


def test_map_distillation():
    step = random_step(Stage(2, 3, 4))
    term = MapDistillation("spatial", 2.0, old_to_new, pod_spatial)
    previous, current = (
        [maps.double().numpy() for maps in features.maps] for features in (step.previous_features, step.features)
    )
    expected = 2 * math.sqrt(3) * reference.pod_spatial(previous, current)
    assert term(step).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("budget", [Budget(), Budget(per_class=0), Budget(total=0)])
def test_needed_memory_must_not_be_empty(budget):
    with pytest.raises(UsageError, match="podnet"):
        with_memory(tiny("podnet"), budget)
    assert with_memory(tiny("replay"), budget).memory == budget


@pytest.mark.parametrize("name", ["finetune", "joint"])
def test_fixed_memories_cannot_be_resized(name):
    with pytest.raises(UsageError, match=name):
        with_memory(tiny(name), Budget(per_class=1))


def test_a_method_is_a_value():
    method = tiny("podnet")
    with pytest.raises(FrozenInstanceError):
        method.name = "mine"
    assert replace(method, name="mine").terms is method.terms
