"""Photos from any folder with one subfolder per class, with or without train and test parts."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ccfa.data.images import ImageSet, require_same_classes
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, Notice, ResourceError, UsageError
from ccfa.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Transforms((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), padding=4, flip=True, brightness=63 / 255)
FOLDER_OPTIONS = {"transforms": FOLDER, "epochs": 40, "batch_size": 64}
FOLDER_METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "icarl": {"lr": 0.5},
    "bic": {"correction_epochs": 80},
    "gdumb": {"epochs": 32, "batch_size": 16},
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
_DEEP = ("I", "F")  # Pillow's modes of more than 8 bits
_NUM_SHOWN = 10
_AT_ONCE = 1000

Pixels = NDArray[np.uint8]


def load_folder(
    root: Path, image_size: int = 64, held_out: float = 0.2, seed: int = 0, skip_bad: bool = False
) -> tuple[ImageSet, ImageSet]:
    """The train and the test set of a folder, 3 x image_size x image_size.

    If there is no test part, the fraction `held_out` of each class is the test set, chosen at random by `seed`.
    Unreadable files are an error that lists them; with `skip_bad` they are left out and listed in a warning.
    """
    _require_size(image_size)
    if not 0 < held_out < 1:
        raise UsageError(f"The fraction to hold out must be above 0 and below 1, got {held_out}.")
    folders = _class_folders(root)
    if set(folders) == {"train"}:
        raise DataError(f"{_shown(root)} has train/ but neither test/ nor val/. {_EXPECTED}")
    if {"train"} < set(folders) <= {"train", "test", "val"}:
        parts = [folders["train"], folders.get("test") or folders["val"]]
        train, test = (load_classes(part, image_size, skip_bad) for part in parts)
        require_same_classes(train, test)
    else:
        train, test = load_classes(root, image_size, skip_bad).hold_out(held_out, seed)
    known = set(_digests(train.images.numpy()))
    if num_shared := sum(digest in known for digest in _digests(test.images.numpy())):
        _notice(f"{num_shared} of the {len(test)} test images are training images too; accuracies will be too high.")
    return train, test


def _require_size(image_size: int) -> None:
    if not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise UsageError(f"The image size must be from 1 to {MAX_IMAGE_SIZE} pixels, got {image_size}.")


def load_classes(root: Path, image_size: int = 64, skip_bad: bool = False) -> ImageSet:
    """All images of root/<class>/*, with the classes sorted by name."""
    _require_size(image_size)
    folders = _class_folders(root)
    files = [(label, path) for label, folder in enumerate(folders.values()) for path in _visible(folder)]
    images, reasons = _decode_all([path for _, path in files], image_size)
    if reasons:
        lines = [f"{_shown(files[row][1])} {reason}" for row, reason in reasons.items()]
        listed = f"{len(lines)} files are not usable images:\n{_some(lines)}"
        if not skip_bad:
            raise DataError(f"{listed}\nRemove or repair them, or leave them out with --skip-bad (skip_bad=True).")
        _notice(f"Skipped: {listed}")
        images = np.delete(images, list(reasons), axis=0)
        files = [file for row, file in enumerate(files) if row not in reasons]
    labels = np.array([label for label, _ in files], dtype=np.int64)
    present = set(labels.tolist())
    if empty := [name for label, name in enumerate(folders) if label not in present]:
        raise DataError(f"No usable images in the classes {empty[:_NUM_SHOWN]} of {_shown(root)}. {_EXPECTED}")
    _tell_conflicts(images, files)
    return ImageSet(images, labels, folders)


def decode_image(path: Path, image_size: int) -> Pixels:
    """The first frame of a file as uint8 [3, image_size, image_size].

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

    if image.mode.startswith(_DEEP):
        # Pillow would cut these at 255 instead of scaling them.
        return Images.fromarray(_full_range(np.asarray(image))).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Images.new("RGBA", image.size, "white")
    return Images.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")


def _full_range(values: NDArray[Any]) -> Pixels:
    if not np.isfinite(values).all():
        raise DataError("holds NaN or infinite values")
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind in "iu" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0  # sixteen bits: the range is the format's, 65535 / 255 = 257
    scaled = (values.astype(np.float64) - low) * (255 / (high - low) if high > low else 0)
    return np.rint(scaled).astype(np.uint8)


def _class_folders(root: Path) -> dict[str, Path]:
    """The class folders by class name, sorted."""
    if not os.path.exists(root):
        raise DataError(f"{_shown(root)} does not exist. {_EXPECTED}")
    visible = _visible(root)
    loose = [path.name for path in visible if path.suffix.lower() in _ENDINGS and not os.path.isdir(path)]
    if loose:
        raise DataError(f"{_shown(root)} has images outside the class folders, such as {loose[0]!r}. {_EXPECTED}")
    # Names are UTF-8 on disk, also where the locale knows only ASCII.
    named = ((os.fsencode(path.name).decode("utf-8", "surrogateescape"), path) for path in visible)
    folders = {name: path for name, path in named if os.path.isdir(path)}
    if not folders:
        raise DataError(f"{_shown(root)} has no class folders. {_EXPECTED}")
    return folders


def _visible(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"The folder {_shown(folder)} cannot be listed: {error.strerror}. {_EXPECTED}") from error
    return [folder / name for name in names if not name.startswith(".") and name.lower() not in _LEFT_BY_SYSTEMS]


def _decode_all(paths: Sequence[Path], image_size: int) -> tuple[Pixels, dict[int, str]]:
    """Every image, and why files cannot be used by their row."""
    from PIL.Image import DecompressionBombWarning

    def decoded(path: Path) -> Pixels | str:
        try:
            return decode_image(path, image_size)
        except DataError as error:
            return str(error)

    try:
        images = np.zeros((len(paths), 3, image_size, image_size), dtype=np.uint8)
    except MemoryError as error:
        raise ResourceError(
            f"{len(paths)} images do not fit into memory: {error}. Use a smaller --image-size."
        ) from error
    reasons: dict[int, str] = {}
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", DecompressionBombWarning)  # a limit of our own decides
        for start in range(0, len(paths), _AT_ONCE):  # piece by piece: a task costs more memory than a small image
            for row, result in enumerate(pool.map(decoded, paths[start : start + _AT_ONCE]), start):
                if isinstance(result, str):
                    reasons[row] = result
                else:
                    images[row] = result
    return images, reasons


def _tell_conflicts(images: Pixels, files: Sequence[tuple[int, Path]]) -> None:
    """Name images that are the same in two classes; published data sets have some, so it is no error."""
    first: dict[bytes, tuple[int, Path]] = {}
    lines = []
    for digest, (label, path) in zip(_digests(images), files, strict=True):
        earlier_label, earlier = first.setdefault(digest, (label, path))
        if earlier_label != label:
            lines.append(f"{_shown(earlier)} and {_shown(path)}")
    if lines:
        _notice(f"{len(lines)} images are the same in two classes, so one label must be wrong:\n{_some(lines)}")


def _digests(images: Pixels) -> Iterator[bytes]:
    return (hashlib.blake2b(image.data, digest_size=16).digest() for image in images)


def _some(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:_NUM_SHOWN], *more])


def _shown(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _notice(text: str) -> None:
    warnings.warn(Notice(text), stacklevel=3)
