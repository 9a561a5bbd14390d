"""CIFAR-100 from the official files, binary or Python version, checked down to the last pixel."""

import hashlib
import http.client
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from ccfa.data.archives import fetch, read_members, require_digest, unpickle_arrays
from ccfa.data.images import ImageSet
from ccfa.errors import DataError

_LOG = logging.getLogger(__name__)
_URL = "https://www.cs.toronto.edu/~kriz/"
_AGAIN = "Delete it and put the official files there, or let them be downloaded again."
_PIXELS = 3 * 32 * 32
_RECORD = 2 + _PIXELS  # coarse label, fine label, then red, green and blue planes row by row
_FILES = {
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt"),
    "cifar-100-python": ("train", "test", "meta"),
}

Records = NDArray[np.uint8]  # [N, 3074]
ReadFile = Callable[[str], bytes]


@dataclass(frozen=True)
class Archive:
    """One of the official archives: its name, size and SHA-256."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """What train or test must contain; the digest does not depend on the order of the records."""

    num_records: int
    digest: str


@dataclass(frozen=True)
class Edition:
    """The numbers by which the data set is recognised."""

    train: Part
    test: Part
    num_classes: int
    names_digest: str
    archives: tuple[Archive, ...]


OFFICIAL = Edition(
    train=Part(50_000, "7077d87fc363f92dbf1245f13ba80561d7b33a96c79ad57168d49dc172aaa92b"),
    test=Part(10_000, "96adb3db8da7632dbb350559a17b9f585fab5b17675de5fc8f6761384196b294"),
    num_classes=100,
    names_digest="fbe8ad23bbaf24969898a386833b49c3aaf6ad1119d43f7b41cdea1b3416d578",
    archives=(
        Archive(
            "cifar-100-binary.tar.gz",
            168_513_733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
        Archive(
            "cifar-100-python.tar.gz",
            169_001_437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
)


def records_digest(records: Records) -> str:
    """SHA-256 over the sorted SHA-256 digests of all records."""
    digests = sorted(hashlib.sha256(record.tobytes()).digest() for record in records)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def names_digest(names: tuple[str, ...]) -> str:
    """SHA-256 over the class names, one a line."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def find_cifar100(data_dir: Path | None = None) -> Path | None:
    """The folder or archive that would be read from `data_dir` or $CCFA_DATA; None where there is none."""
    root = _root(data_dir)
    if root is None:
        return None
    candidates = [root / name for name in _FILES] + [root / archive.name for archive in OFFICIAL.archives]
    if any(all((root / name).is_file() for name in names) for names in _FILES.values()):
        return root
    return next((path for path in candidates if path.exists()), None)


def load_cifar100(
    data_dir: Path | None = None, *, download: bool = True, edition: Edition = OFFICIAL
) -> tuple[ImageSet, ImageSet]:
    """Train and test sets with fine labels, found in `data_dir` or $CCFA_DATA, or else downloaded there."""
    found = find_cifar100(data_dir)
    if found is None:
        if not download:
            raise DataError(f"CIFAR-100 was not found. {_where_to_put(_root(data_dir))}")
        found = download_cifar100(data_dir, edition=edition)
    train, test, names = _read(found, edition)
    if len(names) != edition.num_classes or names_digest(names) != edition.names_digest:
        raise DataError(f"The class names in {found} are altered. {_AGAIN}")
    return _image_set(train, names), _image_set(test, names)


def download_cifar100(
    data_dir: Path | None = None, *, edition: Edition = OFFICIAL, opener: Callable[..., Any] = urlopen
) -> Path:
    """Fetch the binary archive into `data_dir` or $CCFA_DATA and check it; the path it now has."""
    root = _root(data_dir)
    if root is None:
        raise DataError(f"CIFAR-100 was not found and no folder to download it to is known. {_where_to_put(None)}")
    archive = edition.archives[0]
    _LOG.warning("Downloading %s (%d MB) from %s to %s", archive.name, archive.num_bytes // 10**6, _URL, root)
    try:
        fetch(_URL + archive.name, root / archive.name, archive.num_bytes, archive.sha256, opener=opener)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"CIFAR-100 could not be downloaded: {error}. {_where_to_put(root)}") from error
    return root / archive.name


