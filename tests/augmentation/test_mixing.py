"""Image augmentations against NumPy, and CCFA on images with two labels."""

import numpy as np
import pytest
import torch
from scipy import stats

import reference
from ccfa.augmentation import CCFA, MIXES, CutMix, ManifoldMixup, Mixup, Samples
from ccfa.augmentation.mixing import ClassMixing, Rotations, beta, pair_label, random_partners, rectangle
from ccfa.augmentation.targets import TARGETS
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.learning.step import step_losses
from ccfa.losses import cross_entropy
from ccfa.methods import with_image_augmentation
from ccfa.models import BACKBONES, LinearHead
from ccfa.models.backbone import MapMixing
from toys import STAGES, begun, learned, seeded, tiny

STAGE = Stage(1, 3, 8)
LABELS = torch.tensor([3, 4, 5, 6, 7, 3, 4, 7, 7, 5])
every_kind = pytest.mark.parametrize("kind", MIXES.values())


def some_images(num_images: int = 10, width: int = 10) -> torch.Tensor:
    return torch.randn(num_images, 3, 8, width, generator=seeded(5), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_shares_follow_the_beta_distribution(alpha):
    drawn = beta(alpha, (5000,), seeded())
    assert stats.kstest(drawn.numpy(), stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert torch.equal(drawn, beta(alpha, (5000,), seeded()))


@pytest.mark.parametrize("seed", range(3))
def test_mixup_as_the_reference(seed):
    images, partners = some_images(), random_partners(10, seeded(seed))
    assert sorted(partners.tolist()) == list(range(10))
    mixed = Mixup()(images, LABELS, STAGE, seeded(seed))
    share = mixed.weights[0, 0].item()
    assert 0 < share < 1
    np.testing.assert_allclose(mixed.images, reference.mixup(images.numpy(), partners.numpy(), share))
    assert torch.equal(mixed.labels, torch.stack([LABELS, LABELS[partners]], dim=1))
    torch.testing.assert_close(mixed.weights.sum(dim=1), torch.ones(10, dtype=torch.float64))
    assert mixed.mixing is None


@pytest.mark.parametrize("seed", range(10))
def test_rectangles_are_the_published_ones(seed):
    share = torch.rand((), generator=seeded(seed))
    inside = rectangle(8, 10, share, seeded(seed))
    row, column = (torch.rand(2, generator=seeded(seed)).numpy() * [8, 10]).astype(int)
    top, bottom, left, right = reference.cut_box(8, 10, row, column, share.item())
    expected = np.zeros((8, 10), dtype=bool)
    expected[top:bottom, left:right] = True
    np.testing.assert_array_equal(inside, expected)


@pytest.mark.parametrize("seed", range(3))
def test_cutmix_weighs_labels_by_the_true_area(seed):
    images, partners = some_images(), random_partners(10, seeded(seed))
    mixed = CutMix(probability=1.0)(images, LABELS, STAGE, seeded(seed))
    from_partner = (mixed.images == images[partners]).all(dim=1)
    assert (from_partner | (mixed.images == images).all(dim=1)).all()
    moved = partners != torch.arange(10)
    torch.testing.assert_close(from_partner.double().mean(dim=(1, 2))[moved], mixed.weights[moved, 1])
    torch.testing.assert_close(mixed.weights.sum(dim=1), torch.ones(10, dtype=torch.float64))


@every_kind
def test_probability_decides_batch_by_batch(kind):
    images, mixing = some_images(), kind(probability=0.5)
    batches = [mixing(images, LABELS, STAGE, seeded(seed)) for seed in range(200)]
    untouched = [batch for batch in batches if batch.weights[0, 0] == 1]
    assert 60 < len(untouched) < 140
    for batch in [*untouched, kind(probability=0.0)(images, LABELS, STAGE, seeded())]:
        assert torch.equal(batch.images, images)
        assert not batch.weights[:, 1].any()


@every_kind
@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"alpha": -1.0}, {"probability": 1.5}, {"probability": -0.1}])
def test_impossible_values_are_refused(kind, changes):
    with pytest.raises(UsageError, match=kind.__name__):
        kind(**changes)


