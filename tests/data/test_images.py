"""ImageSet: what it refuses, and its rows, orders and splits against plain NumPy."""

import copy
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ccfa.data.images import ImageSet, require_same_classes
from ccfa.errors import DataError, UsageError

NAMES = ("ant", "bee", "cat")


def make(labels, names=NAMES):
    labels = np.asarray(labels, dtype=np.int64)
    images = np.arange(len(labels) * 12, dtype=np.uint8).reshape(-1, 3, 2, 2)
    return ImageSet(images, labels, names)


def test_holds_what_it_was_given():
    images = make([2, 0, 1, 2])
    assert len(images) == 4
    assert images.num_classes == 3
    assert images.shape == (3, 2, 2)
    assert images.images.dtype == torch.uint8
    assert images.labels.dtype == torch.int64
    assert images.to("cpu").labels.tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, ">i8"])
def test_labels_of_any_integer_type(dtype):
    images = ImageSet(np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 2, 1], dtype=dtype), NAMES)
    assert images.labels.tolist() == [0, 2, 1]


def test_strided_and_read_only_arrays_are_copied():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    pixels.flags.writeable = False
    images = ImageSet(pixels[::-1], np.array([0, 1]), NAMES)
    np.testing.assert_array_equal(images.images.numpy(), pixels[::-1])


GOOD = np.zeros((4, 3, 2, 2), np.uint8)
LABELS = np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (GOOD.astype(np.float32), r"uint8 .*got float32 \[4, 3, 2, 2\]"),
        (np.full((4, 3, 2, 2), np.nan), "uint8 .*got float64"),
        (GOOD.astype(np.int16), "got int16"),
        (GOOD.astype(object), "dtype object"),
        (GOOD[0], r"got uint8 \[3, 2, 2\]"),
        (GOOD.transpose(0, 2, 3, 1), "channels-last"),
        (np.zeros((4, 4, 2, 2), np.uint8), r"1 or 3 channels, got uint8 \[4, 4, 2, 2\]"),
        (GOOD[:0], "at least one image"),
        (np.zeros((4, 3, 0, 2), np.uint8), "one pixel"),
        (GOOD.tolist(), "got list"),
    ],
)
def test_wrong_images_are_refused(images, match):
    with pytest.raises(DataError, match=match):
        ImageSet(images, LABELS, NAMES)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (LABELS[:3], "4 images but 3 labels"),
        (LABELS.astype(np.float64), "got float64"),
        (np.array([0, np.nan, 1, 2]), "got float64"),
        (LABELS.astype(bool), "dtype bool"),
        (torch.zeros(4, dtype=torch.bool), "got bool"),
        (np.array(["a", "b", "c", "d"]), "dtype <U1"),
        (np.eye(4, 3, dtype=np.int64), r"got int64 \[4, 3\].*argmax"),
        (np.array([0, -1, 2, 0]), "from -1 to 2, expected 0 to 2"),
        (np.array([0, 1, 3, 0]), "from 0 to 3, expected 0 to 2"),
        ([0, 1, 2, 0], "got list"),
    ],
)
def test_wrong_labels_are_refused(labels, match):
    with pytest.raises(DataError, match=match):
        ImageSet(GOOD, labels, NAMES)


@pytest.mark.parametrize("names", ["abc", (), ("a", "b", ""), ("a", "b", 3), ("a", "b", "a"), ("a", "b", "\n")])
def test_wrong_class_names_are_refused(names):
    with pytest.raises(DataError, match=r"(?i)class name"):
        ImageSet(GOOD, LABELS, names)


def test_rows_and_subset_against_numpy():
    labels = np.random.RandomState(0).randint(0, 3, 50)
    images = make(labels)
    rows = images.rows(1, 3)
    np.testing.assert_array_equal(rows.numpy(), np.flatnonzero((labels >= 1) & (labels < 3)))
    part = images.subset(rows.flip(0))
    np.testing.assert_array_equal(part.images.numpy(), images.images.numpy()[rows.numpy()[::-1]])
    assert part.class_names == NAMES
    assert images.rows(3, 9).tolist() == []


def test_reorder_keeps_every_image_with_its_name():
    images = make([2, 0, 1, 2, 1])
    order = (2, 0, 1)
    moved = images.reorder(order)
    assert moved.class_names == ("cat", "ant", "bee")
    assert moved.labels.tolist() == [order.index(label) for label in [2, 0, 1, 2, 1]]
    assert [moved.class_names[k] for k in moved.labels] == [NAMES[k] for k in images.labels]
    with pytest.raises(UsageError, match="each of 0 to 2 once"):
        images.reorder([0, 1, 1])


