from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from ccfa.data import ImageSet, Stage, split
from ccfa.errors import DivergedError, UsageError
from ccfa.learning import Learner
from ccfa.learning.state import network_of, state_of
from ccfa.methods.readouts import ReadOutHead, RidgeReadOut, Sums, acil, chosen_ridge, chosen_ridge_of_few, ranpac
from ccfa.models import LinearHead
from toys import STAGES, TOY, learned, seeded, tiny, toy_images

DIM, RANDOM, CLASSES = 6, 10, 4


def grown(num_random=RANDOM, uniform=False):
    """A head in double precision for four classes."""
    head = ReadOutHead(DIM, num_random, uniform).double()
    head.grow(CLASSES, seeded())
    return head


def images(num=200, seed=1):
    """Embeddings and labels of classes with means of their own."""
    labels = torch.arange(num) % CLASSES
    means = torch.randn(CLASSES, DIM, dtype=torch.float64, generator=seeded(seed))
    return means[labels] + torch.randn(num, DIM, dtype=torch.float64, generator=seeded(seed + 1)), labels


def hidden(head, embeddings):
    if not head.num_random:
        return embeddings.numpy()
    return reference.random_features(embeddings.numpy(), head.projection.numpy())


def frozen(name="ranpac", **options):
    """A read-out on a backbone that is never trained, so that its features are the same in any order of classes."""
    return replace(tiny(name, **options), phases=lambda stage: ())


@pytest.mark.parametrize("num_random", [RANDOM, 0])
@pytest.mark.parametrize("ridge", [1e-3, 0.1, 100.0])
def test_rows_are_ridge_regression(num_random, ridge):
    head, (embeddings, labels) = grown(num_random), images()
    features, targets = hidden(head, embeddings), reference.one_hot(labels.numpy(), CLASSES)
    sums = Sums.of(head, embeddings, labels)
    assert sums.gram.numpy() == pytest.approx(features.T @ features, rel=1e-12)
    assert sums.products.numpy() == pytest.approx(features.T @ targets, rel=1e-12)
    weights = reference.ridge_weights(features, targets, ridge)
    head.set_rows(sums.solved(ridge))
    assert head.weights.detach().numpy() == pytest.approx(weights.T, rel=1e-8, abs=1e-10)
    assert head(embeddings).detach().numpy() == pytest.approx(features @ weights, rel=1e-8, abs=1e-10)


def test_recursion_gives_the_same_rows():
    head, (embeddings, labels) = grown(), images()
    features, targets = hidden(head, embeddings), reference.one_hot(labels.numpy(), CLASSES)
    batches = list(zip(np.array_split(features, 7), np.array_split(targets, 7), strict=True))
    expected = reference.acil_recursion(batches, RANDOM, 0.1)
    assert Sums.of(head, embeddings, labels).solved(0.1).T.numpy() == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num", [15, 200])
def test_the_ridge_is_chosen_as_published(seed, num):
    head, (embeddings, labels) = grown(), images(num, seed)
    cut = int(0.8 * num)
    parts = (Sums.of(head, embeddings[part], labels[part]) for part in (slice(cut), slice(cut, None)))
    targets = reference.one_hot(labels.numpy(), CLASSES)
    assert chosen_ridge(*parts) == pytest.approx(reference.ranpac_ridge(hidden(head, embeddings), targets))


@pytest.mark.parametrize("seed", range(6))
def test_the_ridge_of_few_images_is_the_same(seed):
    head, (embeddings, labels) = grown(), images(11, seed)
    targets = reference.one_hot(labels.numpy(), CLASSES)
    expected = reference.ranpac_ridge(hidden(head, embeddings), targets)
    assert chosen_ridge_of_few(head, embeddings, labels, 8) == pytest.approx(expected)
    weights = 0.1 + torch.rand(11, dtype=torch.float64, generator=seeded(seed))
    parts = (Sums.of(head, embeddings[part], labels[part], weights[part]) for part in (slice(8), slice(8, None)))
    assert chosen_ridge_of_few(head, embeddings, labels, 8, weights) == pytest.approx(chosen_ridge(*parts))


def test_read_outs_have_their_published_numbers():
    (ranpac_term,), (acil_term,) = (method.terms for method in (ranpac(), acil()))
    assert (acil().head(DIM).num_random, acil_term().fixed_ridge) == (8192, 0.1)
    assert ranpac_term().fixed_ridge is None