def test_manifold_mixup_draws_every_place_equally_often():
    levels = [int(ManifoldMixup()(some_images(), LABELS, STAGE, seeded(seed)).mixing.level) for seed in range(300)]
    assert stats.chisquare(np.bincount(levels, minlength=3)).pvalue > 0.01
    with pytest.raises(UsageError, match="num_places"):
        ManifoldMixup(num_places=4)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_maps_are_mixed_before_one_level_only(level):
    torch.manual_seed(0)
    backbone = BACKBONES["small"](3).double().eval()
    images, partners, share = some_images(6), torch.tensor([3, 0, 1, 5, 4, 2]), 0.7
    maps = images
    for index, module in enumerate(backbone.levels):
        if index == level:
            maps = torch.tensor(reference.mixup(maps.detach().numpy(), partners.numpy(), share))
        maps = module(maps)
    chosen = MapMixing(torch.tensor(level), partners, torch.tensor(share, dtype=torch.float64))
    torch.testing.assert_close(backbone(images, chosen).embedding, maps.mean(dim=(2, 3)))
    kept = chosen._replace(share=torch.ones_like(chosen.share))
    assert torch.equal(backbone(images, kept).embedding, backbone(images).embedding)


def test_manifold_mixup_at_the_input_is_mixup():
    torch.manual_seed(0)
    backbone, images = BACKBONES["small"](3).double().eval(), some_images()
    at_input = ManifoldMixup(alpha=1.0, num_places=1)(images, LABELS, STAGE, seeded())
    by_images = Mixup()(images, LABELS, STAGE, seeded())
    assert torch.equal(at_input.weights, by_images.weights)
    inside = backbone(at_input.images, at_input.mixing).embedding
    torch.testing.assert_close(inside, backbone(by_images.images).embedding)


def test_the_previous_network_sees_the_same_mixing():
    """At the start of a stage both networks agree, so that mixing alone must not cost anything."""
    method = with_image_augmentation(tiny("podnet", epochs=1), ManifoldMixup())
    learner = begun(method, STAGES[1])
    learner.network.eval()
    for seed in range(4):
        losses = step_losses(learner, learner.training_rows()[:16], method.phases(STAGES[1])[0], seeded(seed)).read()
        assert losses["pod-flat"].item() == pytest.approx(0, abs=1e-5)
        assert losses["pod-spatial"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"in_first_stage": False}, {(1, "main"), (1, "balanced")}), ({"phases": ("balanced",)}, {(1, "balanced")})],
)
def test_it_acts_only_where_it_may(changes, expected, monkeypatch):
    calls = set()

    class Counting(Mixup):
        def __call__(self, images, labels, stage, generator):
            calls.add((stage.index, phases[-1]))
            return super().__call__(images, labels, stage, generator)

    def noted(learner, rows, phase, generator, images):
        phases.append(phase.name)
        return step_losses(learner, rows, phase, generator, images)

    phases = []
    monkeypatch.setattr("ccfa.learning.loop.step_losses", noted)
    learned(with_image_augmentation(tiny("podnet", epochs=1), Counting(**changes)), 2)
    assert calls == expected


@pytest.mark.parametrize("num_new", [1, 2, 5, 50])
def test_pairs_of_classes_are_counted_through(num_new):
    stage = Stage(1, 7, 7 + num_new)
    expected = reference.pair_labels(list(range(7, 7 + num_new)), 7 + num_new)
    assert ClassMixing().num_classes(stage) == len(expected)
    assert sorted(expected.values()) == list(range(7 + num_new, 7 + num_new + len(expected)))
    for pair, label in expected.items():
        first, second = map(torch.tensor, sorted(pair))
        assert pair_label(first, second, stage) == pair_label(second, first, stage) == label


