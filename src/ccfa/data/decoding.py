"""One image file as uint8 RGB: upright, over white, full range, square."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import DataError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

# A list of our own: the rarer decoders of Pillow are where its security fixes have been.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 64_000_000
MAX_IMAGE_SIZE = 4096
_DEEP = ("I", "F")  # Pillow's modes of more than 8 bits


class Decoded(NamedTuple):
    """The pixels of a file, and what was done to them that its owner may not expect."""

    pixels: NDArray[np.uint8]
    remarks: tuple[str, ...]


def require_image_size(image_size: int) -> None:
    """Check the side of the square that images are brought to."""
    if not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise UsageError(f"The image size must be from 1 to {MAX_IMAGE_SIZE} pixels, got {image_size}.")


def decode_image(path: Path, image_size: int) -> Decoded:
    """The first frame of a file as uint8 [3, image_size, image_size]: short side resized, centre cropped."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    require_image_size(image_size)
    try:
        with Image.open(path, formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:  # from the header, before any pixel is unpacked
                raise DataError(f"{width} x {height} pixels, at most {MAX_PIXELS // 10**6} million are read")
            frames = getattr(file, "is_animated", False)
            deep = file.mode.startswith(_DEEP)
            image = _rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError:
        raise DataError(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise almost anything
        raise DataError(f"cannot be decoded: {error}") from error
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    # Only the centre is resized, so that a very long image does not become a huge one first.
    square = image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    remarks = {
        "More than one frame, the first is used": frames,
        "More than 8 bits a channel, scaled to 8": deep,
        f"Smaller than {image_size} pixels, enlarged": side < image_size,
    }
    told = tuple(remark for remark, holds in remarks.items() if holds)
    return Decoded(np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1)), told)


def _rgb(image: Image) -> Image:
    from PIL import Image as Images

    if image.mode.startswith(_DEEP):
        # Pillow would cut these at 255 instead of scaling them.
        return Images.fromarray(_full_range(np.asarray(image))).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Images.new("RGBA", image.size, "white")
    return Images.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")


def _full_range(values: NDArray[Any]) -> NDArray[np.uint8]:
    if not np.isfinite(values).all():
        raise DataError("holds NaN or infinite values")
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind in "iu" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0  # sixteen bits: the range is the format's, 65535 / 255 = 257
    scaled = (values.astype(np.float64) - low) * (255 / (high - low) if high > low else 0)
    return np.rint(scaled).astype(np.uint8)
