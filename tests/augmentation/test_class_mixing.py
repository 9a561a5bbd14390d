"""IL2A's mixed classes and PASS's rotations: images, labels of auxiliary outputs, weights."""

import numpy as np
import pytest
import torch

import reference_mixing as reference
from ccfa.augmentation.class_mixing import ClassMixing, Rotations, pair_label
from ccfa.augmentation.mixing import random_partners
from ccfa.data import Stage
from ccfa.errors import UsageError

STAGE = Stage(1, 3, 8)
LABELS = torch.tensor([3, 4, 5, 6, 7, 3, 4, 7, 7, 5])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images() -> torch.Tensor:
    return torch.randn(10, 3, 4, 4, generator=seeded(5), dtype=torch.float64)


@pytest.mark.parametrize("num_new", [1, 2, 5, 50])
def test_pairs_are_counted_through(num_new):
    stage = Stage(1, 7, 7 + num_new)
    expected = reference.pair_labels(list(range(7, 7 + num_new)), 7 + num_new)
    assert ClassMixing().num_classes(stage) == len(expected)
    assert sorted(expected.values()) == list(range(7 + num_new, 7 + num_new + len(expected)))
    for first in range(7, 7 + num_new):
        for second in range(7, 7 + num_new):
            if first != second:
                label = pair_label(torch.tensor(first), torch.tensor(second), stage).item()
                assert label == expected[frozenset((first, second))]


@pytest.mark.parametrize("seed", range(3))
def test_mixtures_are_those_of_two_images_of_different_classes(seed):
    images, labels = some_images(), LABELS
    mixed = ClassMixing()(images, labels, STAGE, seeded(seed))
    assert mixed.images.shape == (50, 3, 4, 4)
    assert torch.equal(mixed.images[:10], images)
    assert torch.equal(mixed.labels[:10, 0], labels)
    assert mixed.weights[:10].min() == 1
    expected = reference.pair_labels([3, 4, 5, 6, 7], 8)
    partners = random_partners(10, seeded(seed))  # the first round's
    shares = []
    for i, j in enumerate(partners.tolist()):
        image, label, weight = mixed.images[10 + i], mixed.labels[10 + i].item(), mixed.weights[10 + i].item()
        if labels[i] == labels[j]:
            assert (label, weight) == (labels[i].item(), 0.0)
        else:
            assert (label, weight) == (expected[frozenset((labels[i].item(), labels[j].item()))], 1.0)
            share = ((image - images[j]) / (images[i] - images[j])).numpy()
            assert np.ptp(share) < 1e-6
            shares.append(share.mean())
    assert min(shares) >= 0.4 - 1e-6
    assert max(shares) <= 0.6 + 1e-6
    assert len(np.unique(np.round(shares, 6))) > 1, "each pair has a share of its own"


def test_shares_far_from_one_half_become_one_half():
    images = some_images()
    mixed = ClassMixing(rounds=1, alpha=1.0, span=(0.4999, 0.5001))(images, LABELS, STAGE, seeded())
    partners = random_partners(10, seeded())
    torch.testing.assert_close(mixed.images[10:], (images + images[partners]) / 2, atol=1e-3, rtol=0)


def test_one_new_class_makes_no_mixtures_that_count():
    stage = Stage(1, 3, 4)
    mixed = ClassMixing()(some_images(), torch.full((10,), 3), stage, seeded())
    assert ClassMixing().num_classes(stage) == 0
    assert mixed.labels.unique().tolist() == [3]
    assert mixed.weights.sum() == 10


def test_rotations_as_numpy_turns():
    images = some_images()
    rotations = Rotations()
    turned = rotations(images, LABELS, STAGE, seeded())
    assert rotations.num_classes(STAGE) == 24
    for turns in range(4):
        part = slice(10 * turns, 10 * turns + 10)
        np.testing.assert_array_equal(turned.images[part], np.rot90(images.numpy(), turns, (2, 3)))
        own = LABELS.tolist() if turns == 0 else [8 + 3 * (c - 3) + turns - 1 for c in LABELS.tolist()]
        assert turned.labels[part, 0].tolist() == own
    assert turned.labels.max() < 8 + 15  # the other outputs are those of old classes
    assert len(turned.labels.unique()) == 4 * len(LABELS.unique())
    assert turned.weights.min() == 1


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UsageError, match="rounds >= 0 and alpha > 0"):
        ClassMixing(rounds=-1)
    with pytest.raises(UsageError, match="rounds >= 0 and alpha > 0"):
        ClassMixing(alpha=0)
    with pytest.raises(UsageError, match=r"square images can be turned, got \(4, 6\)"):
        Rotations()(torch.zeros(1, 3, 4, 6), LABELS[:1], STAGE, seeded())
