"""Photos from any folder with one subfolder per class, with or without train and test parts."""

from __future__ import annotations

import hashlib
import os
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ccfa.data.cache import cache_folder
from ccfa.data.decoding import Framing, Interpolation, Pixels, decode_files
from ccfa.data.images import ImageSet, require_same_classes, some
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, Notice

FOLDER = Transforms((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), padding=4, flip=True, brightness=63 / 255)
FOLDER_OPTIONS = {"transforms": FOLDER, "epochs": 40, "batch_size": 64}
FOLDER_METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "icarl": {"lr": 0.5},
    "bic": {"correction_epochs": 80},
    "der": {"warmup_epochs": 3, "balanced_epochs": 20},
    "foster": {"boosting_epochs": 40, "compression_epochs": 30},
    "gdumb": {"epochs": 32, "batch_size": 16},
    "acil": {"projection": 2000},  # 8192 would make checkpoints of 540 MB
}

IMBALANCE = 5  # how many times larger than the smallest class the largest may be before it is said
_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif"}
_ENDINGS |= {".heic", ".heif"}
_TEXTS = {".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".html", ".htm", ".log", ".aae", ".xmp"}
_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")
_TEST_PARTS = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Photos:
    """What was found in a folder of classes. `read_photos` makes it.

    Args:
        images: The images that could be decoded, with the classes sorted by name.
        paths: The file of each image.
        unreadable: The files that cannot be used, such as images outside the class folders, each with the reason.
        duplicates: Pairs of files of one class with the same image.
        conflicts: Pairs of files of two classes with the same image.
        ignored: Files that were not read: text files, hidden files and those that operating systems leave.
    """

    images: ImageSet
    paths: tuple[Path, ...]
    unreadable: tuple[tuple[Path, str], ...] = ()
    duplicates: tuple[tuple[Path, Path], ...] = ()
    conflicts: tuple[tuple[Path, Path], ...] = ()
    ignored: tuple[Path, ...] = ()

    def findings(self) -> list[str]:
        """Return what there is to say about the folder, in sentences."""
        counts = self._counts()
        listed = some([f"{name} {count}" for name, count in counts.items()])
        lines = [f"{_num(len(counts), 'class', 'classes')}, {_num(len(self.images), 'image')}: {listed}."]
        if self.unreadable:
            lines.append(self.listing())
        if self.duplicates:
            pairs = some([f"  {first} and {second}" for first, second in self.duplicates], "\n")
            twice = f"{_num(len(self.duplicates), 'image is', 'images are')} in one class twice"
            lines.append(f"{twice} (`ccfa learn` uses one copy, `ccfa run` both):\n{pairs}")
        return [*lines, *self.single_images(), *self.imbalance(), *self.notes()]

    def notes(self) -> list[str]:
        """Return those findings about single files that a user should know before training."""
        lines = []
        if self.conflicts:
            pairs = some([f"  {first} and {second}" for first, second in self.conflicts], "\n")
            same = _num(len(self.conflicts), "image is", "images are")
            lines.append(f"{same} the same in two classes, so one label must be wrong:\n{pairs}")
        if texts := [str(path) for path in self.ignored if path.suffix.lower() in _TEXTS]:
            lines.append(f"{_num(len(texts), 'text file is', 'text files are')} left out: {some(texts)}.")
        return lines

    def imbalance(self) -> list[str]:
        """Return a sentence if the largest class is much larger than the smallest one."""
        counts = self._counts()
        smallest, largest = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
        if counts[largest] <= IMBALANCE * counts[smallest]:
            return []
        return [
            f"The classes are of very different size: {largest!r} has {_num(counts[largest], 'image')} and "
            f"{smallest!r} has {counts[smallest]}. Expect more errors on small classes, or add images to them."
        ]

    def single_images(self) -> list[str]:
        """Return a sentence if there are classes of one image."""
        names = [repr(name) for name, count in self._counts().items() if count == 1]
        classes = _num(len(names), "class has", "classes have")
        return [f"{classes} one image only: {some(names)}. Add images if you can."] if names else []

    def listing(self) -> str:
        """Return the unreadable files with their reasons, as lines under a heading."""
        return _listing(self.unreadable)

    def _counts(self) -> dict[str, int]:
        counts = self.images.labels.bincount(minlength=self.images.num_classes).tolist()
        return dict(zip(self.images.class_names, counts, strict=True))


def read_photos(
    root: str | Path, framing: Framing | None = None, *, recursive: bool = False, cache: Path | None = None
) -> Photos:
    """Read all images of root/<class>/*, with the classes sorted by name.

    Args:
        root: A folder with one folder per class.
        framing: The size of the images and how they are cropped; by default `Framing()`.
        recursive: Read the folders inside the class folders, too.
        cache: A folder in which decoded images are kept, such as `cache_folder()`. None means no cache.

    Returns:
        What was found. Single unreadable files are listed in it; whether they are an error is up to the caller.

    Raises:
        DataError: If there are no class folders, or if a class has no usable image.

    Example:
        >>> import tempfile
        >>> from ccfa.data import read_photos
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number, name in enumerate(["ant", "bee"]):
        ...         os.mkdir(f"{folder}/{name}")
        ...         size = Path(f"{folder}/{name}/a.ppm").write_bytes(b"P6 1 1 255\\n ab%d" % number)
        ...     photos = read_photos(folder)
        >>> photos.images
        ImageSet(2 images 3x64x64, 2 classes, cpu)
        >>> photos.findings()[0]
        '2 classes, 2 images: ant 1, bee 1.'
    """
    if parts := [str(part) for name, part in _parts(Path(root)).items() if name]:
        raise DataError(f"{root} has a folder for each part of a data set. Give one of them: {' or '.join(parts)}.")
    folders, loose = _class_folders(Path(root))
    files: list[tuple[int, Path]] = []
    ignored: list[Path] = []
    for label, folder in enumerate(folders.values()):
        for path, is_left_out in _files(folder, recursive):
            if is_left_out:
                ignored.append(path)
            else:
                files.append((label, path))
    images, rows, unreadable = decode_files([path for _, path in files], framing or Framing(), cache, root)
    if not rows and not recursive and (meant := [str(one) for one in folders.values() if _has_folders_of_photos(one)]):
        raise DataError(
            f"{root} is one level too high: the photos are in folders inside its folders. Give one of these instead: "
            f"{some(meant)}. If these are the classes, add --recursive (recursive=True)."
        )
    if not recursive:
        hint = "; --recursive (recursive=True) reads what is in it"
        unreadable = [(path, reason + hint * os.path.isdir(path)) for path, reason in unreadable]
    unreadable += [(path, "is outside the class folders") for path in loose]
    files = [files[row] for row in rows]
    labels = np.array([label for label, _ in files], dtype=np.int64)
    counts = np.bincount(labels, minlength=len(folders))
    if empty := [repr(name) for name, count in zip(folders, counts, strict=True) if count == 0]:
        photos, listed = ("usable photos", f"\n{_listing(unreadable)}") if unreadable else ("photos", "")
        places, them = ("folder", "it") if len(empty) == 1 else ("folders", "them")
        todo = f"Add some to {them}, or remove {them}."
        raise DataError(f"There are no {photos} in the class {places} {some(empty)} of {root}. {todo}{listed}")
    duplicates, conflicts = _same_images(images, files)
    return Photos(
        ImageSet(images, labels, folders),
        tuple(path for _, path in files),
        tuple(unreadable),
        tuple(duplicates),
        tuple(conflicts),
        tuple(ignored),
    )


def load_folder(
    root: Path,
    image_size: int = 64,
    held_out: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    recursive: bool = False,
    crop: float = 1.0,
    interpolation: Interpolation = "bilinear",
) -> tuple[ImageSet, ImageSet]:
    """Return the train and the test set of a folder, 3 x image_size x image_size, framed as `Framing` says.

    If there is no test part, the fraction `held_out` of each class is the test set, chosen at random by `seed`.
    Unreadable files are an error that lists them; with `skip_bad` they are left out and listed in a warning.
    """
    framing, cache = Framing(image_size, crop, interpolation), cache_folder()
    folders = _parts(root)
    parts: list[ImageSet] = []
    for folder in folders.values():
        photos = read_photos(folder, framing, recursive=recursive, cache=cache)
        if photos.unreadable and not skip_bad:
            hint = "Remove or repair them, or leave them out with --skip-bad (skip_bad=True)."
            raise DataError(f"{photos.listing()}\n{hint}")
        notes = [f"Skipped: {photos.listing()}"] if photos.unreadable else []
        notes += photos.notes()
        if not parts:  # the classes of a test part may be of any size
            notes += photos.imbalance()
        if not parts and len(folders) == 2:  # otherwise hold_out says it
            notes += photos.single_images()
        for note in notes:
            _notice(note)
        files = [_shown(path.relative_to(root)) for path in photos.paths]
        parts.append(ImageSet(photos.images.images, photos.images.labels, photos.images.class_names, files))
    train, test = parts if len(parts) == 2 else parts[0].hold_out(held_out, seed)
    if num_shared := _num_shared(train, test):
        _notice(f"{num_shared} of the {len(test)} test images are training images too; accuracies will be too high.")
    return train, test


def inspect_folder(root: Path, *, recursive: bool = False) -> list[str]:
    """Return what there is to say about an image folder before training on it, in sentences."""
    lines, parts = [], []
    for name, folder in _parts(root).items():
        photos = read_photos(folder, recursive=recursive, cache=cache_folder())
        lines += [f"{name}: {line}" if name else line for line in photos.findings()]
        parts.append(photos.images)
    if len(parts) == 1:
        return [*lines, "There is no test part: a fifth of each class is held out for testing."]
    try:
        require_same_classes(*parts)
    except DataError as error:
        lines.append(str(error))
    if num_shared := _num_shared(*parts):
        lines.append(f"{num_shared} of the {len(parts[1])} test images are training images too.")
    return lines


def find_images(folder: str | Path) -> list[Path]:
    """Return the image files in a folder and in those inside it, sorted: those that `read_photos` would read.

    Raises:
        DataError: If the folder does not exist, or has no such files.

    Example:
        >>> import tempfile
        >>> from ccfa.data import find_images
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.jpg", "a.png", "notes.txt"):
        ...         Path(folder, name).touch()
        ...     [found.name for found in find_images(folder)]
        ['a.png', 'b.jpg']
    """
    found = [file for file, is_left_out in _files(Path(folder), recursive=True) if not is_left_out]
    if not found:
        raise DataError(f"{folder} has no images.")
    return found


def _parts(root: Path) -> dict[str, Path]:
    """The folders of classes by the name of their part; without parts there is one, with an empty name."""
    folders, _ = _class_folders(root)
    if "train" not in folders or not set(folders) <= {"train", *_TEST_PARTS}:
        return {"": root}
    found = [name for name in _TEST_PARTS if name in folders]
    if not found and not _has_folders(folders["train"]):
        return {"": root}  # a class may be called train
    return {name: folders[name] for name in ["train", *found[:1]]}


def _has_folders(folder: Path) -> bool:
    return any(path.is_dir() and not _is_left_by_systems(path.name) for path in _listed(folder))


def _has_folders_of_photos(folder: Path) -> bool:
    inner = [path for path, is_left_out in _files(folder, recursive=False) if not is_left_out and path.is_dir()]
    return any(file.suffix.lower() in _ENDINGS for path in inner for file in path.glob("*"))


def _class_folders(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """The class folders by class name, sorted, and the images beside them."""
    visible = [path for path in _listed(root) if not _is_left_by_systems(path.name)]
    # Names are UTF-8 on disk, also where the locale knows only ASCII.
    named = [(os.fsencode(path.name).decode("utf-8", "surrogateescape"), path) for path in visible if path.is_dir()]
    # A Mac writes names in other letters.
    folders = dict(sorted((unicodedata.normalize("NFC", name), path) for name, path in named))
    if len(folders) < len(named):
        names = [unicodedata.normalize("NFC", name) for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{root} has two folders that are both called {twice!r}, in different Unicode forms.")
    loose = [path for path in visible if path.suffix.lower() in _ENDINGS and not os.path.isdir(path)]
    if not folders:
        found = "has no class folders" if visible else "is empty"
        if loose:
            found = f"has no class folders, only {_num(len(loose), 'loose photo')}: {some([one.name for one in loose])}"
        todo = f"Put the photos of each class into a folder of its own, such as {root / 'cat'} and {root / 'dog'}."
        raise DataError(f"{root} {found}. {todo}")
    return folders, loose


def _files(folder: Path, recursive: bool) -> Iterator[tuple[Path, bool]]:
    """What is in a folder, sorted, each with whether it is left out; a folder inside it only if it is not read."""
    waiting, seen = _listed(folder)[::-1], {os.path.realpath(folder)}
    while waiting:
        path = waiting.pop()
        if _is_left_by_systems(path.name):
            yield path, True
        elif not os.path.isdir(path):
            yield path, path.suffix.lower() in _TEXTS
        elif not recursive:
            yield path, False
        elif (place := os.path.realpath(path)) not in seen:  # links may go round in circles
            seen.add(place)
            try:
                waiting += _listed(path)[::-1]
            except DataError:
                yield path, False


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError as error:
        raise DataError(f"{folder} does not exist or cannot be listed: {error.strerror}.") from error


def _is_left_by_systems(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFT_BY_SYSTEMS


def _same_images(
    images: Pixels, files: Sequence[tuple[int, Path]]
) -> tuple[list[tuple[Path, Path]], list[tuple[Path, Path]]]:
    """Pairs of files with the same image: in one class, and in two; published data sets have some of both."""
    first: dict[bytes, dict[int, Path]] = {}  # by the class
    duplicates, conflicts = [], []
    for digest, (label, path) in zip(image_digests(images), files, strict=True):
        earlier = first.setdefault(digest, {})
        if label in earlier:
            duplicates.append((earlier[label], path))
        elif earlier:
            conflicts.append((next(iter(earlier.values())), path))
        earlier.setdefault(label, path)
    return duplicates, conflicts


def _num_shared(train: ImageSet, test: ImageSet) -> int:
    known = set(image_digests(train.images.numpy()))
    return sum(digest in known for digest in image_digests(test.images.numpy()))


def image_digests(images: Pixels) -> list[bytes]:
    """Return 16 bytes for each image, by which the same image is recognised."""
    return [hashlib.blake2b(image.data, digest_size=16).digest() for image in images]


def _listing(unreadable: Sequence[tuple[Path, str]]) -> str:
    lines = some([f"  {path} {reason}" for path, reason in unreadable], "\n")
    return f"{_num(len(unreadable), 'file')} cannot be used:\n{lines}"


def _shown(path: Path) -> str:
    """The path as text that can be written anywhere, also if it is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _num(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _notice(text: str) -> None:
    warnings.warn(Notice(text), stacklevel=3)
