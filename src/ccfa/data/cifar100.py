"""CIFAR-100 from the official binary edition; every image is checked."""

import hashlib
import http.client
import io
import os
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from ccfa.data.images import ImageSet
from ccfa.data.registry import register_data
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, Notice
from ccfa.files import make_folder, read_regular, write_atomically

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
TRAIN, TEST, NAMES = "train.bin", "test.bin", "fine_label_names.txt"
DIGESTS = {  # of the records in any order, and of the names
    TRAIN: "7077d87fc363f92dbf1245f13ba80561d7b33a96c79ad57168d49dc172aaa92b",
    TEST: "96adb3db8da7632dbb350559a17b9f585fab5b17675de5fc8f6761384196b294",
    NAMES: "fbe8ad23bbaf24969898a386833b49c3aaf6ad1119d43f7b41cdea1b3416d578",
}


def find_cifar100(data_dir: Path | None = None) -> Path | None:
    """Return the folder or archive that would be read from `data_dir` or $CCFA_DATA, or None."""
    root = _root(data_dir)
    if root is None or all(os.path.isfile(root / name) for name in DIGESTS):
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
        if root is None or not download:
            raise DataError(f"CIFAR-100 was not found. {_advice(root)}")
        found = _download(root)
    try:
        contents = _contents(found)
        names = contents[NAMES].decode("utf-8", "replace").split()
        if hashlib.sha256("\n".join(names).encode()).hexdigest() != DIGESTS[NAMES]:
            raise DataError(f"is altered: {NAMES} does not hold the class names of CIFAR-100")
        train, test = (_image_set(contents.pop(name), name, names) for name in (TRAIN, TEST))
    except DataError as error:
        raise DataError(f"{found} {error}. Delete it. {_advice(root)}") from error
    return train, test


def _root(data_dir: Path | None) -> Path | None:
    chosen = data_dir or os.environ.get("CCFA_DATA")
    return Path(os.path.expanduser(chosen)) if chosen else None


def _advice(root: Path | None) -> str:
    if not root:
        return f"Give --data-dir DIR, or set CCFA_DATA=DIR. If it is not in DIR, {URL} is downloaded to it."
    return f"Get {URL} (the Python edition is not read) and put it, as it is or unpacked, into {root}."


def _download(root: Path) -> Path:
    """Download the archive; the file appears only once it is complete and checked."""
    warnings.warn(Notice(f"Downloading {URL} ({ARCHIVE_BYTES // 10**6} MB) to {root}"), stacklevel=3)
    try:
        with urlopen(URL, timeout=60) as response:
            content = response.read(ARCHIVE_BYTES + 1)  # one more, so that a longer answer is noticed
        _require_official(content)
    except (OSError, http.client.HTTPException, DataError) as error:
        raise DataError(f"The download of CIFAR-100 failed: {error}. {_advice(root)}") from error
    make_folder(root)
    write_atomically(root / ARCHIVE_NAME, content)
    return root / ARCHIVE_NAME


def _contents(found: Path) -> dict[str, bytes]:
    """The files that are needed, by name; an archive is not unpacked on disk."""
    contents = {}
    if found.name == ARCHIVE_NAME:
        archive = read_regular(found, ARCHIVE_BYTES)
        _require_official(archive)
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            for name in DIGESTS:
                file = members.extractfile(f"{FOLDER_NAME}/{name}")
                contents[name] = file.read() if file else b""
        return contents
    for name in DIGESTS:
        try:
            contents[name] = read_regular(found / name, ARCHIVE_BYTES)
        except DataError as error:
            raise DataError(f"cannot be used: {name} {error}") from error
    return contents


def _require_official(archive: bytes) -> None:
    found = hashlib.sha256(archive).hexdigest()
    if found != ARCHIVE_SHA256:
        raise DataError(
            f"is truncated or altered: expected {ARCHIVE_BYTES} bytes with SHA-256 {ARCHIVE_SHA256}, "
            f"found {len(archive)} with {found}"
        )


def _image_set(content: bytes, name: str, class_names: list[str]) -> ImageSet:
    digests = [hashlib.sha256(content[start : start + RECORD]).digest() for start in range(0, len(content), RECORD)]
    if hashlib.sha256(b"".join(sorted(digests))).hexdigest() != DIGESTS[name]:  # sorted: records may be in any order
        raise DataError(f"is truncated or altered: {name} does not hold the records of CIFAR-100")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    return ImageSet(records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64), class_names)
