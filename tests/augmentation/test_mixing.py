"""Mixup, CutMix and Manifold Mixup against NumPy, and CCFA on images with two labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import reference_mixing as reference
from ccfa.augmentation import CCFA, MIXES, CutMix, ManifoldMixup, Mixup, Samples
from ccfa.augmentation.mixing import beta, random_partners, rectangle
from ccfa.augmentation.targets import TARGETS
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.step import step_losses
from ccfa.losses.classification import cross_entropy
from ccfa.methods import with_augmentation, with_image_augmentation
from ccfa.models import LinearHead
from ccfa.models.backbone import MapMixing
from ccfa.models.resnet import small
from toys import STAGES, TOY, Recorder, begun, learned, tiny, toy_images

STAGE = Stage(1, 3, 6)
LABELS = torch.arange(12) % 6


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images(num_images: int = 12) -> torch.Tensor:
    return torch.randn(num_images, 3, 8, 10, generator=seeded(5), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_shares_follow_the_beta_distribution(alpha):
    drawn = beta(alpha, (5000,), seeded())
    assert stats.kstest(drawn.numpy(), stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert torch.equal(drawn, beta(alpha, (5000,), seeded()))


def test_partners_are_a_permutation():
    partners = random_partners(20, seeded())
    assert sorted(partners.tolist()) == list(range(20))
    assert partners.tolist() != list(range(20))


@pytest.mark.parametrize("seed", range(5))
def test_mixup_as_the_reference(seed):
    images = some_images()
    mixed = Mixup()(images, LABELS, STAGE, seeded(seed))
    share, partners = mixed.weights[0, 0].item(), random_partners(12, seeded(seed)).numpy()
    assert 0 < share < 1
    np.testing.assert_allclose(mixed.images, reference.mixup(images.numpy(), partners, share))
    assert mixed.labels[:, 0].tolist() == LABELS.tolist()
    assert mixed.labels[:, 1].tolist() == LABELS[partners].tolist()
    torch.testing.assert_close(mixed.weights.sum(dim=1), torch.ones(12, dtype=torch.float64))
    assert mixed.mixing is None


@pytest.mark.parametrize("seed", range(20))
def test_rectangles_are_the_published_ones(seed):
    share = torch.rand((), generator=seeded(seed))
    inside = rectangle(8, 10, share, seeded(seed))
    row, column = (torch.rand(2, generator=seeded(seed)).numpy() * [8, 10]).astype(int)
    top, bottom, left, right = reference.cut_box(8, 10, row, column, share.item())
    expected = np.zeros((8, 10), dtype=bool)
    expected[top:bottom, left:right] = True
    np.testing.assert_array_equal(inside, expected)


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_weighs_labels_by_the_true_area(seed):
    images = some_images()
    mixed = CutMix(probability=1.0)(images, LABELS, STAGE, seeded(seed))
    partners = random_partners(12, seeded(seed))
    from_partner = (mixed.images == images[partners]).all(dim=1)
    from_itself = (mixed.images == images).all(dim=1)
    assert (from_partner | from_itself).all()
    moved = partners != torch.arange(12)
    areas = from_partner.double().mean(dim=(1, 2))[moved]
    torch.testing.assert_close(areas, mixed.weights[moved, 1])
    torch.testing.assert_close(mixed.weights.sum(dim=1), torch.ones(12, dtype=torch.float64))


@pytest.mark.parametrize("kind", MIXES.values())
def test_probability_decides_batch_by_batch(kind):
    images, mixing = some_images(), kind(probability=0.5)
    batches = [mixing(images, LABELS, STAGE, seeded(seed)) for seed in range(200)]
    untouched = [batch for batch in batches if batch.weights[0, 0] == 1]
    assert 60 < len(untouched) < 140
    for batch in untouched:
        assert torch.equal(batch.images, images)
        assert not batch.weights[:, 1].any()
    never = kind(probability=0.0)(images, LABELS, STAGE, seeded())
    assert torch.equal(never.images, images)
    assert torch.equal(never.weights[:, 0], torch.ones(12, dtype=torch.float64))


def test_manifold_mixup_draws_every_place_equally_often():
    levels = [int(ManifoldMixup()(some_images(), LABELS, STAGE, seeded(seed)).mixing.level) for seed in range(300)]
    assert stats.chisquare(np.bincount(levels, minlength=3)).pvalue > 0.01


@pytest.mark.parametrize("level", [0, 1, 2])
def test_maps_are_mixed_before_one_level_only(level):
    torch.manual_seed(0)
    backbone = small(3).double().eval()
    images, partners, share = some_images(6), torch.tensor([3, 0, 1, 5, 4, 2]), 0.7
    maps = images
    for index, module in enumerate(backbone.levels):
        if index == level:
            maps = torch.tensor(reference.mixup(maps.detach().numpy(), partners.numpy(), share))
        maps = module(maps)
    chosen = MapMixing(torch.tensor(level), partners, torch.tensor(share, dtype=torch.float64))
    features = backbone(images, chosen)
    torch.testing.assert_close(features.embedding, maps.mean(dim=(2, 3)))
    kept = MapMixing(torch.tensor(level), partners, torch.tensor(1.0, dtype=torch.float64))
    assert torch.equal(backbone(images, kept).embedding, backbone(images).embedding)


def test_manifold_mixup_at_the_input_is_mixup_of_images():
    torch.manual_seed(0)
    backbone, images = small(3).double().eval(), some_images()
    at_input = replace(ManifoldMixup(alpha=1.0), num_places=1)(images, LABELS, STAGE, seeded())
    by_images = Mixup()(images, LABELS, STAGE, seeded())
    assert torch.equal(at_input.weights, by_images.weights)
    inside = backbone(at_input.images, at_input.mixing).embedding
    torch.testing.assert_close(inside, backbone(by_images.images).embedding)


def test_the_previous_network_sees_the_same_mixing():
    """At the start of a stage both networks agree, so that mixing alone must not cost anything."""
    method = with_image_augmentation(tiny("podnet"), ManifoldMixup())
    learner = begun(method, STAGES[1])
    learner.network.eval()
    phase = method.phases(STAGES[1])[0]
    for seed in range(4):
        losses = step_losses(learner, learner.training_rows()[:16], phase, seeded(seed))
        assert losses["pod-flat"].item() == pytest.approx(0, abs=1e-5)
        assert losses["pod-spatial"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", MIXES.values())
def test_every_mixing_trains_alone_and_with_the_augmentation(kind):
    recorder = Recorder()
    method = with_augmentation(with_image_augmentation(tiny("podnet"), kind()), CCFA(count=2, steps=2))
    learner = learned(method, observer=recorder)
    assert all(np.isfinite(losses["loss"]) for _, losses in recorder.batches)
    assert learner.predict(toy_images(seed=1).images).max() < 6


@pytest.mark.parametrize(("changes", "expected"), [({"in_first_stage": False}, 0), ({"phases": ("balanced",)}, 1)])
def test_it_acts_only_where_it_may(changes, expected):
    calls = []

    class Counting(Mixup):
        def __call__(self, images, labels, stage, generator):
            calls.append(stage.index)
            return super().__call__(images, labels, stage, generator)

    learner = Learner(with_image_augmentation(tiny("podnet", epochs=1), Counting(**changes)), toy_images())
    for stage in STAGES[:2]:
        learner.learn(stage)
    assert calls
    assert 0 not in calls
    main, balanced = method_batches(learner)
    assert len(calls) == (balanced if expected else main + balanced)


def method_batches(learner: Learner) -> tuple[int, int]:
    """Batches of an epoch of the main and of the balanced phase of stage 1, 16 images each."""
    return -(-(2 * 12 + 2 * 3) // 16), -(-4 * 3 // 16)


@pytest.mark.parametrize("kind", MIXES.values())
@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"alpha": -1.0}, {"probability": 1.5}, {"probability": -0.1}])
def test_impossible_values_are_refused(kind, changes):
    with pytest.raises(UsageError, match=r"alpha > 0 and a probability from 0 to 1"):
        kind(**changes)


def test_a_second_mixing_is_refused():
    with pytest.raises(UsageError, match="replay makes Mixup of its images already"):
        with_image_augmentation(with_image_augmentation(tiny("replay"), Mixup()), CutMix())


def mixed_samples() -> tuple[Samples, LinearHead, LinearHead]:
    old_head, head = LinearHead(7), LinearHead(7)
    old_head.grow(4, seeded(1))
    head.grow(4, seeded(2))
    head.grow(2, seeded(3))
    labels = torch.tensor([[0, 1], [2, 5], [4, 5], [3, 3], [1, 0]])
    weights = torch.tensor([0.3, 0.7]).expand(5, 2)
    return Samples(torch.randn(5, 7, generator=seeded(4)), labels, weights), head, old_head


@pytest.mark.parametrize("target", ["most-confident", "least-confident", "random"])
def test_no_label_of_a_mixed_image_is_a_target(target):
    samples, head, _ = mixed_samples()
    with torch.no_grad():
        chosen = TARGETS[target](head(samples.features), samples.labels, 4, 50, seeded())
    assert chosen.classes.shape == (50, 5)
    assert chosen.valid.all()
    for row, labels in enumerate(samples.labels.tolist()):
        assert not set(chosen.classes[:, row].tolist()) & set(labels)


def test_an_image_that_carries_every_old_class_has_no_copies_that_count():
    samples, head, _ = mixed_samples()
    two_old = LinearHead(7)
    two_old.grow(2, seeded(1))
    extended = CCFA(count=3, steps=2)(samples, head, two_old, cross_entropy, seeded())
    assert extended.weights[5:, 0].view(3, 5).tolist() == [[0, 1, 1, 1, 0]] * 3


@pytest.mark.parametrize("target", [*TARGETS, "balanced-3"])
@pytest.mark.parametrize("kept", [0, 1])
def test_labels_that_weigh_nothing_are_no_own_classes(target, kept):
    samples, head, old_head = mixed_samples()
    weights = torch.zeros(5, 2).index_fill(1, torch.tensor(kept), 1.0)
    ccfa = CCFA(count=3, steps=2, target=target)
    mixed, plain = (
        ccfa(batch, head, old_head, cross_entropy, seeded())
        for batch in (samples._replace(weights=weights), Samples.of(samples.features, samples.labels[:, kept]))
    )
    assert torch.equal(mixed.features, plain.features)
    assert torch.equal(mixed.labels[5:, :1], plain.labels[5:])
    assert torch.equal(mixed.weights[5:, :1], plain.weights[5:])


def test_copies_are_counted_by_image_and_have_one_label():
    samples, head, old_head = mixed_samples()
    extended = CCFA(count=3, steps=2)(samples, head, old_head, cross_entropy, seeded())
    assert len(extended.features) == 5 + 3 * 5
    assert torch.equal(extended.weights[:5], samples.weights)
    assert extended.weights[5:].tolist() == [[1, 0]] * 15
    assert extended.labels[5:].max() < 4


def test_transforms_still_come_first():
    """Mixing sees normalised images: what a transform makes of black is mixed, not black itself."""
    learner = begun(with_image_augmentation(tiny("finetune"), Mixup()), STAGES[0])
    images = TOY.test(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    mixed = learner.method.image_augmentation(images, torch.zeros(4, dtype=torch.int64), STAGES[0], seeded())
    torch.testing.assert_close(mixed.images, torch.full_like(images, -2.0))
