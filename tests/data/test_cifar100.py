"""CIFAR-100: folder and archive give the same images, and damage anywhere is reported."""

import io
import os
import tarfile
from hashlib import sha256

import numpy as np
import pytest
import torch

from ccfa.data import cifar100
from ccfa.data.cifar100 import find_cifar100, load_cifar100
from ccfa.errors import DataError, Notice


def make_records(num, seed):
    records = np.random.RandomState(seed).randint(0, 256, (num, 3074)).astype(np.uint8)
    records[:, 0], records[:, 1] = 7, np.arange(num) % 3
    return records


TRAIN, TEST = make_records(6, seed=1), make_records(4, seed=2)
FILES = {"train.bin": TRAIN.tobytes(), "test.bin": TEST.tobytes(), "fine_label_names.txt": b"apple\nbear\ncan\n\n"}
ARCHIVE = "cifar-100-binary.tar.gz"


@pytest.fixture(autouse=True)
def archive(monkeypatch):
    """A data set of ten records in the place of the official one, as an archive."""
    digests = {"fine_label_names.txt": sha256(b"apple\nbear\ncan").hexdigest()}
    for name, records in (("train.bin", TRAIN), ("test.bin", TEST)):
        each = sorted(sha256(bytes(record.tolist())).digest() for record in records)
        digests[name] = sha256(b"".join(each)).hexdigest()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(cifar100, "DIGESTS", digests)
    monkeypatch.setattr(cifar100, "ARCHIVE_BYTES", max(len(packed.getvalue()), len(FILES["train.bin"])))
    monkeypatch.setattr(cifar100, "ARCHIVE_SHA256", sha256(packed.getvalue()).hexdigest())
    monkeypatch.delenv("CCFA_DATA", raising=False)
    return packed.getvalue()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def load(root):
    return load_cifar100(root, download=False)


def assert_tiny(train, test):
    for images, records in ((train, TRAIN), (test, TEST)):
        assert images.class_names == ("apple", "bear", "can")
        assert images.labels.tolist() == records[:, 1].tolist()
        for image, record in zip(images.images, records, strict=True):
            planes = [bytes(image[channel].flatten().tolist()) for channel in range(3)]
            assert b"".join(planes) == record.tobytes()[2:]


def test_folder_is_read(folder, monkeypatch):
    assert find_cifar100(folder.parent) == find_cifar100(folder) == folder
    assert_tiny(*load(folder.parent))
    assert_tiny(*load(folder))
    monkeypatch.setenv("CCFA_DATA", str(folder.parent))
    assert_tiny(*load(None))
    (folder / "train.bin").write_bytes(TRAIN[::-1].tobytes())
    assert load(None)[0].labels.tolist() == TRAIN[::-1, 1].tolist(), "records may be in any order"


def test_archive_is_read_in_place(archive, tmp_path):
    (tmp_path / ARCHIVE).write_bytes(archive)
    assert find_cifar100(tmp_path) == tmp_path / ARCHIVE
    assert_tiny(*load(tmp_path))
    assert os.listdir(tmp_path) == [ARCHIVE]


def flipped(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.bin", FILES["train.bin"][:-1]),
        ("train.bin", flipped(FILES["train.bin"], 1)),
        ("test.bin", flipped(FILES["test.bin"], 5000)),
        ("fine_label_names.txt", b"bear\napple\ncan\n"),
        ("test.bin", None),
    ],
)
def test_damaged_folders_are_refused(name, content, folder):
    (folder / name).unlink()
    os.mkfifo(folder / name) if content is None else (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load(folder.parent)


def test_altered_archives_are_not_opened(archive, tmp_path, monkeypatch):
    (tmp_path / ARCHIVE).write_bytes(flipped(archive, 99))
    monkeypatch.setattr(tarfile, "open", None)
    with pytest.raises(DataError, match="SHA-256"):
        load(tmp_path)


@pytest.mark.parametrize("root", ["~nobody-of-this-name", "x" * 300, None])
def test_missing_data_names_the_source(root):
    assert find_cifar100(root) is None
    with pytest.raises(DataError, match=r"kriz/cifar-100-binary\.tar\.gz"):
        load(root)


def test_download_is_checked_first(archive, tmp_path, monkeypatch):
    for reply in (archive + b"x" * 20_000, archive[:50], flipped(archive, 9), archive):
        monkeypatch.setattr(cifar100, "urlopen", lambda url, timeout, reply=reply: io.BytesIO(reply))
        if reply is not archive:
            with pytest.raises(DataError, match="SHA-256"):
                load_cifar100(tmp_path / "new")
            assert os.listdir(tmp_path) == []
    with pytest.warns(Notice, match=cifar100.URL):
        assert_tiny(*load_cifar100(tmp_path / "new"))
    assert os.listdir(tmp_path / "new") == [ARCHIVE]


def test_no_network_is_a_data_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "URL", "http://127.0.0.1:1/cifar")
    with pytest.raises(DataError, match=rf"127\.0\.0\.1.*{tmp_path}"):
        load_cifar100(tmp_path)


def test_official_data(request):
    request.getfixturevalue("monkeypatch").undo()
    if find_cifar100() is None:
        pytest.skip(f"CIFAR-100 is not in CCFA_DATA ({os.environ.get('CCFA_DATA', 'not set')})")
    train, test = load(None)
    assert torch.bincount(train.labels).tolist() == [500] * 100
    assert torch.bincount(test.labels).tolist() == [100] * 100
    assert train.class_names[:2] == ("apple", "aquarium_fish")
    mean = [train.images[:, channel].double().mean().item() / 255 for channel in range(3)]
    np.testing.assert_allclose(mean, [0.5071, 0.4865, 0.4409], atol=1e-4)
