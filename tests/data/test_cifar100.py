"""CIFAR-100: folder and archive give the same images, and damage anywhere is reported."""

import hashlib
import io
import os
import tarfile

import numpy as np
import pytest
import torch

from ccfa.data import cifar100
from ccfa.data.cifar100 import download_cifar100, find_cifar100, load_cifar100, records_digest
from ccfa.errors import DataError, Notice

NAMES = ("apple", "bear", "can")


def make_records(num, seed):
    records = np.random.RandomState(seed).randint(0, 256, (num, 3074)).astype(np.uint8)
    records[:, 0], records[:, 1] = 7, np.arange(num) % 3
    return records


TRAIN, TEST = make_records(6, seed=1), make_records(4, seed=2)
FILES = {"train.bin": TRAIN.tobytes(), "test.bin": TEST.tobytes(), "fine_label_names.txt": b"apple\nbear\ncan\n\n"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A data set of ten records in the place of the official one."""
    digests = {"fine_label_names.txt": hashlib.sha256(b"apple\nbear\ncan").hexdigest()}
    for name, records in (("train.bin", TRAIN), ("test.bin", TEST)):
        each = sorted(hashlib.sha256(bytes(record.tolist())).digest() for record in records)
        digests[name] = hashlib.sha256(b"".join(each)).hexdigest()
    monkeypatch.setattr(cifar100, "DIGESTS", digests)
    monkeypatch.setattr(cifar100, "NUM_BYTES", {name: len(content) for name, content in FILES.items()})
    monkeypatch.delenv("CCFA_DATA", raising=False)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def packed(monkeypatch, files=FILES, kind=tarfile.REGTYPE):
    """An archive that counts as the official one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in {"../escaped": b"x", **files}.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(cifar100, "ARCHIVE_BYTES", len(packed.getvalue()))
    monkeypatch.setattr(cifar100, "ARCHIVE_SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    return packed.getvalue()


def load(root):
    return load_cifar100(root, download=False)


def assert_tiny(train, test):
    for images, records in ((train, TRAIN), (test, TEST)):
        assert images.class_names == NAMES
        assert images.labels.tolist() == records[:, 1].tolist()
        for image, record in zip(images.images, records, strict=True):
            planes = [bytes(image[channel].flatten().tolist()) for channel in range(3)]
            assert b"".join(planes) == record.tobytes()[2:]


def test_a_folder_is_read(folder, monkeypatch):
    assert find_cifar100(folder.parent) == find_cifar100(folder) == folder
    assert_tiny(*load(folder.parent))
    assert_tiny(*load(folder))
    monkeypatch.setenv("CCFA_DATA", str(folder.parent))
    assert_tiny(*load(None))


def test_an_archive_is_read_without_unpacking(tmp_path, monkeypatch):
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(packed(monkeypatch))
    assert find_cifar100(tmp_path) == path
    assert_tiny(*load(tmp_path))
    assert list(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "escaped").exists()


def test_records_may_be_in_any_order(folder):
    (folder / "train.bin").write_bytes(TRAIN[::-1].tobytes())
    assert load(folder)[0].labels.tolist() == TRAIN[::-1, 1].tolist()
    assert records_digest(TRAIN) == records_digest(TRAIN[::-1])


def flipped(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.bin", FILES["train.bin"][:-1]),
        ("train.bin", FILES["train.bin"] + b"x"),
        ("train.bin", flipped(FILES["train.bin"], 1)),
        ("test.bin", b""),
        ("test.bin", flipped(FILES["test.bin"], 5000)),
        ("fine_label_names.txt", b"bear\napple\ncan\n"),
        ("test.bin", None),
    ],
)
def test_damaged_folders_are_refused(name, content, folder):
    (folder / name).write_bytes(content) if content is not None else (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        load(folder.parent)


@pytest.mark.parametrize("name", FILES)
def test_pipes_devices_folders_are_refused(name, folder):
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).rename(folder / "aside")
        make(folder / name)
        with pytest.raises(DataError, match=name):
            load(folder.parent)
        (folder / name).rename(folder / str(len(os.listdir(folder))))
        (folder / "aside").rename(folder / name)


@pytest.mark.parametrize("change", [lambda content: flipped(content, 99), lambda content: content[:-1]])
def test_altered_archives_are_not_opened(change, tmp_path, monkeypatch):
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(change(packed(monkeypatch)))
    monkeypatch.setattr(tarfile, "open", None)
    with pytest.raises(DataError, match="SHA-256"):
        load(tmp_path)


def test_archive_members_must_be_files(tmp_path, monkeypatch):
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(packed(monkeypatch, dict.fromkeys(FILES, b""), tarfile.SYMTYPE))
    with pytest.raises(DataError, match=r"train\.bin"):
        load(tmp_path)


@pytest.mark.parametrize("files", [["cifar-100-python.tar.gz"], ["cifar-100-python/train"], ["train", "test", "meta"]])
def test_the_python_edition_is_refused(files, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x80\x02N.")
    with pytest.raises(DataError, match=r"Python edition.*kriz/cifar-100-binary\.tar\.gz"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize("root", ["~nobody-of-this-name", "x" * 300, None])
def test_missing_data_says_what_to_do(root):
    assert find_cifar100(root) is None
    with pytest.raises(DataError, match=r"not found.*kriz/cifar-100-binary\.tar\.gz"):
        load(root)


def test_a_download_is_checked_first(tmp_path, monkeypatch):
    content = packed(monkeypatch)
    target = tmp_path / "new" / "data"
    asked = []

    def answer(reply):
        monkeypatch.setattr(cifar100, "urlopen", lambda url, timeout: asked.append(url) or io.BytesIO(reply))

    for reply in (content + b"x", content[:50], flipped(content, 9)):
        answer(reply)
        with pytest.raises(DataError, match="failed"):
            download_cifar100(target)
        assert list(target.iterdir()) == []
    answer(content)
    with pytest.warns(Notice, match="Downloading"):
        assert_tiny(*load_cifar100(target))
    assert [path.name for path in target.iterdir()] == ["cifar-100-binary.tar.gz"]
    assert set(asked) == {"https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"}


def test_no_network_is_a_data_error(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(cifar100, "urlopen", offline)
    with pytest.raises(DataError, match=rf"no route to host.*{tmp_path}"):
        load_cifar100(tmp_path)
    assert list(tmp_path.iterdir()) == []


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
