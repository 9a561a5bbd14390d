"""Image files as squares of pixels: every format, orientation and colour mode; broken and hostile files are refused."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccfa.data.cache import entries_of, keep, recall
from ccfa.errors import DataError, UsageError, installing
from ccfa.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

# A list of our own: the rarer decoders of Pillow are where its security fixes have been.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
VERSION = 1  # of what this file makes of an image: raise it when that changes, so that no older cache is used
MAX_PIXELS = 64_000_000
MAX_BYTES = 300_000_000  # of a file: more than so many pixels need without compression
MAX_IMAGE_SIZE = 4096
_AT_ONCE = 2**18  # values that are scaled at once: float64 copies of a whole image would take gigabytes
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Framing:
    """How an image of any shape becomes a square: its centre is cropped and resized.

    Args:
        size: Width and height of the result in pixels.
        crop: The side of the centre square, as a share of the image's shorter side (timm's `crop_pct`).
        interpolation: How pixels are interpolated, always with antialiasing.

    Example:
        >>> from ccfa.data import Framing
        >>> Framing(size=224, crop=0.875, interpolation="bicubic").size
        224
    """

    size: int = 64
    crop: float = 1.0
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_IMAGE_SIZE:
            raise UsageError(f"The image size must be from 1 to {MAX_IMAGE_SIZE} pixels, got {self.size}.")
        if not 0 < self.crop <= 1:
            raise UsageError(f"The crop must be above 0 and at most 1, got {self.crop}.")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise UsageError(f"The interpolation must be bilinear or bicubic, got {self.interpolation!r}.")


class Decoded(NamedTuple):
    """What came of a list of files."""

    images: Pixels  # [n, 3, size, size], of the files that could be decoded
    rows: list[int]  # their places in the list
    unreadable: list[tuple[Path, str]]  # the others, with the reason


def decode_files(
    paths: Sequence[Path], framing: Framing, cache: Path | None = None, root: str | Path | None = None
) -> Decoded:
    """Decode files in several threads and keep their order.

    Args:
        paths: The files.
        framing: The size of the images and how they are cropped.
        cache: A folder in which decoded images are kept, such as `cache_folder()`. None means no cache.
        root: The folder that the files are in. If it grows, the cache still serves what was there before.

    Returns:
        The images as uint8 [n, 3, size, size] of the n usable files, the places of these files in `paths`, and the
        other files with the reason.

    Example:
        >>> from ccfa.data import Framing, decode_files
        >>> images, rows, unreadable = decode_files([Path("nowhere.jpg")], Framing(size=32))
        >>> (images.shape, rows, unreadable[0][1])
        ((0, 3, 32, 32), [], 'cannot be read: No such file or directory')
    """
    images = np.zeros((len(paths), 3, framing.size, framing.size), dtype=np.uint8)
    entries = entries_of(paths, _decoder(framing), root) if cache else {}
    known = recall(cache, entries, images) if cache else set()

    def decode(row: int) -> str:
        try:
            images[row] = decode_image(paths[row], framing)
        except DataError as error:
            return str(error)
        return ""

    # Bad files are tried again: the reason may have been a passing one, or a package that is there now.
    others = sorted(set(range(len(paths))) - known)
    with ThreadPool(num_threads()) as pool:
        reasons = dict(zip(others, pool.imap(decode, others, chunksize=16), strict=True))
    good = [row for row in range(len(paths)) if not reasons.get(row)]
    if cache and len(good) > len(known):
        keep(cache, entries, images, set(good), known)
    unreadable = [(paths[row], reason) for row, reason in reasons.items() if reason]
    return Decoded(images[good] if unreadable else images, good, unreadable)


def num_threads() -> int:
    """Return how many threads decode: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_image(path: Path, framing: Framing) -> Pixels:
    """Return the first frame of a file as uint8 [3, size, size]. See `decode_bytes`.

    Args:
        path: A regular file, or a link to one.
        framing: The size of the result and how it is cropped.

    Raises:
        DataError: If the file cannot be used; with the reason, without the path.
    """
    return decode_bytes(read_regular(path, MAX_BYTES), framing)


