"""Streamed images: the same as a tensor behind `images[rows]`, checked when they are read."""

import pickle
import threading
import zlib

import numpy as np
import pytest
import torch

from ccfa.data import ImageSet, Streamed
from ccfa.data import streamed as module
from ccfa.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
LABELS = np.arange(40) % 4


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "pixels"
    path.write_bytes(PIXELS.tobytes())
    return Streamed(path, (3, 4, 4), np.array([zlib.crc32(image) for image in PIXELS]))


@pytest.mark.parametrize("chosen", [torch.tensor([5, 0, 5, 39]), torch.tensor([], dtype=torch.int64), slice(2, 9), 3])
def test_rows_are_a_tensors(images, chosen):
    assert torch.equal(images[chosen], torch.from_numpy(PIXELS)[chosen])


def test_parts_are_a_tensors(images):
    assert (images.shape, len(images), images.dtype) == (PIXELS.shape, 40, torch.uint8)
    for found, expected in zip(images.split(7), torch.from_numpy(PIXELS).split(7), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(images.resident("cpu"), torch.from_numpy(PIXELS))
    assert torch.equal(pickle.loads(pickle.dumps(images))[:], images[:])


def test_batches_come_in_order_while_others_are_read(images, monkeypatch):
    monkeypatch.setattr(module, "BATCHES_AHEAD", 3)
    read, all_begun = [], threading.Semaphore(0)
    original = images._read

    def noted(rows):
        read.append(rows.tolist())
        all_begun.release()
        return original(rows)

    monkeypatch.setattr(images, "_read", noted)
    order = torch.randperm(40).view(10, 4)
    batches = images.ahead(order)
    first = next(batches)
    for _ in range(3):
        assert all_begun.acquire(timeout=60), "three batches are read before a second one is asked for"
    assert torch.equal(first, torch.from_numpy(PIXELS)[order[0]])
    for found, rows in zip(batches, order[1:], strict=True):
        assert torch.equal(found, torch.from_numpy(PIXELS)[rows])
    assert sorted(read) == sorted(order.tolist())


def test_a_reader_that_is_left_alone_stops(images):
    before = threading.active_count()
    batches = images.ahead(torch.arange(40).view(20, 2))
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_damage_is_noticed(images):
    content = bytearray(images.path.read_bytes())
    content[48 * 7 + 3] ^= 1
    images.path.write_bytes(content)
    assert torch.equal(images[:7], torch.from_numpy(PIXELS)[:7])
    assert images.damaged(0, 40) == [7]
    for read in (lambda: images[7], lambda: list(images.split(5)), lambda: images.resident("cpu")):
        with pytest.raises(DataError, match="image 7"):
            read()
    images.path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="image 39"):
        _ = images[39]
    images.path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        _ = images[0]


def test_image_sets_of_streamed_images(images):
    streamed, resident = (ImageSet(one, LABELS, list("abcdxyz")) for one in (images, PIXELS))
    assert (len(streamed), streamed.shape, repr(streamed)) == (40, (3, 4, 4), repr(resident))
    moved = streamed.reorder([6, 0, 1, 2, 3, 4, 5])
    assert moved.fingerprint == streamed.fingerprint
    for part, expected in zip(streamed.hold_out(0.2, seed=1), resident.hold_out(0.2, seed=1), strict=True):
        assert isinstance(part.images, Streamed)
        assert torch.equal(part.images[:], expected.images)
        assert part.fingerprint != streamed.fingerprint
    rows = torch.tensor([3, 1])
    assert torch.equal(streamed.subset(rows).subset([1]).images[:], torch.from_numpy(PIXELS)[[1]])


def test_a_step_takes_images_of_streamed_sets_only(images):
    order = torch.arange(12).view(3, 4)
    streamed, resident = (ImageSet(one, LABELS, list("abcd")) for one in (images, PIXELS))
    for rows, taken, (known, pixels) in zip(order, resident.batches(order), streamed.batches(order), strict=True):
        assert len(taken) == 1
        assert torch.equal(taken[0], rows)
        assert torch.equal(known, rows)
        assert torch.equal(pixels, torch.from_numpy(PIXELS)[rows])
