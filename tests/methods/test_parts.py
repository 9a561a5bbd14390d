import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import nn

import reference
from ccfa.augmentation import Samples
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.losses import cosine_distance, pod_spatial
from ccfa.methods import Budget, Step, with_memory
from ccfa.methods.parts import (
    EmbeddingDistillation,
    MapDistillation,
    Steps,
    herd,
    imprint,
    kmeans,
    old_to_new,
    seen_to_new,
)
from ccfa.models import CosineHead, Features, Network
from toys import STAGES, begun, learned, seeded, tiny


def test_steps_drop_at_fractions_of_the_epochs():
    factors = [Steps((0.5, 0.75))(epoch, 160) for epoch in range(160)]
    assert factors == pytest.approx([1] * 80 + [0.1] * 40 + [0.01] * 40)
    assert [Steps((0.7,), gamma=0.2)(epoch, 10) for epoch in (6, 7)] == pytest.approx([1, 0.2])
    assert Steps()(0, 1) == 1  # a single epoch has the rate itself


def reference_directions(learner, rows) -> np.ndarray:
    pixels = (learner.train.images[rows].numpy().astype(np.float32) / 255 - 0.5) / 0.25
    with torch.no_grad():
        embeddings = learner.network.eval().backbone(torch.from_numpy(pixels)).embedding.numpy()
    return np.stack([reference.unit(row) for row in embeddings.astype(np.float64)])


@pytest.mark.parametrize(("name", "options"), [("ucir", {}), ("podnet", {"num_proxies": 1})])
def test_new_classes_start_at_their_mean(name, options):
    learner = learned(tiny(name, epochs=1, **options), 1)
    learner.stage = STAGES[1]
    head = learner.network.head
    head.grow(2)
    old = head.old.detach().clone()
    means = [reference_directions(learner, rows).mean(axis=0) for rows in learner.new_classes()]
    imprint(learner)
    norms = np.linalg.norm(old.numpy(), axis=-1).mean()
    expected = [norms * (reference.unit(mean) if name == "ucir" else mean) for mean in means]
    np.testing.assert_allclose(head.new.detach().flatten(1), expected, atol=1e-5)
    assert torch.equal(head.old, old)


def test_many_proxies_follow_the_old_norm():
    learner = begun(tiny("podnet", epochs=1), STAGES[1])
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


@pytest.mark.parametrize("stage", [Stage(1, 2, 4), Stage(2, 3, 4)])
def test_distillation_terms(stage):
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3])
    previous, current = (
        Features((torch.randn(4, 2, 3, 3), torch.randn(4, 3, 2, 2)), torch.randn(4, 5)) for _ in range(2)
    )
    samples = Samples.of(current.embedding, labels)
    network = Network(nn.Identity(), CosineHead(5))
    step = Step(stage, labels, network, current, network, previous, torch.Generator(), samples, samples.weights.sum)
    flat = EmbeddingDistillation("flat", 3.0, seen_to_new, cosine_distance)
    expected = 3 * math.sqrt(stage.num_seen / stage.num_new) * cosine_distance(previous.embedding, current.embedding)
    assert flat(step).item() == pytest.approx(expected.item(), rel=1e-5)
    spatial = MapDistillation("spatial", 2.0, old_to_new, pod_spatial)
    expected = 2 * math.sqrt(stage.num_old / stage.num_new) * pod_spatial(previous.maps, current.maps)
    assert spatial(step).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("budget", [Budget(), Budget(per_class=0), Budget(total=0)])
def test_needed_memory_must_not_be_empty(budget):
    with pytest.raises(UsageError, match="podnet"):
        with_memory(tiny("podnet"), budget)
    assert with_memory(tiny("replay"), budget).memory == budget


def test_a_memory_is_per_class_or_in_total():
    with pytest.raises(UsageError, match="not both"):
        Budget(per_class=20, total=100)


@pytest.mark.parametrize("name", ["finetune", "joint", "il2a", "pass", "lwf", "ewc"])
def test_fixed_memories_cannot_be_resized(name):
    with pytest.raises(UsageError, match=name):
        with_memory(tiny(name), Budget(per_class=1))