def decode_bytes(content: bytes, framing: Framing, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the first frame of an image file, given as its bytes, as uint8 [3, size, size].

    The image is turned upright by its EXIF tag, laid over white where it is transparent, cropped to its centre
    square and resized.

    Args:
        content: The bytes of the file.
        framing: The size of the result and how it is cropped.
        max_pixels: How many pixels may be unpacked. A large JPEG is unpacked at a fraction of its size.

    Raises:
        DataError: If the file cannot be used, with the reason.

    Example:
        >>> from ccfa.data import Framing, decode_bytes
        >>> decode_bytes(b"P6 1 1 255\\n abc", Framing(size=2))[:, 0, 0].tolist()
        [32, 97, 98]
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_formats()) as file:
            _require_pixels(file, MAX_PIXELS)  # from the header, before any pixel is unpacked
            # A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size: with twice the pixels that are needed, as in
            # Pillow's thumbnails, the result is nearly that of the whole image.
            enough = ceil(2 * framing.size / framing.crop)
            file.draft("RGB", (enough, enough))
            _require_pixels(file, max_pixels)
            ImageOps.exif_transpose(file, in_place=True)
            return frame(file, framing)
    except UnidentifiedImageError:
        if "HEIF" not in _formats() and content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS:
            raise DataError(f"is a HEIC photo: {installing('heic')}") from None
        raise DataError(f"is not an image of a known format ({', '.join(_formats())}), or damaged") from None
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise almost anything
        raise DataError(f"cannot be decoded: {error}") from error


def frame(image: Image, framing: Framing) -> Pixels:
    """Return the centre square of an image of Pillow, over white where it is transparent, as uint8 [3, size, size].

    Example:
        >>> from PIL import Image
        >>> from ccfa.data import Framing, frame
        >>> frame(Image.new("L", (9, 7), 50), Framing(size=4)).shape
        (3, 4, 4)
    """
    return np.ascontiguousarray(np.asarray(_square(_rgb(image), framing)).transpose(2, 0, 1))


def _require_pixels(image: Image, limit: int) -> None:
    if image.width * image.height > limit:
        raise DataError(f"has {image.width} x {image.height} pixels, expected at most {limit / 10**6:g} million")


def _decoder(framing: Framing) -> str:
    import PIL

    return f"{VERSION} {PIL.__version__} {framing}"


@functools.cache
def _formats() -> tuple[str, ...]:
    try:
        import pillow_heif
    except ImportError:
        return FORMATS
    pillow_heif.register_heif_opener()
    return (*FORMATS, "HEIF")


def _square(image: Image, framing: Framing) -> Image:
    from PIL import Image as Images

    side = min(image.size) * framing.crop
    left, top = (image.width - side) / 2, (image.height - side) / 2
    # Only the centre is resized, so that a very long image does not become a huge one first.
    box, method = (left, top, left + side, top + side), Images.Resampling[framing.interpolation.upper()]
    return image.resize((framing.size, framing.size), method, box=box)


def _rgb(image: Image) -> Image:
    from PIL import Image as Images

    if image.mode.startswith(("I", "F")):  # more than 8 bits, which Pillow would cut at 255 instead of scaling
        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if not np.isfinite((low, high)).all():  # of values with a NaN, both are NaN
            raise DataError("holds NaN or infinite values")
        if image.mode != "F" and low >= 0 and high <= 65535:
            low, high = 0, 65535  # sixteen bits: the range is the format's
        scaled, factor = np.empty(values.size, np.uint8), 255 / max(high - low, 1e-300)
        for first in range(0, values.size, _AT_ONCE):
            some = values.reshape(-1)[first : first + _AT_ONCE].astype(np.float64)
            scaled[first : first + _AT_ONCE] = np.rint((some - low) * factor)
        image = Images.fromarray(scaled.reshape(values.shape))
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    opaque = Images.new("RGBA", image.size, "white")
    return Images.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