def test_singular_sums_are_solved():
    head, (embeddings, labels) = grown(), images(3)
    rows = Sums.of(head, 1e6 * embeddings, labels).solved(1e-8)
    assert rows.isfinite().all()
    assert (head.hidden(1e6 * embeddings) @ rows.T).argmax(dim=1).tolist() == labels.tolist()
    assert Sums.of(head, 0 * embeddings, labels).solved(1e-8).abs().max() == 0


def test_projection_is_drawn_as_published():
    normal, uniform = (ReadOutHead(64, 5000, uniform) for uniform in (False, True))
    for head in (normal, uniform):
        head.grow(2, seeded())
    assert float(normal.projection.std()) == pytest.approx(1, rel=0.01)
    assert float(uniform.projection.abs().max()) == pytest.approx(1 / 8, rel=0.01)
    assert float(uniform.projection.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.01)
    before = normal.projection.clone()
    normal.grow(2, seeded(5))
    assert torch.equal(normal.projection, before)


def test_first_stage_is_trained_through_a_linear_head():
    head, (embeddings, _) = grown(), images()
    assert torch.equal(head(embeddings), head.trained(embeddings))
    learner = Learner(tiny("ranpac", epochs=1), toy_images())
    learner.begin(STAGES[0])
    before = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    learner.optimise()
    moved = {name for name, tensor in learner.network.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"head.trained.new", "backbone.levels.0.0.weight"} <= moved
    assert not {"head.new", "head.projection"} & moved
    learner.conclude()
    assert learner.network.head.trained.num_classes == 0


def test_backbone_stays_after_the_first_stage():
    learner = learned(tiny("ranpac", epochs=1), 3)
    initial = learner.initial.backbone.state_dict()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in learner.network.backbone.state_dict().items())
    assert not ranpac().phases(STAGES[1])


def test_learner_solves_for_its_own_images():
    learner = learned(tiny("acil", epochs=1), 2)
    head, rows = learner.network.head, learner.train.rows(0, 4)
    features = reference.random_features(learner.embeddings(rows).numpy(), head.projection.numpy()).astype(np.float64)
    targets = reference.one_hot(learner.train.labels[rows].numpy(), 4)
    expected = reference.ridge_weights(features, targets, 0.1).T
    assert head.weights.detach().numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert learner.terms[0].gram.dtype == torch.float64


@pytest.mark.parametrize("name", ["ranpac", "acil"])
def test_stages_and_their_order_do_not_matter(name):
    train, orders = toy_images(), ((0, 1, 2, 3, 4, 5), (3, 5, 1, 0, 4, 2))
    rows = []
    for order in orders:
        for stages in (split(6, 2, 4), split(6, 2, 2), split(6, 2, 1)):
            learner = Learner(frozen(name, ridge=2.0), train.reorder(list(order)))
            for stage in stages:
                learner.learn(stage)
            rows.append(learner.network.head.weights[np.argsort(order)].detach())
    for others in rows[1:]:
        torch.testing.assert_close(others, rows[0], rtol=1e-4, atol=1e-5)


def test_one_class_keeps_the_last_ridge():
    learner = Learner(frozen(), toy_images())
    ridges = []
    for stage in split(6, 2, [1, 2, 1]):
        learner.learn(stage)
        ridges.append(float(learner.terms[0].ridge))
    assert ridges[0] == ridges[1] > 0
    assert ridges[2] == ridges[3] > 0
    learner = Learner(frozen(), toy_images())
    learner.learn(split(6, 1, 1)[0])
    assert learner.terms[0].ridge > 0


def test_more_images_equal_having_had_them():
    train = toy_images()
    rows = train.rows(0, 6)
    late, early = rows[::3], rows[torch.arange(len(rows)) % 3 > 0]
    whole, part = Learner(frozen(ridge=2.0), train), Learner(frozen(ridge=2.0), train.subset(early))
    for stage in STAGES:
        whole.learn(stage)
        part.learn(stage)
    before = part.network.head.weights.detach().clone()
    part.terms[0].learn_more(part.network.head, whole.embeddings(late), train.labels[late])
    assert not torch.allclose(part.network.head.weights, before, rtol=1e-3)
    torch.testing.assert_close(part.network.head.weights, whole.network.head.weights, rtol=1e-4, atol=1e-5)
    assert part.stage == STAGES[-1]