@pytest.mark.parametrize("seed", range(3))
def test_class_mixing_mixes_different_classes(seed):
    images, labels = some_images(), LABELS
    mixed = ClassMixing()(images, labels, STAGE, seeded(seed))
    assert len(mixed.images) == 50
    assert torch.equal(mixed.images[:10], images)
    assert torch.equal(mixed.labels[:10, 0], labels)
    assert mixed.weights[:10].min() == 1
    expected = reference.pair_labels([3, 4, 5, 6, 7], 8)
    shares = []
    for i, j in enumerate(random_partners(10, seeded(seed)).tolist()):  # the first round's
        image, label, weight = mixed.images[10 + i], mixed.labels[10 + i].item(), mixed.weights[10 + i].item()
        if labels[i] == labels[j]:
            assert (label, weight) == (labels[i].item(), 0.0)
        else:
            assert (label, weight) == (expected[frozenset((labels[i].item(), labels[j].item()))], 1.0)
            share = ((image - images[j]) / (images[i] - images[j])).numpy()
            assert np.ptp(share) < 1e-6
            shares.append(share.mean())
    assert 0.4 - 1e-6 <= min(shares) < max(shares) <= 0.6 + 1e-6


def test_shares_far_from_one_half_become_one_half():
    images, partners = some_images(), random_partners(10, seeded())
    mixed = ClassMixing(rounds=1, alpha=1.0, span=(0.4999, 0.5001))(images, LABELS, STAGE, seeded())
    torch.testing.assert_close(mixed.images[10:], (images + images[partners]) / 2, atol=1e-3, rtol=0)


def test_one_new_class_makes_no_mixtures():
    mixed = ClassMixing()(some_images(), torch.full((10,), 3), Stage(1, 3, 4), seeded())
    assert mixed.labels.unique().tolist() == [3]
    assert mixed.weights.sum() == 10


def test_rotations_as_numpy_turns():
    images, rotations = some_images(width=8), Rotations()
    turned = rotations(images, LABELS, STAGE, seeded())
    assert rotations.num_classes(STAGE) == 24
    for turns in range(4):
        part = slice(10 * turns, 10 * turns + 10)
        np.testing.assert_array_equal(turned.images[part], np.rot90(images.numpy(), turns, (2, 3)))
        own = LABELS.tolist() if turns == 0 else [8 + 3 * (c - 3) + turns - 1 for c in LABELS.tolist()]
        assert turned.labels[part, 0].tolist() == own
    assert turned.weights.min() == 1
    with pytest.raises(UsageError, match=r"\(8, 10\)"):
        rotations(some_images(), LABELS, STAGE, seeded())


@pytest.mark.parametrize("changes", [{"rounds": -1}, {"alpha": 0}])
def test_impossible_class_mixing_is_refused(changes):
    with pytest.raises(UsageError, match="rounds"):
        ClassMixing(**changes)


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


@pytest.mark.parametrize("target", [*TARGETS, "balanced-3"])
@pytest.mark.parametrize("kept", [0, 1])
def test_labels_of_weight_zero_are_no_own_classes(target, kept):
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


def test_copies_of_mixed_images_have_one_label():
    samples, head, old_head = mixed_samples()
    extended = CCFA(count=3, steps=2)(samples, head, old_head, cross_entropy, seeded())
    assert len(extended.features) == 5 + 3 * 5
    assert torch.equal(extended.weights[:5], samples.weights)
    assert extended.weights[5:].tolist() == [[1, 0]] * 15
    assert extended.labels[5:].max() < 4
    two_old = LinearHead(7)
    two_old.grow(2, seeded(1))  # the first and the last row carry every old class
    extended = CCFA(count=3, steps=2)(samples, head, two_old, cross_entropy, seeded())
    assert extended.weights[5:, 0].view(3, 5).tolist() == [[0, 1, 1, 1, 0]] * 3
