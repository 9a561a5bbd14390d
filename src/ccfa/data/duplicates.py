"""Images that occur twice: under two classes, or both in training and in the test set."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ccfa.data.images import ImageSet
from ccfa.errors import Notice

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


def conflicts(images: Pixels, labels: Labels) -> list[tuple[int, int]]:
    """Pairs of rows with the same pixels and different labels, each with the first row of these pixels."""
    first: dict[bytes, int] = {}
    rows = ((first.setdefault(digest, row), row) for row, digest in enumerate(_digests(images)))
    return [(earlier, row) for earlier, row in rows if labels[earlier] != labels[row]]


def num_shared(train: ImageSet, test: ImageSet) -> int:
    """How many test images have the pixels of some training image."""
    known = set(_digests(train.images.numpy()))
    return sum(digest in known for digest in _digests(test.images.numpy()))


def tell_conflicts(images: Pixels, labels: Labels, paths: Sequence[Path], num_shown: int = 5) -> None:
    """A notice that names images found in two classes; published data sets have some, so it is no error."""
    pairs = conflicts(images, labels)
    if pairs:
        lines = [f"  {str(paths[first])!r} = {str(paths[second])!r}" for first, second in pairs[:num_shown]]
        more = [f"  and {len(pairs) - num_shown} more"] if len(pairs) > num_shown else []
        said = f"{len(pairs)} images are the same in two classes, where one label must be wrong:"
        warnings.warn("\n".join([said, *lines, *more]), Notice, stacklevel=3)


def tell_shared(train: ImageSet, test: ImageSet) -> None:
    """A notice that says how many test images are in the training part too."""
    if count := num_shared(train, test):
        said = f"{count} of the {len(test)} test images are training images too: accuracies will look better than"
        warnings.warn(f"{said} they are. Remove the copies.", Notice, stacklevel=3)


def _digests(images: Pixels) -> Iterable[bytes]:
    return (hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() for image in images)
