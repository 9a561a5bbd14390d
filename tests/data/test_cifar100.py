"""CIFAR-100: every official form gives the same images, and damage anywhere is reported."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ccfa.data.cifar100 import (
    OFFICIAL,
    Archive,
    Edition,
    Part,
    download_cifar100,
    find_cifar100,
    load_cifar100,
    names_digest,
)
from ccfa.errors import DataError

NAMES = ("apple", "bear", "can")


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its strings."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        content = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[str] = save_string
    dispatch[bytes] = save_string


def python2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def make_records(num, seed):
    records = np.random.RandomState(seed).randint(0, 256, (num, 3074)).astype(np.uint8)
    records[:, 0], records[:, 1] = 7, np.arange(num) % 3
    return records


def make_part(records):
    digests = sorted(hashlib.sha256(bytes(record.tolist())).digest() for record in records)
    return Part(len(records), hashlib.sha256(b"".join(digests)).hexdigest())


TRAIN, TEST = make_records(6, seed=1), make_records(4, seed=2)
TINY = Edition(make_part(TRAIN), make_part(TEST), 3, hashlib.sha256(b"apple\nbear\ncan").hexdigest(), ())
BINARY = {
    "train.bin": TRAIN.tobytes(),
    "test.bin": TEST.tobytes(),
    "fine_label_names.txt": b"apple\nbear\ncan\n\n",
}


def as_python(records):
    labels = {"coarse_labels": records[:, 0].tolist(), "fine_labels": records[:, 1].tolist()}
    return python2_pickle({"data": records[:, 2:].copy(), "filenames": ["a.png"] * len(records)} | labels)


PYTHON = {
    "train": as_python(TRAIN),
    "test": as_python(TEST),
    "meta": python2_pickle({"fine_label_names": list(NAMES)}),
}
FORMS = {"cifar-100-binary": BINARY, "cifar-100-python": PYTHON}


def write_folder(root, form, **changes):
    folder = root / form
    folder.mkdir(parents=True)
    for name, content in (FORMS[form] | changes).items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(root, form, extra=()):
    path = root / f"{form}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in FORMS[form].items():
            member = tarfile.TarInfo(f"{form}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member, content in extra:
            archive.addfile(member, io.BytesIO(content))
    content = path.read_bytes()
    return replace(TINY, archives=(Archive(path.name, len(content), hashlib.sha256(content).hexdigest()),))


def load(root, edition=TINY):
    return load_cifar100(root, download=False, edition=edition)


def assert_tiny(train, test):
    for images, records in ((train, TRAIN), (test, TEST)):
        assert images.class_names == NAMES
        assert images.labels.tolist() == records[:, 1].tolist()
        for image, record in zip(images.images, records, strict=True):
            planes = [bytes(image[channel].flatten().tolist()) for channel in range(3)]
            assert b"".join(planes) == record.tobytes()[2:]


@pytest.mark.parametrize("form", FORMS)
def test_folders(form, tmp_path, monkeypatch):
    folder = write_folder(tmp_path, form)
    assert find_cifar100(tmp_path) == folder
    assert find_cifar100(folder) == folder
    assert_tiny(*load(tmp_path))
    assert_tiny(*load(folder))
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))
    assert_tiny(*load(None))


@pytest.mark.parametrize("form", FORMS)
def test_archives_are_read_and_nothing_is_unpacked(form, tmp_path):
    edition = write_archive(tmp_path, form)
    assert find_cifar100(tmp_path) == tmp_path / f"{form}.tar.gz"
    assert_tiny(*load(tmp_path, edition))
    assert [path.name for path in tmp_path.iterdir()] == [f"{form}.tar.gz"]


def test_records_in_another_order_are_the_same_data(tmp_path):
    write_folder(tmp_path, "cifar-100-binary", **{"train.bin": TRAIN[::-1].tobytes()})
    assert load(tmp_path)[0].labels.tolist() == TRAIN[::-1, 1].tolist()


def flipped(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("form", "name", "content", "match"),
    [
        ("cifar-100-binary", "train.bin", BINARY["train.bin"][:-1], "expected 18444 bytes, found 18443"),
        ("cifar-100-binary", "test.bin", b"", "expected 12296 bytes, found 0"),
        (
            "cifar-100-binary",
            "test.bin",
            flipped(BINARY["test.bin"], 5000),
            "test is altered: expected digest",
        ),
        ("cifar-100-binary", "train.bin", flipped(BINARY["train.bin"], 1), "train is altered"),
        ("cifar-100-binary", "fine_label_names.txt", b"bear\napple\ncan\n", "class names .* altered"),
        ("cifar-100-python", "train", PYTHON["train"][:-100], "train cannot be read"),
        ("cifar-100-python", "train", as_python(TRAIN[:5]), r"expected uint8 pixels \[6, 3072\]"),
        ("cifar-100-python", "test", as_python(TEST ^ 1), "test is altered"),
        ("cifar-100-python", "test", python2_pickle({"data": TEST}), "lacks pixels or labels"),
        ("cifar-100-python", "test", python2_pickle([1]), "holds list, expected a dictionary"),
        ("cifar-100-python", "meta", python2_pickle({}), "class names .* altered"),
    ],
)
def test_damaged_folders_are_refused(form, name, content, match, tmp_path):
    write_folder(tmp_path, form, **{name: content})
    with pytest.raises(DataError, match=match):
        load(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_missing_file_is_named(form, tmp_path):
    folder = write_folder(tmp_path, form)
    missing = next(iter(FORMS[form]))
    (folder / missing).unlink()
    with pytest.raises(DataError, match=rf"{missing} cannot be read: No such file"):
        load(tmp_path)


class Canary:
    """Would make a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_run_code_are_refused(protocol, tmp_path):
    canary = tmp_path / "canary"
    write_folder(tmp_path, "cifar-100-python", train=pickle.dumps({"data": Canary(canary)}, protocol))
    with pytest.raises(DataError, match="refused: it asks for"):
        load(tmp_path)
    assert not canary.exists()


