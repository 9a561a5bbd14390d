"""CIFAR-100 from the official binary edition, checked down to the last pixel."""

import hashlib
import http.client
import io
import os
import tarfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from ccfa.data.images import ImageSet
from ccfa.data.registry import register_data
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, Notice
from ccfa.files import read_regular

# Each published code base has its own constants; UCIR's std is the mean of the stds within single images.
CIFAR100_PODNET = Transforms(
    (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), padding=4, flip=True, brightness=63 / 255
)
CIFAR100_UNJITTERED = replace(CIFAR100_PODNET, brightness=0.0)  # iCaRL's, BiC's and GDumb's in PODNet's code base
CIFAR100_UCIR = Transforms((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023), padding=4, flip=True)

FOLDER_NAME = "cifar-100-binary"
ARCHIVE_NAME = f"{FOLDER_NAME}.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE_NAME}"
ARCHIVE_BYTES = 168_513_733
ARCHIVE_SHA256 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, then red, green and blue planes row by row
TRAIN, TEST, NAMES = FILES = ("train.bin", "test.bin", "fine_label_names.txt")
NUM_BYTES = {TRAIN: 50_000 * RECORD, TEST: 10_000 * RECORD, NAMES: 10_000}  # of the names: at most
DIGESTS = {
    TRAIN: "7077d87fc363f92dbf1245f13ba80561d7b33a96c79ad57168d49dc172aaa92b",
    TEST: "96adb3db8da7632dbb350559a17b9f585fab5b17675de5fc8f6761384196b294",
    NAMES: "fbe8ad23bbaf24969898a386833b49c3aaf6ad1119d43f7b41cdea1b3416d578",
}


def find_cifar100(data_dir: Path | None = None) -> Path | None:
    """The folder or archive that would be read from `data_dir` or $CCFA_DATA; None where there is none."""
    root = _root(data_dir)
    if root is None or all(os.path.isfile(root / name) for name in FILES):
        return root
    return next((root / name for name in (FOLDER_NAME, ARCHIVE_NAME) if os.path.exists(root / name)), None)


@register_data("cifar100", scenario="B50-inc10", order="podnet-0", find=find_cifar100)
def load_cifar100(data_dir: Path | None = None, *, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """60,000 photos, 100 classes, 3 x 32 x 32; cifar-100-binary.tar.gz in the data folder, or downloaded to it

    The train and the test set have fine labels. The archive, packed or unpacked, is looked for in `data_dir` or
    $CCFA_DATA, and downloaded there if it is missing and `download` is true. Records may be in any order.
    """
    root, found = _root(data_dir), find_cifar100(data_dir)
    if found is None:
        if root and (python := _python_edition(root)):
            raise DataError(
                f"{python} is the Python edition of CIFAR-100, and only the binary one is read. {_get(root)}"
            )
        if root is None or not download:
            raise DataError(f"CIFAR-100 was not found. {_get(root)}")
        found = download_cifar100(root)
    try:
        packed = found.name == ARCHIVE_NAME
        contents = _unpacked(read_regular(found, ARCHIVE_BYTES)) if packed else _read_folder(found)
        names = tuple(contents[NAMES].decode("utf-8", "replace").split())
        if hashlib.sha256("\n".join(names).encode()).hexdigest() != DIGESTS[NAMES]:
            raise DataError(f"holds altered class names in {NAMES}")
        train, test = (_image_set(contents.pop(name), name, names) for name in (TRAIN, TEST))
    except DataError as error:
        raise DataError(f"{found} {error}. Delete it. {_get(root)}") from error
    return train, test


def download_cifar100(data_dir: Path | None = None) -> Path:
    """Download the archive into `data_dir` or $CCFA_DATA; it appears there only once complete and checked."""
    root = _root(data_dir)
    if root is None or str(root).startswith("~"):  # a user that does not exist
        raise DataError(f"No folder to download CIFAR-100 to is known. {_get(None)}")
    warnings.warn(Notice(f"Downloading {URL} ({ARCHIVE_BYTES // 10**6} MB) to {root}"), stacklevel=2)
    partial = root / f".{ARCHIVE_NAME}.{os.getpid()}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file, urlopen(URL, timeout=60) as response:
            content = response.read(ARCHIVE_BYTES + 1)  # one more, so that a longer answer is noticed
            _require_official(content)
            file.write(content)
        partial.replace(root / ARCHIVE_NAME)
    except (OSError, http.client.HTTPException, DataError) as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(f"The download of CIFAR-100 failed: {error}. {_get(root)}") from error
    return root / ARCHIVE_NAME


def records_digest(records: NDArray[np.uint8]) -> str:
    """SHA-256 over the sorted SHA-256 digests of all records: the order of the records does not matter."""
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(record.data).digest() for record in records))).hexdigest()


def _root(data_dir: Path | None) -> Path | None:
    chosen = data_dir or os.environ.get("CCFA_DATA")
    return Path(os.path.expanduser(chosen)) if chosen else None


def _get(root: Path | None) -> str:
    folder = f"into {root}" if root else "into a folder DIR and give --data-dir DIR, or set CCFA_DATA=DIR"
    return f"Get {URL} and put it (as it is or unpacked) {folder}."


def _python_edition(root: Path) -> Path | None:
    if all(os.path.isfile(root / name) for name in ("train", "test", "meta")):
        return root
    candidates = (root / "cifar-100-python", root / "cifar-100-python.tar.gz")
    return next((path for path in candidates if os.path.exists(path)), None)


def _read_folder(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in FILES:
        try:
            contents[name] = read_regular(folder / name, NUM_BYTES[name])
        except DataError as error:
            raise DataError(f"cannot be used: {name} {error}") from error
    return contents


def _unpacked(archive: bytes) -> dict[str, bytes]:
    """The contents of the three files that are needed; nothing is written to disk."""
    _require_official(archive)
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r|gz") as members:
        for member in members:
            name = member.name.removeprefix(f"{FOLDER_NAME}/")
            file = members.extractfile(member) if name in FILES and member.isreg() else None
            if file is not None:
                contents[name] = file.read(NUM_BYTES[name])
    if missing := sorted(set(FILES) - set(contents)):
        raise DataError(f"lacks {', '.join(missing)}")
    return contents


def _require_official(archive: bytes) -> None:
    found = hashlib.sha256(archive).hexdigest()
    if found != ARCHIVE_SHA256:
        raise DataError(
            f"is truncated or altered: expected {ARCHIVE_BYTES} bytes with SHA-256 {ARCHIVE_SHA256}, "
            f"found {len(archive)} with {found}"
        )


def _image_set(content: bytes, name: str, class_names: tuple[str, ...]) -> ImageSet:
    if len(content) != NUM_BYTES[name]:
        raise DataError(f"is truncated: expected {NUM_BYTES[name]} bytes in {name}, found {len(content)}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    if records_digest(records) != DIGESTS[name]:
        raise DataError(f"is altered: {name} does not hold the records of CIFAR-100")
    return ImageSet(records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64), class_names)
