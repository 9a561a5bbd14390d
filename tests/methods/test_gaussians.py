"""SimpleCIL, SLDA and FeCAM against their formulas; what all read-outs share."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from ccfa.data import ImageSet, Stage, split
from ccfa.errors import DivergedError, UsageError
from ccfa.learning import Learner
from ccfa.learning.state import network_of, state_of
from ccfa.methods import METHODS
from ccfa.methods.gaussians import (
    Discriminant,
    DiscriminantHead,
    Gaussians,
    MahalanobisHead,
    MeanHead,
    Means,
    correlations,
    fecam,
    inverse_factors,
    shrink,
    slda,
)
from ccfa.methods.readouts import ReadOutHead
from toys import STAGES, TOY, learned, seeded, tiny, toy_images

DIM, CLASSES = 5, 4
NAMES = ("simplecil", "slda", "fecam")
VARIANTS = {name: (name, {}) for name in NAMES} | {
    "fecam, common": ("fecam", {"covariance": "common"}),
    "fecam, unit": ("fecam", {"unit": True, "power": 1.0, "alpha2": 0.0}),
}


def images(num=120, seed=1):
    """Positive embeddings, and labels of classes of several sizes with means of their own."""
    labels = torch.randint(CLASSES, (num,), generator=seeded(seed))
    means = 2 * torch.rand(CLASSES, DIM, dtype=torch.float64, generator=seeded(seed + 1))
    return (means[labels] + torch.randn(num, DIM, dtype=torch.float64, generator=seeded(seed + 2))).abs(), labels


def computed(head, term, embeddings, labels):
    """The head in double precision, after the term has learned these images."""
    head = head.double()
    head.grow(CLASSES, seeded())
    term.learn(head, embeddings, labels)
    return head


def frozen(variant, **options):
    """A read-out on a backbone that is never trained, so that its features are the same in any order of classes."""
    name, own = VARIANTS[variant]
    return replace(tiny(name, **own | options), phases=lambda stage: ())


def test_simplecil_is_the_cosine_to_class_means():
    (embeddings, labels), (test, _) = images(), images(9, seed=7)
    head = computed(MeanHead(DIM), Means(), embeddings, labels)
    means = reference.class_means(embeddings.numpy(), labels.numpy())
    norms = np.linalg.norm(test, axis=1)[:, None] * np.linalg.norm(means, axis=1)
    assert head(test).detach().numpy() == pytest.approx(test.numpy() @ means.T / norms)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.3, 1.0])
def test_slda_is_linear_discriminant_analysis(shrinkage):
    (embeddings, labels), (test, _) = images(), images(9, seed=7)
    logits = computed(DiscriminantHead(DIM), Discriminant(shrinkage), embeddings, labels)(test).detach().numpy()
    means = reference.class_means(embeddings.numpy(), labels.numpy())
    apart = embeddings.numpy() - means[labels.numpy()]
    expected = reference.slda_scores(test.numpy(), means, apart.T @ apart / len(apart), shrinkage)
    assert logits - logits[:, :1] == pytest.approx(expected - expected[:, :1])  # up to a number for each image


def test_slda_is_near_its_published_stream():
    embeddings, labels = images(1000)
    head = computed(DiscriminantHead(DIM), Discriminant(1e-4), embeddings, labels)
    means, covariance = reference.slda_stream(np.eye(DIM), embeddings.numpy(), labels.numpy(), CLASSES)
    expected = reference.slda_scores(embeddings.numpy(), means, covariance, 1e-4)
    logits = head(embeddings).detach().numpy()
    found, expected = (scores - scores.mean(axis=1, keepdims=True) for scores in (logits, expected))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("alphas", [(1.0, 1.0), (0.5, 2.0)])
def test_fecam_is_its_published_distance(power, common, alphas):
    (embeddings, labels), (test, _) = images(), images(9, seed=7)
    head = computed(MahalanobisHead(DIM, power), Gaussians(common, *alphas), embeddings, labels)
    expected = reference.fecam_distances(test.numpy(), embeddings.numpy(), labels.numpy(), power, common, alphas)
    assert -head(test).detach().numpy() == pytest.approx(expected)
    assert len(head.factors) == (1 if common else CLASSES)


def test_fecam_of_unit_features_is_the_published_one_for_transformers():
    (embeddings, labels), (test, _) = images(), images(9, seed=7)
    embeddings, test = embeddings - 1, test - 1  # negative ones, too
    head = computed(MahalanobisHead(DIM, 1.0, unit=True), Gaussians(False, 1.0, 0.0), embeddings, labels)
    expected = reference.fecam_distances_of_units(test.numpy(), embeddings.numpy(), labels.numpy(), 1.0)
    assert -head(test).detach().numpy() == pytest.approx(expected)
    roots, root_of_test = (part.sign() * part.abs().sqrt() for part in (embeddings, test))
    head = computed(MahalanobisHead(DIM, 0.5, unit=True), Gaussians(False, 1.0, 0.0), embeddings, labels)
    expected = reference.fecam_distances_of_units(root_of_test.numpy(), roots.numpy(), labels.numpy(), 1.0)
    assert -head(test).detach().numpy() == pytest.approx(expected)


def test_fecam_has_its_published_numbers():
    (make,) = fecam().terms
    assert make().alphas == (1.0, 1.0)
    assert fecam().head(DIM).power == 0.5


def test_negative_features_are_transformed_too():
    head = MahalanobisHead(DIM, 0.5)
    assert head.transformed(torch.tensor([4.0, -9.0, 0.0])).tolist() == [2.0, -3.0, 0.0]


def test_features_that_never_vary_do_no_harm():
    embeddings, labels = images()
    embeddings[:, 0] = 0
    for head, term in (
        (MahalanobisHead(DIM, 0.5), Gaussians(False, 0.0, 0.0)),
        (MahalanobisHead(DIM, 0.5), Gaussians(True, 1.0, 1.0)),
        (DiscriminantHead(DIM), Discriminant(1e-4)),
    ):
        assert computed(head, term, embeddings, labels)(embeddings).isfinite().all()


def test_factors_are_those_of_the_pseudo_inverse():
    rows = torch.randn(3, DIM, DIM - 1, dtype=torch.float64, generator=seeded())
    singular = rows @ rows.mT
    factors = inverse_factors(singular)
    torch.testing.assert_close(factors.mT @ factors, torch.linalg.pinv(singular))


def test_shrinking_and_correlations():
    equal = torch.tensor([[[2.0, 1.0], [1.0, 4.0]]])
    assert shrink(equal, 1.0, 0.5).tolist() == [[[5.0, 1.5], [1.5, 7.0]]]
    assert torch.equal(shrink(equal, 0.0, 0.0), equal)
    assert correlations(torch.tensor([[[4.0, 3.0], [3.0, 9.0]]])).tolist() == [[[1.0, 0.5], [0.5, 1.0]]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_and_their_order_do_not_matter(variant):
    train, scores = toy_images(), []
    for order, size in (((0, 1, 2, 3, 4, 5), 2), ((3, 5, 1, 0, 4, 2), 1), ((3, 5, 1, 0, 4, 2), 4)):
        learner = Learner(frozen(variant), train.reorder(list(order)))
        for stage in split(6, 2, size):
            learner.learn(stage)
        logits = learner.network.eval()(TOY.test(train.images)).detach()[:, np.argsort(order)]
        scores.append(logits - logits.mean(dim=1, keepdim=True))
    for others in scores[1:]:
        torch.testing.assert_close(others, scores[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_images_equal_having_had_them(variant):
    train = toy_images()
    rows = train.rows(0, 6)
    late, early = rows[::3], rows[torch.arange(len(rows)) % 3 > 0]
    whole, part = Learner(frozen(variant), train), Learner(frozen(variant), train.subset(early))
    for stage in STAGES:
        whole.learn(stage)
        part.learn(stage)
    before = part.network.head.weights.detach().clone()
    part.terms[0].learn_more(part.network.head, whole.embeddings(late), train.labels[late])
    assert not torch.equal(part.network.head.weights, before)
    torch.testing.assert_close(part.network.head.weights, whole.network.head.weights, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(part.terms[0].directions, whole.terms[0].directions)


@pytest.mark.parametrize("name", NAMES)
def test_more_images_of_unknown_classes_are_refused(name):
    learner = learned(frozen(name), 1)
    with pytest.raises(UsageError, match="2 classes"):
        learner.terms[0].learn_more(learner.network.head, torch.zeros(1, 64), torch.tensor([2]))
    with pytest.raises(UsageError, match="ReadOutHead"):
        learner.terms[0].learn_more(ReadOutHead(64, 0), torch.zeros(1, 64), torch.tensor([0]))
    with pytest.raises(DivergedError):
        learner.terms[0].learn_more(learner.network.head, torch.full((1, 64), torch.nan), torch.tensor([0]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_classes_of_one_image_are_learned(variant):
    train = toy_images()
    few = torch.cat([train.rows(0, 4), train.rows(4, 5)[:1], train.rows(5, 6)[:1]])
    for rows, stages in ((few, split(6, 2, [3, 1])), (few[-2:], None)):
        part = ImageSet(train.images[rows], train.labels[rows] - (0 if stages else 4), train.class_names[-len(rows) :])
        learner = Learner(frozen(variant), part)
        for stage in stages or [Stage(0, 0, 1), Stage(1, 1, 2)]:
            learner.learn(stage)
        assert learner.predict(part.images)[-2:].tolist() == part.labels[-2:].tolist()


def test_products_are_in_checkpoints_only():
    learner = learned(tiny("fecam", epochs=1), 2)
    network, (stored, _) = learner.network.state_dict(), state_of(learner)
    assert network["head.factors"].shape == (4, 64, 64)
    assert network["head.factors"].dtype == torch.float32
    assert stored["term0.products"].shape == (4, 64, 64)
    assert stored["term0.products"].dtype == torch.float64
    assert "head.products" not in network
    again = network_of(learner.method, 3, 1, network).eval()
    pixels = TOY.test(toy_images(seed=2).images)
    assert torch.equal(again(pixels), learner.network.eval()(pixels))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", ["linear", "podnet"])
def test_it_learns_the_toys(name, first):
    test = toy_images(seed=1)
    predicted = learned(tiny(name, epochs=5, first=first)).predict(test.images)
    assert (predicted == test.labels).float().mean() > 0.8  # chance is 0.17


def test_impossible_options_are_refused():
    for factory, option in ((slda, "shrinkage"), (fecam, "power")):
        for value in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(UsageError, match=option):
                factory(**{option: value})
    for name in NAMES:
        with pytest.raises(UsageError, match="first of"):
            METHODS[name](first="other")