def _root(data_dir: Path | None) -> Path | None:
    chosen = data_dir or os.environ.get("CCFA_DATA")
    return Path(chosen).expanduser() if chosen else None


def _where_to_put(root: Path | None) -> str:
    folder = f"into {root}" if root else "into a folder DIR and give --data-dir DIR, or set CCFA_DATA=DIR"
    names = " or ".join(archive.name for archive in OFFICIAL.archives)
    return f"Put {names} from {_URL} (as it is or unpacked) {folder}."


def _read(found: Path, edition: Edition) -> tuple[Records, Records, tuple[str, ...]]:
    archive = next((archive for archive in edition.archives if archive.name == found.name), None)
    if archive:
        require_digest(found, archive.num_bytes, archive.sha256)
        folder = archive.name.removesuffix(".tar.gz")
        names = [f"{folder}/{name}" for name in _FILES[folder]]
        num_records = edition.train.num_records + edition.test.num_records
        members = read_members(found, names, max_bytes=2 * num_records * _RECORD + 10**6)

        def read(name: str) -> bytes:
            return members.pop(f"{folder}/{name}")

        binary = folder == "cifar-100-binary"
    else:

        def read(name: str) -> bytes:
            return _read_file(found / name)

        binary = found.name == "cifar-100-binary" or (found / "train.bin").exists()
    records = _binary_records if binary else _python_records
    names_of = _binary_names if binary else _python_names
    suffix = ".bin" if binary else ""
    train = _checked(records(read, f"train{suffix}", edition.train), f"{found}: train", edition.train)
    test = _checked(records(read, f"test{suffix}", edition.test), f"{found}: test", edition.test)
    return train, test, names_of(read)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"CIFAR-100 file {path} cannot be read: {error.strerror}. {_AGAIN}") from error


def _binary_records(read: ReadFile, name: str, part: Part) -> Records:
    content = read(name)
    expected = part.num_records * _RECORD
    if len(content) != expected:
        raise DataError(f"{name} is truncated or altered: expected {expected} bytes, found {len(content)}. {_AGAIN}")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD)


def _binary_names(read: ReadFile) -> tuple[str, ...]:
    return tuple(read("fine_label_names.txt").decode("utf-8", "replace").split())


def _python_records(read: ReadFile, name: str, part: Part) -> Records:
    loaded = unpickle_arrays(read(name), name)
    try:
        pixels, coarse, fine = (np.asarray(loaded[key]) for key in ("data", "coarse_labels", "fine_labels"))
        labels = np.stack([coarse, fine], axis=1)
    except (KeyError, ValueError) as error:
        raise DataError(f"{name} lacks pixels or labels of equal length ({error}). {_AGAIN}") from error
    if pixels.dtype != np.uint8 or pixels.shape != (part.num_records, _PIXELS) or len(labels) != len(pixels):
        raise DataError(
            f"{name} is truncated or altered: expected uint8 pixels {[part.num_records, _PIXELS]} with "
            f"as many labels, found {pixels.dtype} {list(pixels.shape)} and {len(labels)} labels. {_AGAIN}"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 255:
        raise DataError(f"{name} is altered: expected labels from 0 to 99. {_AGAIN}")
    return np.concatenate([labels.astype(np.uint8), pixels], axis=1)


def _python_names(read: ReadFile) -> tuple[str, ...]:
    names = unpickle_arrays(read("meta"), "meta").get("fine_label_names", ())
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names)


def _checked(records: Records, what: str, part: Part) -> Records:
    found = records_digest(records)
    if found != part.digest:
        raise DataError(f"{what} is altered: expected digest {part.digest}, found {found}. {_AGAIN}")
    return records


def _image_set(records: Records, names: tuple[str, ...]) -> ImageSet:
    pixels = records[:, 2:].reshape(-1, 3, 32, 32)
    return ImageSet(pixels, records[:, 1].astype(np.int64), names)
