"""Labelled images as one uint8 tensor; parts of it are chosen by row number."""

from __future__ import annotations

import hashlib
import threading
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccfa.data.streamed import Streamed
from ccfa.errors import DataError, Notice, UsageError

Array = Tensor | NDArray[Any]
_UNREADABLE = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, line separators; joiners (Cf) are parts of words
_COPYING = threading.Lock()  # runs of a sweep are threads: one copies, the others wait for its copy


class _Shared:
    """What sets of the same images have in common."""

    def __init__(self, images: Tensor) -> None:
        self.copies = WeakValueDictionary({images.device: images})  # one per device, while a set uses it
        self.fingerprint = ""


class ImageSet:
    """Images with a label each, and the names of the classes. A set never changes.

    The arrays that it is made of are not copied, so do not write into them afterwards.

    Sets made by `reorder` and `to` share the images: there is one tensor per device, however many sets use it.
    The images of a very large set are not a tensor but `Streamed`: `images[rows]` reads them from a file.

    Args:
        images: uint8 [N, C, H, W], with 1 or 3 channels. A NumPy array, a tensor, or `Streamed`.
        labels: The class number of each image, [N], from 0 to the number of classes - 1.
        class_names: The name of each class.
        files: The name of each image's file, for reports; empty if they are not known.

    Raises:
        DataError: If the arguments do not fit each other.

    Example:
        >>> import numpy as np
        >>> from ccfa import ImageSet
        >>> photos = ImageSet(np.zeros((4, 3, 8, 8), np.uint8), [0, 1, 1, 0], ["ant", "bee"])
        >>> photos
        ImageSet(4 images 3x8x8, 2 classes, cpu)
        >>> photos.rows(1, 2)
        tensor([1, 2])
        >>> photos.reorder([1, 0]).class_names
        ('bee', 'ant')
    """

    def __init__(
        self,
        images: Array | Streamed,
        labels: Array | Sequence[int],
        class_names: Iterable[str],
        files: Sequence[str] = (),
    ) -> None:
        # Called a tensor, so that code for the usual sets needs no cast; `Streamed` has what training uses of one.
        self.images = cast(Tensor, images) if isinstance(images, Streamed) else _tensor(images)
        given = _tensor(labels)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] not in (1, 3):
            hint = ""
            if self.images.dtype.is_floating_point:
                hint = " Scale to 0..255, round and convert to uint8."
            elif self.images.shape[3:] in ((1,), (3,)):
                hint = " These look channels-last: transpose with (0, 3, 1, 2)."
            raise DataError(
                "Expected images as uint8 [number, channels, height, width] with values from 0 to 255 and "
                f"1 or 3 channels, got {_described(self.images)}.{hint}"
            )
        if 0 in self.images.shape:
            raise DataError(f"Expected at least one image and one pixel, got {_described(self.images)}.")
        if given.shape != self.images.shape[:1] or given.dtype == torch.bool or given.is_floating_point():
            hint = " One-hot rows become labels with argmax(1)." if given.ndim == 2 else ""
            raise DataError(
                f"Expected {len(self.images)} whole numbers as labels, one per image, got {_described(given)}.{hint}"
            )
        self.labels = given.to(self.images.device, torch.int64)
        self.class_names = _checked_names(class_names)
        low, high = (int(value) for value in torch.aminmax(self.labels))
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"Labels go from {low} to {high}, expected 0 to {self.num_classes - 1} "
                f"for the {self.num_classes} class names given."
            )
        self.files = tuple(files)
        if self.files and len(self.files) != len(self.images):
            raise DataError(f"Expected {len(self.images)} file names, one per image, got {len(self.files)}.")
        self._shared = _Shared(self.images)
        if isinstance(images, Streamed):
            _ = self.fingerprint  # by the stored checks: a copy on a device must not have one by its pixels

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageSet, (self.images, self.labels, self.class_names, self.files)  # weak references cannot be stored

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"ImageSet({len(self)} images {shape}, {self.num_classes} classes, {self.device})"

    @property
    def num_classes(self) -> int:
        """How many classes have a name, with or without images in this set."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all images in their order, with the names of their classes. It ignores the order of classes."""
        if not self._shared.fingerprint:
            names, ranks = np.unique(self.class_names, return_inverse=True)
            digest = hashlib.sha256(repr((tuple(self.images.shape), names.tolist())).encode())
            digest.update(ranks[self.labels.cpu().numpy()].data)
            if isinstance(self.images, Streamed):
                digest.update(self.images.checks[self.images.rows].data)
            else:
                digest.update(self.images.cpu().contiguous().numpy().data)
            self._shared.fingerprint = digest.hexdigest()
        return self._shared.fingerprint

    def to(self, device: torch.device | str, resident: bool = False) -> ImageSet:
        """Return the set on a device; with `resident`, streamed images are read into the memory of a GPU."""
        device, copies = torch.device(device), self._shared.copies
        with _COPYING:
            images = copies.get(device)
            if images is None and resident and isinstance(self.images, Streamed):
                images = copies[device] = self.images.resident(device)
            elif images is None:
                images = copies[device] = self.images.to(device)
        return self._with(images, self.labels.to(device), self.class_names)

    def rows(self, first: int, last: int) -> Tensor:
        """Return the rows whose label is in [first, last), ascending."""
        return torch.nonzero((self.labels >= first) & (self.labels < last)).flatten()

    def subset(self, rows: Array | Sequence[int]) -> ImageSet:
        """Return the images of some rows, in the order given, with the same class names."""
        chosen = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        files = [self.files[row] for row in chosen.tolist()] if self.files else ()
        if isinstance(self.images, Streamed):
            return ImageSet(self.images.picked(chosen.cpu().numpy()), self.labels[chosen], self.class_names, files)
        return ImageSet(self.images[chosen], self.labels[chosen], self.class_names, files)

    def batches(self, order: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield what a training step takes of each batch of rows: the rows and, if they are streamed, their images.

        Images in the device's memory are read by the step itself.
        """
        if not isinstance(self.images, Streamed):
            yield from zip(order, strict=True)
            return
        yield from zip(order, self.images.ahead(order.cpu()), strict=True)

    def reorder(self, order: Sequence[int]) -> ImageSet:
        """Return the set with new labels: the class now labelled order[k] becomes class k."""
        num, counts = self.num_classes, Counter(order)
        faults = {
            "not a label": sorted(label for label in counts if not 0 <= label < num),
            "repeated": sorted(label for label in counts if counts[label] > 1),
            "missing": [label for label in range(num) if label not in counts],
        }
        if found := [f"{fault}: {some([*map(str, labels)])}" for fault, labels in faults.items() if labels]:
            raise UsageError(f"A class order must hold each of 0 to {num - 1} once; got {'; '.join(found)}.")
        new_label = torch.argsort(torch.tensor(list(order))).to(self.device)
        return self._with(self.images, new_label[self.labels], [self.class_names[label] for label in order])

    def _with(self, images: Tensor, labels: Tensor, class_names: Iterable[str]) -> ImageSet:
        """A set of the same images, which need not be checked again."""
        same = ImageSet.__new__(ImageSet)
        same.images, same.labels, same.class_names = images, labels, tuple(class_names)
        same._shared, same.files = self._shared, self.files
        return same

    def hold_out(self, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
        """Return two sets (rest, held): about `fraction` of each class is held, chosen at random by `seed`.

        The image of a class that has only one is in both sets, with a warning.
        """
        if not 0 < fraction < 1:
            raise UsageError(f"The fraction to hold out must be above 0 and below 1, got {fraction}.")
        # The legacy generator: NumPy promises its stream, so a split stays the same in later versions.
        random = np.random.RandomState(seed)
        labels = self.labels.cpu().numpy()
        held, single = np.zeros(len(labels), dtype=bool), np.zeros(len(labels), dtype=bool)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            if len(rows) == 1:
                single[rows] = True
                continue
            num_held = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
            held[random.permutation(rows)[:num_held]] = True
        if single.any():
            names = some([repr(self.class_names[label]) for label in labels[single]])
            warnings.warn(
                Notice(f"Held out and learned as well, as the only image of its class: {names}."), stacklevel=2
            )
        return self.subset(np.flatnonzero(~held)), self.subset(np.flatnonzero(held | single))


def require_images(train: ImageSet, first: int, last: int, least: int, method: str) -> None:
    """Check that each class from `first` to before `last` has as many images as the method needs, or one."""
    least, sizes = max(1, least), train.labels.bincount(minlength=last)[first:last]
    if (smallest := int(sizes.min())) < least:
        raise DataError(
            f"{method} needs at least {least} image{'s' * (least > 1)} of each class, and class "
            f"{train.class_names[first + int(sizes.argmin())]!r} has {smallest} to learn from. Add images or leave the "
            f"class out."
        )


def require_same_classes(train: ImageSet, test: ImageSet) -> None:
    """Check that both sets name the same classes and that each class has images in both."""
    if train.class_names != test.class_names:
        only_train, only_test = (
            some([repr(name) for name in sorted(set(a.class_names) - set(b.class_names))]) or "none"
            for a, b in ((train, test), (test, train))
        )
        raise DataError(
            "Train and test must have the same class names in the same order; "
            f"only in train: {only_train}, only in test: {only_test}."
        )
    for part, images in (("train", train), ("test", test)):
        counts = torch.bincount(images.labels, minlength=images.num_classes).tolist()
        if missing := [repr(name) for name, count in zip(images.class_names, counts, strict=True) if count == 0]:
            raise DataError(f"No {part} images of {some(missing)}. Add images or leave the class out of both parts.")


def some(items: Sequence[str], separator: str = ", ") -> str:
    """The first ten items, and how many more there are."""
    more = [f"and {len(items) - 10} more"] if len(items) > 10 else []
    return separator.join([*items[:10], *more])


def _tensor(values: Array | Sequence[int]) -> Tensor:
    if isinstance(values, np.ndarray):  # a copy where torch cannot share the memory: read-only, strided, byte order
        values = np.require(values, values.dtype.newbyteorder("="), ["C", "W"])
    return torch.as_tensor(values)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _checked_names(class_names: Iterable[str]) -> tuple[str, ...]:
    names = tuple(class_names)
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if isinstance(class_names, str) or wrong or not names:
        raise DataError(f"Expected class names as a list of non-empty strings, got {class_names!r}.")
    if unreadable := [name for name in names if any(unicodedata.category(letter) in _UNREADABLE for letter in name)]:
        raise DataError(f"Class names must not hold control characters or bytes that are not UTF-8: {unreadable[0]!a}.")
    if repeated := sorted(repr(name) for name, count in Counter(names).items() if count > 1):
        raise DataError(f"Expected every class name once, got these repeated: {some(repeated)}.")
    return names