def inertia(points: np.ndarray, centres: np.ndarray) -> float:
    return sum(min(np.sum((point - centre) ** 2) for centre in centres) for point in points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kmeans_is_as_good_as_scikit_learn_s(dtype):
    points = np.random.default_rng(0).standard_normal((150, 5))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    expected = KMeans(10, n_init=10, random_state=0).fit(points).inertia_
    torch.manual_seed(1)
    centres = kmeans(torch.tensor(points, dtype=dtype), 10, seeded(0))
    assert inertia(points, centres.numpy()) <= 1.03 * expected
    nearest = np.argmin(((points[:, None] - centres.numpy()[None]) ** 2).sum(axis=2), axis=1)
    for cluster in range(10):
        np.testing.assert_allclose(centres[cluster], points[nearest == cluster].mean(axis=0), atol=1e-6)
    torch.manual_seed(2)  # the generator alone decides
    assert torch.equal(centres, kmeans(torch.tensor(points, dtype=dtype), 10, seeded(0)))


def test_kmeans_finds_separated_clusters():
    random = np.random.default_rng(0)
    means = 100.0 * np.eye(6)[:4]
    groups = [mean + 0.1 * random.standard_normal((count, 6)) for mean, count in zip(means, [3, 9, 20, 1], strict=True)]
    points = np.concatenate(groups)[random.permutation(33)]
    centres = kmeans(torch.tensor(points), 4, seeded(0)).numpy()
    order = np.argmax(centres @ means.T, axis=0)
    np.testing.assert_allclose(centres[order], [group.mean(axis=0) for group in groups], atol=1e-10)


@pytest.mark.parametrize("points", [torch.randn(1, 4), torch.randn(3, 4), torch.ones(12, 3)], ids=len)
def test_kmeans_of_few_or_equal_points(points):
    centres = kmeans(points, 5, seeded(0))
    assert centres.shape == (5, points.shape[1])
    assert inertia(points.numpy(), centres.numpy()) == pytest.approx(0, abs=1e-10)


def embeddings(seed, num_rows, dim, offset=0.0):
    return np.random.default_rng(seed).standard_normal((num_rows, dim)) + offset


def herded(classes, num_exemplars):
    """The rows picked of each class, as plain lists."""
    tensors = [torch.tensor(rows) for rows in classes]
    return [rows.tolist() for rows in herd(tensors, num_exemplars, torch.Generator())]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_the_same_rows_in_the_same_order(seed, offset):
    rows = embeddings(seed, 60, 8, offset)
    lengths = np.random.default_rng(2).uniform(0.1, 10, (60, 1))  # they do not matter
    (longest,) = herded([rows * lengths], 20)
    assert longest == reference.herd(rows, 20)
    assert herded([rows], 7) == [longest[:7]]


def test_classes_do_not_influence_each_other():
    classes = [embeddings(seed, size, 8, -1.0) for seed, size in enumerate([40, 3, 1, 25])]
    assert herded(classes, 10) == [reference.herd(rows, 10) for rows in classes]


# A few rows are picked again and again; the published code then goes on without counting them.
CROWDED = np.concatenate([np.eye(3)[:1] + 0.01 * embeddings(4, 12, 3), embeddings(5, 3, 3)])


def test_a_row_picked_again_costs_no_rank():
    unit = CROWDED / np.linalg.norm(CROWDED, axis=1, keepdims=True)
    direction, without_replacement = unit.mean(axis=0), []
    for _ in range(8):
        scores = unit @ direction
        scores[without_replacement] = -np.inf
        without_replacement.append(int(scores.argmax()))
        direction = direction + unit.mean(axis=0) - unit[without_replacement[-1]]
    (chosen,) = herded([CROWDED], 8)
    assert len(set(chosen)) == 8
    assert chosen == reference.herd(CROWDED, 8) != without_replacement


def test_other_rows_follow_the_herded_ones():
    expected = reference.herd(CROWDED, 10)
    assert len(expected) < 10  # a thousand rounds are not enough
    (chosen,) = herded([CROWDED], 10)
    assert chosen[: len(expected)] == expected
    assert len(set(chosen)) == 10


@pytest.mark.parametrize(("rows", "count"), [(embeddings(6, 1, 5), 1), (embeddings(6, 4, 5), 4), (np.ones((9, 4)), 5)])
def test_few_or_equal_rows_are_each_kept_once(rows, count):
    (chosen,) = herded([rows], max(count, 5))
    assert len(set(chosen)) == len(chosen) == count


def test_herded_rows_have_the_mean_of_their_class():
    rows = embeddings(7, 200, 10, 0.3)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    (chosen,) = herded([rows], 20)
    near, first = (np.linalg.norm(unit[x].mean(0) - unit.mean(0)) for x in (chosen, range(20)))
    assert near < 0.5 * first
