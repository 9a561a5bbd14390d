"""Prepared folders: the pixels of every photo, also after a kill; damage and other data are noticed."""

import errno
import itertools
import json
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from ccfa.data import Framing, Preparation, decode_files, decode_image, decoding, find_photos, read_prepared
from ccfa.data import prepared as module
from ccfa.errors import DataError, LockedError, Notice, ResourceError
from ccfa.files import locked
from children import started, wait
from commands import contents
from imagenet_folder import SIZE, write_photos


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A preparation in shards of four images."""
    monkeypatch.setattr(module, "SHARD", 4)
    listed = write_photos(tmp_path / "photos")
    return Preparation(find_photos(f"imagenet:{listed}", tmp_path / "photos"), tmp_path / "out", SIZE)


def test_prepared_images_are_the_decoded_photos(work):
    told = []
    work.run(lambda *numbers: told.append(numbers))
    assert (told[-1], len(told)) == ((80, 80), 20)
    for part, images, num in zip(("train", "test"), read_prepared(work.out), (6, 2), strict=True):
        assert images.class_names == work.source.class_names
        assert images.labels.tolist() == [label for label in range(10) for _ in range(num)]
        files = work.source.files[part]
        assert (work.out / f"{part}.txt").read_text().splitlines() == files
        for pixels, file in zip(images.images[:], files, strict=True):
            np.testing.assert_array_equal(pixels, decode_image(work.source.root / file, Framing(SIZE)))
    before = contents(work.out)
    work.run()
    assert contents(work.out) == before


@pytest.mark.parametrize("verb", ["prepare", "decode"])
def test_as_many_threads_as_cores_decode(work, verb, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # of the machine; not what counts
    meeting, numbers = threading.Barrier(3), itertools.count()
    owner = module if verb == "prepare" else decoding
    decode = owner.decode_image

    def decode_together(path, framing):
        if next(numbers) < 3:
            meeting.wait(60)
        return decode(path, framing)

    monkeypatch.setattr(owner, "decode_image", decode_together)
    if verb == "prepare":
        work.run()
    else:
        decode_files([work.source.root / file for file in work.source.files["train"]], Framing(SIZE))
    assert next(numbers) > 3


def test_size_is_told_first(work):
    assert all(text in work.describe() for text in ("60 train images and 20 test images", "10 classes", "0.0 GB"))
    assert work.num_bytes == 80 * 3 * SIZE**2
    assert 0 < work.seconds() < 600
    assert not work.out.exists()


def test_a_killed_preparation_continues(work, tmp_path, monkeypatch):
    """Killed after some shards, it decodes the others only, and ends with the same bytes."""
    whole = Preparation(work.source, tmp_path / "whole", SIZE)
    whole.run()
    original = Preparation._decoded

    def slowly(self, part, row):
        time.sleep(0.02)
        return original(self, part, row)

    monkeypatch.setattr(Preparation, "_decoded", slowly)
    process = started(work.run)
    limit = time.monotonic() + 60
    while len(work.done()) < 3 and time.monotonic() < limit:
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    assert wait(process) == -signal.SIGKILL
    with open(work.out / "progress.jsonl", "ab") as log:
        log.write(b'[["train", 8')  # a line that was being written
    num_done = len(work.done())
    assert 3 <= num_done < 20
    with pytest.raises(DataError, match="not finished"):
        read_prepared(work.out)
    decoded = []
    monkeypatch.setattr(
        Preparation, "_decoded", lambda self, part, row: decoded.append(row) or original(self, part, row)
    )
    work.run()
    assert len(decoded) == 80 - 4 * num_done
    assert contents(work.out) == contents(whole.out)


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_a_stopped_preparation_leaves_no_thread(work, verb):
    """Ctrl-C between two shards: nothing is written any more, and what was done stands."""
    if verb == "verify":
        work.run()
    before = threading.active_count()

    def stop(done, total):
        if done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(work, verb)(stop)
    assert threading.active_count() == before
    assert len(work.done()) == (2 if verb == "run" else 0)
    work.run()
    assert work.verify() == 0


def test_damage_is_repaired(work):
    work.run()
    before = contents(work.out)
    path = work.out / "train.pixels"
    content = bytearray(path.read_bytes())
    content[5 * 3 * SIZE**2 + 7] ^= 255
    path.write_bytes(content)
    train, _ = read_prepared(work.out)
    with pytest.raises(DataError, match="image 5"):
        _ = train.images[torch.tensor([4, 5])]
    assert work.verify() == 1
    assert contents(work.out) == before
    assert work.verify() == 0
    path.write_bytes(content)
    photo = work.source.root / work.source.files["train"][5]
    photo.write_bytes((work.source.root / work.source.files["train"][50]).read_bytes())
    with pytest.raises(DataError, match="not the photo"):
        work.verify()


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("train.pixels", lambda content: content[:-1], "expected 184,320"),
        ("test.pixels", None, "has 0 bytes"),
        ("index.safetensors", lambda content: content[:-1], "damaged"),
        ("index.safetensors", lambda content: content[:-9] + b"x" + content[-8:], "digest"),
        ("index.safetensors", None, "not a prepared"),
    ],
)
def test_damaged_folders_are_refused(work, name, change, named):
    work.run()
    path = work.out / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(DataError, match=named):
        read_prepared(work.out)


def test_unreadable_photos_are_named_or_left_out(work):
    bad = work.source.root / work.source.files["train"][9]
    photo = bad.read_bytes()
    bad.write_bytes(photo[:100])
    with pytest.raises(DataError, match=bad.name):
        work.run()
    skipping = Preparation(work.source, work.out.with_name("fewer"), SIZE, skip_bad=True)
    skipping.run()
    train, _ = read_prepared(skipping.out)
    assert len(train) == 59
    assert torch.bincount(train.labels).tolist() == [6, 5, *[6] * 8]
    assert skipping.verify() == 0
    bad.write_bytes(photo)
    work.run()
    assert len(read_prepared(work.out)[0]) == 60


def spoil(work, part, row):
    path = work.source.root / work.source.files[part][row]
    photo = path.read_bytes()
    path.write_bytes(photo[:100])
    return path, photo


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_unreadable_last_photo_can_be_left_out(work, part):
    spoil(work, part, -1)
    skipping = replace(work, skip_bad=True)
    skipping.run()
    before = {"train": 60, "test": 20}
    assert {name: len(images) for name, images in zip(before, read_prepared(work.out), strict=True)} == {
        **before,
        part: before[part] - 1,
    }
    assert skipping.verify() == 0


def test_an_unreadable_photo_does_not_stop_the_estimate(work):
    spoil(work, "train", 0)
    assert 0 < work.seconds() < 600


def test_a_replaced_photo_is_read_after_a_stop(work):
    """Stopped with skip_bad after all shards: the photo that could not be read is read when it is there."""
    bad, photo = spoil(work, "train", 9)

    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(work, skip_bad=True).run(stop)
    assert len(work.done()) == 19
    with open(work.out / "progress.jsonl", "a") as log:  # as an earlier version wrote it
        log.write(json.dumps([["train", 8, 12], [1, "is damaged", 1, 1]]) + "\n")
    assert len(work.done()) == 19
    bad.write_bytes(photo)
    work.run()
    assert len(read_prepared(work.out)[0]) == 60
    assert work.verify() == 0


def test_a_torn_line_loses_one_shard(work):
    def stop(done, total):
        if done >= 8:
            raise KeyboardInterrupt

    for num in (2, 3):  # the second time, with what was added after the torn line
        with pytest.raises(KeyboardInterrupt):
            work.run(stop if num == 2 else lambda done, total: stop(done - 4, total))
        assert len(work.done()) == num
        with open(work.out / "progress.jsonl", "ab") as log:
            log.write(b'[["train", 8')
    other = replace(work, image_size=SIZE + 1)
    with pytest.raises(DataError, match="image_size"):  # not taken for an empty folder
        other.run()
    work.run()
    assert work.verify() == 0


def test_other_data_are_refused(work, tmp_path):
    work.run()
    with pytest.raises(DataError, match="image_size"):
        Preparation(work.source, work.out, SIZE + 1).run()
    (work.out / "index.safetensors").unlink()
    (work.out / "progress.jsonl").write_text(json.dumps({**work.identity, "name": "other"}) + "\n")
    with pytest.raises(DataError, match="another name"):
        work.run()


def test_what_cannot_be_written_is_refused(work, monkeypatch):
    monkeypatch.setattr(Preparation, "free", 1000)
    with pytest.raises(ResourceError, match="GB are free"):
        work.run()
    assert not work.out.exists()
    monkeypatch.undo()
    work.out.mkdir()
    with locked(work.out), pytest.raises(LockedError, match=str(work.out)):
        work.run()
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 5)
    with pytest.raises(ResourceError, match="full"):
        work.run()


def test_a_file_system_without_locks_is_noted_and_used(work, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(Notice, match="no locks"):
        work.run()
    assert work.verify() == 0
