"""Labelled images as one uint8 tensor, with rows as the way to speak of some of them."""

from __future__ import annotations

import hashlib
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ccfa.errors import DataError, UsageError

Array = Tensor | NDArray[Any]
_UNREADABLE = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, separators of lines; joiners (Cf) are part of words
_COPYING = threading.Lock()  # runs of a sweep are threads: one copies, the others wait for its copy


class _Shared:
    """What sets of the same images have in common: their copies on devices, while in use, and their fingerprint."""

    def __init__(self, images: Tensor) -> None:
        self.copies = {images.device: TensorWeakRef(images)}
        self.fingerprint = ""


class ImageSet:
    """Images uint8 [N, C, H, W], labels int64 [N] and the name of every class; never changed once made.

    Sets made by `reorder` and `to` share the images: there is one tensor per device, however many sets use it.
    """

    def __init__(self, images: Array, labels: Array, class_names: Iterable[str]) -> None:
        self.images = _checked_images(images)
        self.labels = _checked_labels(labels).to(self.images.device)
        self.class_names = _checked_names(class_names)
        if len(self.images) != len(self.labels):
            raise DataError(
                f"Got {len(self.images)} images but {len(self.labels)} labels; expected one label per image."
            )
        low, high = (int(value) for value in torch.aminmax(self.labels))
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"Labels go from {low} to {high}, expected 0 to {self.num_classes - 1} "
                f"for the {self.num_classes} class names given."
            )
        self._shared = _Shared(self.images)

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageSet, (self.images, self.labels, self.class_names)  # weak references cannot be stored

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"ImageSet({len(self)} images {shape}, {self.num_classes} classes, {self.device})"

    @property
    def num_classes(self) -> int:
        """How many classes have a name, with or without images here."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def device(self) -> torch.device:
        """Where images and labels are stored."""
        return self.images.device

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on another device, whose copy of the images is made once and shared while anyone uses it."""
        device, copies = torch.device(device), self._shared.copies
        with _COPYING:
            images = copies[device]() if device in copies else None
            if images is None:
                images = self.images.to(device)
                copies[device] = TensorWeakRef(images)
        return self._with(images, self.labels.to(device), self.class_names)

    def rows(self, first: int, last: int) -> Tensor:
        """The rows whose label is in [first, last), ascending."""
        return torch.nonzero((self.labels >= first) & (self.labels < last)).flatten()

    def subset(self, rows: Tensor | Sequence[int]) -> ImageSet:
        """The images of some rows, in the order given, with the same class names."""
        chosen = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        return ImageSet(self.images[chosen], self.labels[chosen], self.class_names)

    def reorder(self, order: Sequence[int]) -> ImageSet:
        """The set with new labels: the class now labelled order[k] becomes class k."""
        if sorted(order) != list(range(self.num_classes)):
            raise UsageError(f"A class order must hold each of 0 to {self.num_classes - 1} once, got {list(order)}.")
        new_label = torch.empty(self.num_classes, dtype=torch.int64)
        new_label[torch.tensor(list(order))] = torch.arange(self.num_classes)
        names = [self.class_names[label] for label in order]
        return self._with(self.images, new_label.to(self.device)[self.labels], names)

    def _with(self, images: Tensor, labels: Tensor, class_names: Iterable[str]) -> ImageSet:
        """A set of the same images and classes."""
        same = ImageSet.__new__(ImageSet)  # as sound as this one
        same.images, same.labels, same.class_names = images, labels, tuple(class_names)
        same._shared = self._shared
        return same

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all images, in their order, and of the names of their classes; the order of classes is no part."""
        self._shared.fingerprint = self._shared.fingerprint or self._digest()
        return self._shared.fingerprint

    def _digest(self) -> str:
        names = sorted(self.class_names)
        ranks = {name: rank for rank, name in enumerate(names)}
        rank = torch.tensor([ranks[name] for name in self.class_names])
        digest = hashlib.sha256(repr((tuple(self.images.shape), names)).encode())
        digest.update(rank[self.labels.cpu()].numpy().data)
        digest.update(self.images.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def hold_out(self, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
        """Two sets (rest, held): about `fraction` of every class that occurs is held, at random by `seed`."""
        if not 0 < fraction < 1:
            raise UsageError(f"The fraction to hold out must be above 0 and below 1, got {fraction}.")
        if not 0 <= seed < 2**32:
            raise UsageError(f"The seed must be from 0 to {2**32 - 1}, got {seed}.")
        # The legacy generator: NumPy promises its stream, so a split stays the same in later versions.
        random = np.random.RandomState(seed)
        labels = self.labels.cpu().numpy()
        held = np.zeros(len(labels), dtype=bool)
        occurring, starts = np.unique(np.sort(labels), return_index=True)
        for label, rows in zip(occurring, np.split(np.argsort(labels, kind="stable"), starts[1:]), strict=True):
            if len(rows) < 2:
                raise DataError(
                    f"Class {self.class_names[label]!r} has 1 image, expected at least 2: one to learn from "
                    "and one to hold out. Add images or remove the class."
                )
            num_held = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
            held[random.permutation(rows)[:num_held]] = True
        rest, kept = np.flatnonzero(~held), np.flatnonzero(held)
        return self.subset(torch.from_numpy(rest)), self.subset(torch.from_numpy(kept))


def require_same_classes(train: ImageSet, test: ImageSet) -> None:
    """Check that both sets name the same classes and that each class has images in both."""
    if train.class_names != test.class_names:
        only_train, only_test = (
            sorted(set(a.class_names) - set(b.class_names)) for a, b in ((train, test), (test, train))
        )
        raise DataError(
            "Train and test must have the same class names in the same order; "
            f"only in train: {_some(only_train)}, only in test: {_some(only_test)}."
        )
    for part, images in (("train", train), ("test", test)):
        counts = torch.bincount(images.labels, minlength=images.num_classes).tolist()
        if missing := [name for name, count in zip(images.class_names, counts, strict=True) if count == 0]:
            raise DataError(f"No {part} images of {_some(missing)}. Add images or leave the class out of both parts.")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:10]) or "none"
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def _as_tensor(values: Array, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray):
        raise DataError(f"Expected {what} as a NumPy array or a tensor, got {type(values).__name__}.")
    if values.dtype.kind not in "iuf":
        raise DataError(f"Expected {what} as whole numbers, got an array of dtype {values.dtype}.")
    # A copy where torch cannot share the memory: read-only, negative strides, foreign byte order.
    return torch.from_numpy(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))


def _checked_images(images: Array) -> Tensor:
    tensor = _as_tensor(images, "images")
    got = f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    expected = "Expected images as uint8 [number, channels, height, width]"
    if tensor.dtype != torch.uint8:
        raise DataError(f"{expected}, {got}. Scale to 0..255, round and convert to uint8.")
    if tensor.ndim != 4:
        raise DataError(f"{expected}, {got}.")
    if 0 in tensor.shape:
        raise DataError(f"{expected} with at least one image and one pixel, {got}.")
    if tensor.shape[1] not in (1, 3):
        last = tensor.shape[3] in (1, 3)
        hint = " These look channels-last: transpose with (0, 3, 1, 2)." if last else ""
        raise DataError(f"{expected} with 1 or 3 channels, {got}.{hint}")
    return tensor


def _checked_labels(labels: Array) -> Tensor:
    tensor = _as_tensor(labels, "labels")
    got = f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.ndim != 1:
        hint = " One-hot rows become labels with argmax(1)." if tensor.ndim == 2 else ""
        raise DataError(f"Expected labels as whole numbers of shape [number], {got}.{hint}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise DataError(f"Expected labels as whole numbers of shape [number], {got}.")
    return tensor.to(torch.int64)


def _checked_names(class_names: Iterable[str]) -> tuple[str, ...]:
    names = tuple(class_names)
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if isinstance(class_names, str) or wrong or not names:
        raise DataError(f"Expected class names as a list of non-empty strings, got {class_names!r}.")
    if unreadable := [name for name in names if any(unicodedata.category(letter) in _UNREADABLE for letter in name)]:
        raise DataError(f"Class names must not hold control characters or bytes that are not UTF-8: {unreadable[0]!a}.")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(f"Expected every class name once, got these repeated: {_some(repeated)}.")
    return names