def test_more_images_of_unknown_classes_are_refused():
    learner = learned(frozen(), 1)
    for label in (-1, 2):
        with pytest.raises(UsageError, match="2 classes"):
            learner.terms[0].learn_more(learner.network.head, torch.zeros(1, 64), torch.tensor([label]))
    with pytest.raises(UsageError, match="LinearHead"):
        learner.terms[0].learn_more(LinearHead(64), torch.zeros(1, 64), torch.tensor([0]))


def test_the_sums_are_in_checkpoints_only():
    learner = learned(tiny("ranpac", epochs=1), 2)
    assert {name: tuple(tensor.shape) for name, tensor in learner.network.head.state_dict().items()} == {
        "old": (2, 40),
        "new": (2, 40),
        "scale": (),
        "projection": (64, 40),
        "trained.old": (0, 65),
        "trained.new": (0, 65),
        "trained.scale": (),
    }
    stored, _ = state_of(learner)
    assert stored["term0.gram"].shape == (40, 40)
    assert stored["term0.products"].shape == (40, 4)
    again = network_of(learner.method, 3, 1, learner.network.state_dict()).eval()
    pixels = TOY.test(toy_images(seed=2).images)
    assert torch.equal(again(pixels), learner.network.eval()(pixels))


def test_the_seed_decides_the_projection():
    first, same, other = (Learner(frozen(), toy_images(), seed=seed) for seed in (0, 0, 1))
    for learner in (first, same, other):
        learner.learn(STAGES[0])
    assert torch.equal(first.network.head.projection, same.network.head.projection)
    assert not torch.equal(first.network.head.projection, other.network.head.projection)


def test_the_network_exports_and_agrees():
    network = learned(tiny("ranpac", epochs=1), 2).network.eval()
    pixels = TOY.test(toy_images(seed=2).images[:3])
    exported = torch.export.export(network, (pixels,))
    torch.testing.assert_close(exported.module()(pixels), network(pixels))
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {"aten.relu.default", "aten.linear.default"} <= targets


def test_a_run_may_leave_the_backbone_untrained(call, tmp_path):
    words = ["run", "ranpac", "--set", "epochs=0", "projection=30", "--scenario", "4,3,3", "--out", "run"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "stage 3/3  10 classes" in out
    sizes = [(tmp_path / f"run/networks/stage-00{index}.safetensors").stat().st_size for index in range(3)]
    assert max(sizes) - min(sizes) < 2000  # rows of three more classes each


def test_impossible_options_are_refused():
    for options in ({"projection": -1}, {"ridge": 0.0}, {"ridge": -1.0}, {"ridge": float("nan")}):
        with pytest.raises(UsageError, match=next(iter(options))):
            acil(**options)


def test_infinite_embeddings_are_reported():
    with pytest.raises(DivergedError):
        RidgeReadOut(1.0).learn(grown(), torch.full((1, DIM), torch.inf), torch.tensor([0]))


def test_it_learns_the_toys():
    test = toy_images(seed=1)
    for name in ("ranpac", "acil"):
        predicted = learned(tiny(name, epochs=5)).predict(test.images)
        assert (predicted == test.labels).float().mean() > 0.8  # chance is 0.17


def test_balanced_classes_count_the_same():
    """As many copies of every class as another has images: the same as counting it that often."""
    head, (embeddings, labels) = grown(), images(60)
    few = torch.cat([torch.nonzero(labels == label).flatten()[: 2 + label] for label in range(CLASSES)])
    embeddings, labels = embeddings[few], labels[few]
    term = RidgeReadOut(ridge=1.0, balanced=True)
    weights = term.weights(head, embeddings, labels)
    features, targets = hidden(head, embeddings), reference.one_hot(labels.numpy(), CLASSES)
    counts = np.bincount(labels.numpy())[labels.numpy()]
    expected = reference.ridge_weights(features / np.sqrt(counts)[:, None], targets / np.sqrt(counts)[:, None], 1.0)
    assert Sums.of(head, embeddings, labels, weights).solved(1.0).T.numpy() == pytest.approx(expected, rel=1e-7)


def test_a_class_of_one_image_is_predicted():
    """Beside classes of a hundred images it drowns, unless classes count the same."""
    right = {}
    for balanced in (False, True):
        method = frozen("ranpac", balanced=balanced)
        train = toy_images(per_class=40)
        rows = torch.cat([train.rows(0, 5), train.rows(5, 6)[:1]])
        learner = Learner(method, ImageSet(train.images[rows], train.labels[rows], train.class_names))
        learner.learn(Stage(0, 0, 6))
        right[balanced] = float((learner.predict(train.images[train.rows(5, 6)]) == 5).float().mean())
    assert right[True] > right[False]
