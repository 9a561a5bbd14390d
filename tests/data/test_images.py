"""ImageSet: what it refuses, and its rows, orders and splits against plain NumPy."""

import copy
import hashlib
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ccfa.data.images import ImageSet, require_same_classes
from ccfa.errors import DataError, Notice, UsageError

NAMES = ("ant", "bee", "cat")
GOOD = np.zeros((4, 3, 2, 2), np.uint8)
LABELS = np.array([0, 1, 2, 0])


def make(labels, names=NAMES):
    labels = np.asarray(labels, dtype=np.int64)
    images = np.arange(len(labels) * 12, dtype=np.uint8).reshape(-1, 3, 2, 2)
    return ImageSet(images, labels, names)


@pytest.mark.parametrize("labels", [np.array([0, 1], np.uint8), np.array([0, 1], ">i8"), torch.tensor([0, 1]), [0, 1]])
def test_arrays_of_any_layout_are_taken(labels):
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    pixels.flags.writeable = False
    images = ImageSet(pixels[::-1], labels, NAMES)
    np.testing.assert_array_equal(images.images.numpy(), pixels[::-1])
    assert (images.labels.tolist(), images.labels.dtype) == ([0, 1], torch.int64)
    assert (len(images), images.num_classes, images.shape) == (2, 3, (3, 2, 2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"images": GOOD.astype(np.float32)}, r"float32 \[4, 3, 2, 2\]"),
        ({"images": GOOD.transpose(0, 2, 3, 1)}, "channels-last"),
        ({"images": np.zeros((4, 4, 2, 2), np.uint8)}, r"1 or 3 channels.*\[4, 4, 2, 2\]"),
        ({"images": GOOD[:0]}, "at least one image"),
        ({"labels": LABELS[:3]}, r"4 whole numbers.*int64 \[3\]"),
        ({"labels": LABELS.astype(np.float64)}, "float64"),
        ({"labels": np.eye(4, 3, dtype=np.int64)}, r"int64 \[4, 3\].*argmax"),
        ({"labels": LABELS - 1}, "from -1 to 1"),
        ({"labels": LABELS + 1}, "from 1 to 3"),
        ({"class_names": "abc"}, "'abc'"),
        ({"class_names": ("a", "b", "a")}, "repeated: 'a'"),
        ({"class_names": ("a", "b", "\n")}, "control"),
    ],
)
def test_what_does_not_fit_is_refused(changes, named):
    with pytest.raises(DataError, match=named):
        ImageSet(**({"images": GOOD, "labels": LABELS, "class_names": NAMES} | changes))


def test_rows_and_subset_against_numpy():
    labels = np.random.RandomState(0).randint(0, 3, 50)
    images = make(labels)
    rows = images.rows(1, 3)
    np.testing.assert_array_equal(rows.numpy(), np.flatnonzero((labels >= 1) & (labels < 3)))
    part = images.subset(rows.flip(0))
    np.testing.assert_array_equal(part.images.numpy(), images.images.numpy()[rows.numpy()[::-1]])
    assert part.class_names == NAMES


def test_reorder_keeps_names_with_images():
    images = make([2, 0, 1, 2, 1])
    moved = images.reorder((2, 0, 1))
    assert moved.class_names == ("cat", "ant", "bee")
    assert moved.labels.tolist() == [0, 1, 2, 0, 2]
    for order, fault in [([0, 1, 1], "repeated: 1"), ([0, 1], "missing: 2"), ([0, 1, 2, 3], "not a label: 3")]:
        with pytest.raises(UsageError, match=fault):
            images.reorder(order)


def test_hold_out_splits_every_class():
    labels = np.repeat([0, 1, 2], [40, 10, 2])
    whole = ImageSet(np.arange(52, dtype=np.uint8).reshape(-1, 1, 1, 1), labels, NAMES)
    rest, held = whole.hold_out(0.2, seed=3)
    assert torch.bincount(held.labels).tolist() == [8, 2, 1]
    assert torch.bincount(rest.labels).tolist() == [32, 8, 1]
    assert sorted(rest.images.flatten().tolist() + held.images.flatten().tolist()) == list(range(52))
    assert torch.equal(held.images, whole.hold_out(0.2, seed=3)[1].images)
    assert not torch.equal(held.images, whole.hold_out(0.2, seed=4)[1].images)
    assert torch.bincount(whole.hold_out(0.99, seed=0)[0].labels).tolist() == [1, 1, 1]


def test_hold_out_of_a_single_image_keeps_it_in_both():
    with pytest.warns(Notice, match="class: 'bee'"):
        rest, held = make([0, 0, 1, 2, 2]).hold_out(0.5, seed=0)
    assert (rest.labels.tolist(), held.labels.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_hold_out_refuses_impossible_fractions():
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="fraction"):
            make([0, 0]).hold_out(fraction, seed=0)


def test_missing_classes_are_named():
    whole = make([0, 1, 2])
    require_same_classes(whole, make([2, 1, 0, 0]))
    for train, test, named in [
        (whole, make([0, 0]), "test images of 'bee', 'cat'"),
        (whole, make([0, 1, 2], ("ant", "bee", "dog")), "only in train: 'cat', only in test: 'dog'"),
        (whole, make([0, 1, 2], ("ant", "cat", "bee")), "same order"),
    ]:
        with pytest.raises(DataError, match=named):
            require_same_classes(train, test)


def test_fingerprints_ignore_only_class_order():
    images = np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4)
    labels = np.array([0, 1, 2, 0, 1, 2])
    found = ImageSet(images, labels, ["a", "b", "c"])
    assert found.fingerprint == ImageSet(images.copy(), labels, ["a", "b", "c"]).fingerprint
    assert found.fingerprint == ImageSet(images, (labels + 1) % 3, ["c", "a", "b"]).fingerprint
    changed = images.copy()
    changed[5, 2, 3, 3] ^= 1
    others = [
        ImageSet(changed, labels, ["a", "b", "c"]),
        ImageSet(images, labels[::-1], ["a", "b", "c"]),
        ImageSet(images, labels, ["a", "b", "d"]),
        ImageSet(images.reshape(6, 3, 2, 8), labels, ["a", "b", "c"]),
        found.subset([1, 0, 2, 3, 4, 5]),
    ]
    assert len({found.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_reordered_sets_share_images_and_digest(monkeypatch):
    images = make([0, 1, 2, 2])
    moved = images.reorder([1, 2, 0]).to("cpu").reorder([2, 1, 0])
    assert moved.images is images.images
    first = images.fingerprint
    monkeypatch.setattr(hashlib, "sha256", None)
    assert moved.fingerprint == first


def test_one_copy_per_device_while_used():
    images = make([0, 1, 2, 2])
    all_at_once = threading.Barrier(8)

    def copied(_):
        all_at_once.wait(timeout=60)
        return images.reorder([2, 0, 1]).to("meta")

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(copied, range(8)))
    assert len({id(one.images) for one in copies}) == 1
    assert (copies[0].class_names, copies[0].device.type) == (("cat", "ant", "bee"), "meta")
    gone = weakref.ref(copies[0].images)
    copies.clear()
    assert gone() is None


def test_sets_can_be_copied_and_stored():
    images = make([0, 1, 2, 2])
    for again in (copy.deepcopy(images), pickle.loads(pickle.dumps(images))):
        assert again.fingerprint == images.fingerprint
        assert again.images.data_ptr() != images.images.data_ptr()
