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

from ccfa.errors import DataError, UsageError
from ccfa.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

# A list of our own: the rarer decoders of Pillow are where its security fixes have been.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
MAX_PIXELS = 64_000_000
MAX_BYTES = 300_000_000  # of a file: more than so many pixels need without compression
MAX_IMAGE_SIZE = 4096
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

Pixels = NDArray[np.uint8]


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
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

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


def decode_files(paths: Sequence[Path], framing: Framing, cache: Path | None = None) -> Decoded:
    """Decode files in several threads and keep their order.

    Args:
        paths: The files.
        framing: The size of the images and how they are cropped.
        cache: A folder in which decoded images are kept, such as `cache_folder()`. None means no cache.

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

    def decode(row: int) -> str:
        try:
            images[row] = decode_image(paths[row], framing)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPool(min(8, os.cpu_count() or 1)) as pool:
        reasons = list(pool.imap(decode, range(len(paths)), chunksize=16))
    rows = [row for row, reason in enumerate(reasons) if not reason]
    unreadable = [(path, reason) for path, reason in zip(paths, reasons, strict=True) if reason]
    return Decoded(images[rows] if unreadable else images, rows, unreadable)


def decode_image(path: Path, framing: Framing) -> Pixels:
    """Return the first frame of a file as uint8 [3, size, size]. See `decode_bytes`.

    Args:
        path: A regular file, or a link to one.
        framing: The size of the result and how it is cropped.

    Raises:
        DataError: If the file cannot be used; with the reason, without the path.
    """
    return decode_bytes(read_regular(path, MAX_BYTES), framing)


def decode_bytes(content: bytes, framing: Framing) -> Pixels:
    """Return the first frame of an image file, given as its bytes, as uint8 [3, size, size].

    The image is turned upright by its EXIF tag, laid over white where it is transparent, cropped to its centre
    square and resized.

    Args:
        content: The bytes of the file.
        framing: The size of the result and how it is cropped.

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
            width, height = file.size
            if width * height > MAX_PIXELS:  # from the header, before any pixel is unpacked
                raise DataError(f"has {width} x {height} pixels, expected at most {MAX_PIXELS // 10**6} million")
            needed = ceil(framing.size / framing.crop)  # of the shorter side
            file.draft("RGB", (needed, needed))  # a large JPEG is decoded at 1/2, 1/4 or 1/8, but never smaller
            image = _rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError:
        if content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS:
            raise DataError("is a HEIC photo: pip install 'ccfa[heic]'") from None
        raise DataError(f"is not an image of a known format ({', '.join(FORMATS)})") from None
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise almost anything
        raise DataError(f"cannot be decoded: {error}") from error
    side = min(image.size) * framing.crop
    left, top = (image.width - side) / 2, (image.height - side) / 2
    # Only the centre is resized, so that a very long image does not become a huge one first.
    box, method = (left, top, left + side, top + side), Image.Resampling[framing.interpolation.upper()]
    square = image.resize((framing.size, framing.size), method, box=box)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


@functools.cache
def _formats() -> tuple[str, ...]:
    try:
        import pillow_heif
    except ImportError:
        return FORMATS
    pillow_heif.register_heif_opener()
    return (*FORMATS, "HEIF")


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
