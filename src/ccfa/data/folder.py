"""Photos from any folder with one subfolder per class, with or without train and test parts."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ccfa.data.images import ImageSet, some
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, Notice, UsageError
from ccfa.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Transforms((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), padding=4, flip=True, brightness=63 / 255)
FOLDER_OPTIONS = {"transforms": FOLDER, "epochs": 40, "batch_size": 64}
FOLDER_METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "icarl": {"lr": 0.5},
    "bic": {"correction_epochs": 80},
    "gdumb": {"epochs": 32, "batch_size": 16},
    "acil": {"projection": 2000},  # 8192 would make checkpoints of 540 MB
}

# A list of our own: the rarer decoders of Pillow are where its security fixes have been.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 64_000_000
MAX_BYTES = 300_000_000  # of a file: more than so many pixels need without compression
MAX_IMAGE_SIZE = 4096
_EXPECTED = """Expected
  FOLDER/<class>/<image files>
or
  FOLDER/train/<class>/<image files>
  FOLDER/test/<class>/<image files>   (or val/ instead of test/)"""
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini")

Pixels = NDArray[np.uint8]


def load_folder(
    root: Path, image_size: int = 64, held_out: float = 0.2, seed: int = 0, skip_bad: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Return the train and the test set of a folder, 3 x image_size x image_size.

    If there is no test part, the fraction `held_out` of each class is the test set, chosen at random by `seed`.
    Unreadable files are an error that lists them; with `skip_bad` they are left out and listed in a warning.
    """
    if not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise UsageError(f"The image size must be from 1 to {MAX_IMAGE_SIZE} pixels, got {image_size}.")
    folders = _class_folders(root)
    if set(folders) == {"train"}:
        raise DataError(f"{root} has train/ but neither test/ nor val/. {_EXPECTED}")
    if {"train"} < set(folders) <= {"train", "test", "val"}:
        parts = [folders["train"], folders.get("test") or folders["val"]]
        train, test = (_load_classes(part, image_size, skip_bad) for part in parts)
    else:
        train, test = _load_classes(root, image_size, skip_bad).hold_out(held_out, seed)
    known = set(_digests(train.images.numpy()))
    if num_shared := sum(digest in known for digest in _digests(test.images.numpy())):
        _notice(f"{num_shared} of the {len(test)} test images are training images too; accuracies will be too high.")
    return train, test


def decode_image(path: Path, image_size: int) -> Pixels:
    """Return the first frame of a file as uint8 [3, image_size, image_size].

    The image is turned upright by its EXIF tag, laid over white where it is transparent, cropped to its centre
    square and resized. A file that cannot be used is a DataError with the reason, without the path.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = read_regular(path, MAX_BYTES)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:  # from the header, before any pixel is unpacked
                raise DataError(f"has {width} x {height} pixels, expected at most {MAX_PIXELS // 10**6} million")
            image = _rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError:
        raise DataError(f"is not an image of a known format ({', '.join(FORMATS)})") from None
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise almost anything
        raise DataError(f"cannot be decoded: {error}") from error
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    # Only the centre is resized, so that a very long image does not become a huge one first.
    square = image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _rgb(image: Image) -> Image:
    from PIL import Image as Images

    if image.mode.startswith(("I", "F")):  # more than 8 bits, which Pillow would cut at 255 instead of scaling
        values = np.asarray(image, np.float64)
        if not np.isfinite(values).all():
            raise DataError("holds NaN or infinite values")
        low, high = values.min(), values.max()
        if image.mode != "F" and low >= 0 and high <= 65535:
            low, high = 0, 65535  # sixteen bits: the range is the format's
        image = Images.fromarray(np.rint((values - low) * (255 / max(high - low, 1e-300))).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Images.new("RGBA", image.size, "white")
    return Images.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")


def _load_classes(root: Path, image_size: int, skip_bad: bool) -> ImageSet:
    """All images of root/<class>/*, with the classes sorted by name."""
    folders = _class_folders(root)
    files = [(label, path) for label, folder in enumerate(folders.values()) for path in _visible(folder)]
    images = np.zeros((len(files), 3, image_size, image_size), dtype=np.uint8)

    def decode(row: int) -> str:
        try:
            images[row] = decode_image(files[row][1], image_size)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPool(min(8, os.cpu_count() or 1)) as pool:
        reasons = list(pool.imap(decode, range(len(files)), chunksize=16))
    if bad := [f"  {path} {reason}" for (_, path), reason in zip(files, reasons, strict=True) if reason]:
        listed = f"{len(bad)} files are not usable images:\n" + some(bad, "\n")
        if not skip_bad:
            raise DataError(f"{listed}\nRemove or repair them, or leave them out with --skip-bad (skip_bad=True).")
        _notice(f"Skipped: {listed}")
        good = [row for row, reason in enumerate(reasons) if not reason]
        images, files = images[good], [files[row] for row in good]
    labels = np.array([label for label, _ in files], dtype=np.int64)
    counts = np.bincount(labels, minlength=len(folders))
    if empty := [repr(name) for name, count in zip(folders, counts, strict=True) if count == 0]:
        raise DataError(f"No usable images of the classes {some(empty)} in {root}. {_EXPECTED}")
    _notice_conflicts(images, files)
    return ImageSet(images, labels, folders)


def _class_folders(root: Path) -> dict[str, Path]:
    """The class folders by class name, sorted."""
    visible = _visible(root)
    # Names are UTF-8 on disk, also where the locale knows only ASCII.
    named = ((os.fsencode(path.name).decode("utf-8", "surrogateescape"), path) for path in visible)
    folders = {name: path for name, path in named if os.path.isdir(path)}
    if loose := [path.name for path in visible if path.suffix.lower() in _ENDINGS and not os.path.isdir(path)]:
        raise DataError(f"{root} has images outside the class folders, such as {loose[0]!r}. {_EXPECTED}")
    if not folders:
        raise DataError(f"{root} has no class folders. {_EXPECTED}")
    return folders


def _visible(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{folder} does not exist or cannot be listed: {error.strerror}. {_EXPECTED}") from error
    return [folder / name for name in names if not name.startswith(".") and name.lower() not in _LEFT_BY_SYSTEMS]


def _notice_conflicts(images: Pixels, files: list[tuple[int, Path]]) -> None:
    """Name images that are the same in two classes; published data sets have some, so it is no error."""
    first: dict[bytes, tuple[int, Path]] = {}
    lines = []
    for digest, (label, path) in zip(_digests(images), files, strict=True):
        earlier_label, earlier = first.setdefault(digest, (label, path))
        if earlier_label != label:
            lines.append(f"  {earlier} and {path}")
    if lines:
        _notice(f"{len(lines)} images are the same in two classes, so one label must be wrong:\n" + some(lines, "\n"))


def _digests(images: Pixels) -> list[bytes]:
    return [hashlib.blake2b(image.data, digest_size=16).digest() for image in images]


def _notice(text: str) -> None:
    warnings.warn(Notice(text), stacklevel=3)