def test_only_latin1_is_encoded_by_a_pickle(tmp_path):
    bomb = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R."
    write_folder(tmp_path, "cifar-100-python", train=bomb)
    with pytest.raises(DataError, match="refused: text encoded as 'zlib'"):
        load(tmp_path)


def test_altered_archives_are_refused_before_they_are_opened(tmp_path):
    edition = write_archive(tmp_path, "cifar-100-binary")
    path = tmp_path / "cifar-100-binary.tar.gz"
    content = path.read_bytes()
    path.write_bytes(flipped(content, len(content) // 2))
    with pytest.raises(DataError, match=rf"{path.name} is altered: expected SHA-256 {edition.archives[0].sha256}"):
        load(tmp_path, edition)
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"expected {len(content)} bytes, found {len(content) - 1}"):
        load(tmp_path, edition)


def hostile(name, kind, size=0):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "/etc/passwd"
    return [(member, b"\0" * size)]


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (hostile("cifar-100-binary/train.bin", tarfile.SYMTYPE), "not one regular file"),
        (hostile("cifar-100-binary/train.bin", tarfile.REGTYPE, 9), "not one regular file"),
        (hostile("bomb", tarfile.REGTYPE, 2_000_000), "is refused: expected at most"),
        ([pair for k in range(101) for pair in hostile(f"{k}", tarfile.REGTYPE)], "at most 100 members"),
    ],
)
def test_hostile_archives_are_refused(extra, match, tmp_path):
    edition = write_archive(tmp_path, "cifar-100-binary", extra)
    with pytest.raises(DataError, match=match):
        load(tmp_path, edition)


def test_members_outside_the_folder_are_never_written(tmp_path):
    extra = hostile("../escaped", tarfile.REGTYPE, 5) + hostile("/etc/escaped", tarfile.SYMTYPE)
    edition = write_archive(tmp_path / ".", "cifar-100-binary", extra)
    assert_tiny(*load(tmp_path, edition))
    assert not (tmp_path.parent / "escaped").exists()


def test_archive_that_is_not_one(tmp_path):
    path = tmp_path / "cifar-100-python.tar.gz"
    path.write_bytes(b"not gzip")
    edition = replace(TINY, archives=(Archive(path.name, 8, hashlib.sha256(b"not gzip").hexdigest()),))
    with pytest.raises(DataError, match=r"cannot be read as a tar.gz"):
        load(tmp_path, edition)


def test_nothing_found_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.delenv("CCFA_DATA", raising=False)
    assert find_cifar100(tmp_path) is None
    assert find_cifar100() is None
    with pytest.raises(DataError, match=rf"Put cifar-100-binary.tar.gz or .* into {tmp_path}"):
        load(tmp_path)
    with pytest.raises(DataError, match="--data-dir DIR"):
        load_cifar100()


def test_download_is_checked_and_appears_whole(tmp_path):
    edition = write_archive(tmp_path, "cifar-100-binary")
    content = (tmp_path / "cifar-100-binary.tar.gz").read_bytes()
    asked = []

    def answer(reply):
        def opener(url, timeout):
            asked.append(url)
            return io.BytesIO(reply)

        return opener

    target = tmp_path / "new" / "data"
    for reply, match in (
        (content + b"x", "found"),
        (content[:50], "found 50"),
        (flipped(content, 9), "altered"),
    ):
        with pytest.raises(DataError, match=match):
            download_cifar100(target, edition=edition, opener=answer(reply))
        assert list(target.iterdir()) == []
    path = download_cifar100(target, edition=edition, opener=answer(content))
    assert asked[-1] == "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
    assert list(target.iterdir()) == [path]
    assert_tiny(*load(target, edition))


def test_no_network_says_what_to_put_where(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("socket.socket.connect", offline)
    monkeypatch.setattr("socket.getaddrinfo", offline)
    with pytest.raises(DataError, match=rf"no route to host.*Put cifar-100-binary.tar.gz .* into {tmp_path}"):
        load_cifar100(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_official_data():
    if find_cifar100() is None:
        pytest.skip(f"CIFAR-100 is not in CCFA_DATA ({os.environ.get('CCFA_DATA', 'not set')})")
    train, test = load_cifar100(download=False)
    assert torch.bincount(train.labels).tolist() == [500] * 100
    assert torch.bincount(test.labels).tolist() == [100] * 100
    assert train.class_names[:2] == ("apple", "aquarium_fish")
    assert names_digest(train.class_names) == OFFICIAL.names_digest
    mean = [train.images[:, channel].double().mean().item() / 255 for channel in range(3)]
    np.testing.assert_allclose(mean, [0.5071, 0.4865, 0.4409], atol=1e-4)