def test_hold_out_splits_every_class():
    labels = np.repeat([0, 1, 2], [40, 10, 2])
    pixels = np.arange(52, dtype=np.uint8).reshape(-1, 1, 1, 1)
    rest, held = ImageSet(pixels, labels, NAMES).hold_out(0.2, seed=3)
    assert torch.bincount(held.labels).tolist() == [8, 2, 1]
    assert torch.bincount(rest.labels).tolist() == [32, 8, 1]
    together = sorted(rest.images.flatten().tolist() + held.images.flatten().tolist())
    assert together == list(range(52))
    again = ImageSet(pixels, labels, NAMES).hold_out(0.2, seed=3)[1]
    other = ImageSet(pixels, labels, NAMES).hold_out(0.2, seed=4)[1]
    assert torch.equal(held.images, again.images)
    assert not torch.equal(held.images, other.images)


def test_hold_out_leaves_one_image_however_large_the_fraction():
    rest, held = make([0, 0, 0, 1, 1, 2, 2]).hold_out(0.99, seed=0)
    assert torch.bincount(rest.labels).tolist() == [1, 1, 1]
    assert torch.bincount(held.labels).tolist() == [2, 1, 1]


def test_hold_out_refuses_what_cannot_be_split():
    with pytest.raises(DataError, match="'bee' has 1 image"):
        make([0, 0, 1, 2, 2]).hold_out(0.5, seed=0)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="above 0 and below 1"):
            make([0, 0]).hold_out(fraction, seed=0)
    with pytest.raises(UsageError, match="seed"):
        make([0, 0]).hold_out(0.5, seed=-1)


def test_missing_classes_are_named():
    whole = make([0, 1, 2])
    require_same_classes(whole, make([2, 1, 0, 0]))
    with pytest.raises(DataError, match="No test images of 'bee', 'cat'"):
        require_same_classes(whole, make([0, 0]))
    with pytest.raises(DataError, match="No train images of 'ant'"):
        require_same_classes(make([1, 2]), whole)
    with pytest.raises(DataError, match="same class names"):
        require_same_classes(whole, make([0, 1, 2], ("ant", "cat", "bee")))


def test_fingerprints_ignore_only_class_order():
    images = np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4)
    labels = np.array([0, 1, 2, 0, 1, 2])
    found = ImageSet(images, labels, ["a", "b", "c"])
    assert found.fingerprint == ImageSet(images.copy(), labels, ["a", "b", "c"]).fingerprint
    assert found.fingerprint == found.reorder([2, 0, 1]).fingerprint
    changed = images.copy()
    changed[5, 2, 3, 3] ^= 1
    others = [
        ImageSet(changed, labels, ["a", "b", "c"]),
        ImageSet(images, labels[::-1].copy(), ["a", "b", "c"]),
        ImageSet(images, labels, ["a", "b", "d"]),
        ImageSet(images.reshape(6, 3, 2, 8), labels, ["a", "b", "c"]),
        found.subset([1, 0, 2, 3, 4, 5]),
        found.subset([0, 1, 2, 3, 4]),
    ]
    assert len({found.fingerprint, *(other.fingerprint for other in others)}) == 7


def test_reordered_sets_share_images_and_digest(monkeypatch):
    images = make([0, 1, 2, 2])
    digests = []
    digest = ImageSet._digest
    monkeypatch.setattr(ImageSet, "_digest", lambda self: digests.append(self) or digest(self))
    made = [images, images.reorder([2, 0, 1]), images.reorder([1, 2, 0]).to("cpu").reorder([2, 1, 0])]
    assert {one.images.data_ptr() for one in made} == {images.images.data_ptr()}
    assert len({one.fingerprint for one in made}) == 1
    assert len(digests) == 1
    assert images.subset([0, 1]).fingerprint != images.fingerprint


def test_one_copy_per_device_while_used():
    images = make([0, 1, 2, 2])
    copies = [images.to("meta"), images.reorder([2, 0, 1]).to("meta"), images.to("meta").reorder([1, 0, 2])]
    first, *others = (one.images for one in copies)
    assert all(other is first for other in others)
    assert (copies[1].class_names, copies[1].device.type) == (("cat", "ant", "bee"), "meta")
    gone = weakref.ref(first)
    del copies, first, others
    assert gone() is None
    assert images.to("meta").images is not None


def test_of_many_threads_one_copies():
    images = make([0, 1, 2, 2])
    all_at_once = threading.Barrier(8)

    def copied(_):
        all_at_once.wait(timeout=60)
        return images.reorder([2, 0, 1]).to("meta")

    with ThreadPoolExecutor(8) as pool:
        assert len({id(one.images) for one in list(pool.map(copied, range(8)))}) == 1


def test_a_set_can_be_copied_and_stored():
    images = make([0, 1, 2, 2])
    for again in (copy.deepcopy(images), pickle.loads(pickle.dumps(images))):
        assert again.fingerprint == images.fingerprint
        assert again.images.data_ptr() != images.images.data_ptr()
