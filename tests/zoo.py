"""A zoo of image files: good ones of every kind with the pixels a person sees, bad ones with the reason they get."""

import io
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 16


def gradient() -> NDArray[np.uint8]:
    """A smooth picture [16, 16, 3] that no rotation or mirroring leaves as it is."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] * 17
    return np.stack([x, y, (x + 2 * y) // 3], axis=-1).astype(np.uint8)


def encoded(image: Image.Image | NDArray[Any], kind: str, **options: Any) -> bytes:
    """An image as the bytes of a file."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


@cache
def good_files() -> dict[str, tuple[bytes, NDArray[Any], int]]:
    """Files by name, each with the RGB [16, 16, 3] expected of it and by how much it may differ."""
    rgb = gradient()
    grey = rgb[..., 2]
    as_grey = np.stack([grey] * 3, axis=-1)
    clear = np.linspace(0, 255, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint8)
    over_white = rgb * (clear[..., None] / 255) + 255 - clear[..., None]
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned by 90 degrees
    turned = Image.fromarray(rgb).rotate(90)
    red, blue = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue"))
    many = {"save_all": True, "append_images": [blue]}
    only_red = np.asarray(red)
    return {
        "plain.png": (encoded(rgb, "PNG"), rgb, 0),
        "photo.jpg": (encoded(rgb, "JPEG", quality=98), rgb, 12),
        "no-ending": (encoded(rgb, "BMP"), rgb, 0),
        "wrong-ending.jpg": (encoded(rgb, "PNG"), rgb, 0),
        "loss-free.webp": (encoded(rgb, "WEBP", lossless=True), rgb, 0),
        "photo.avif": (encoded(rgb, "AVIF", quality=98), rgb, 12),
        "plain.ppm": (encoded(rgb, "PPM"), rgb, 0),
        "turned.png": (encoded(turned, "PNG", exif=exif), rgb, 0),
        "grey.png": (encoded(grey, "PNG"), as_grey, 0),
        "bits.png": (encoded(Image.fromarray(grey > 127), "PNG"), (as_grey > 127) * 255, 0),
        "alpha.png": (encoded(np.dstack([rgb, clear]), "PNG"), over_white, 1),
        "cmyk.tiff": (encoded(Image.fromarray(rgb).convert("CMYK"), "TIFF"), rgb, 0),
        "sixteen.png": (encoded(grey.astype(np.uint16) * 257, "PNG"), as_grey, 0),
        "dark.png": (encoded(np.full((SIDE, SIDE), 2570, np.uint16), "PNG"), np.full_like(rgb, 10), 0),
        "float.tiff": (encoded(grey.astype(np.float32) / 25 - 3, "TIFF"), as_grey, 1),
        "moving.gif": (encoded(red, "GIF", **many), only_red, 0),
        "stereo.mpo": (encoded(red, "MPO", quality=98, **many), only_red, 3),
    }


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes, rows: bytes = b"") -> bytes:
    """An RGB PNG of that size by its header, with further chunks and the pixels given."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join([header, *chunks, png_chunk(b"IDAT", rows), png_chunk(b"IEND", b"")])


def black_rows(width: int, height: int) -> bytes:
    """The compressed pixels of a black picture: a thousand times smaller than they unpack to."""
    return zlib.compress(b"\0" * (1 + 3 * width) * height, 9)


@cache
def bad_files() -> dict[str, tuple[bytes, str]]:
    """Files by name, each with a pattern of the reason they are refused for."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    jpeg, whole = encoded(noise, "JPEG"), encoded(noise, "PNG")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    bomb = zlib.compress(b"\0" * 2_000_000, 9)
    not_image, broken = "not an image", "cannot be decoded"
    return {
        "empty.png": (b"", not_image),
        "page.png": (b"<html><script>alert(1)</script></html>", not_image),
        "script.ps": (b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%touch canary) (w) file\n", not_image),
        "rare.tga": (encoded(gradient(), "TGA"), not_image),
        "half.jpg": (jpeg[: len(jpeg) // 2], broken),
        "half.png": (whole[: len(whole) // 2], broken),
        "flipped.png": (bytes(flipped), broken),
        "no-pixels.png": (png(8, 8), broken),
        "nan.tiff": (encoded(np.full((8, 8), np.nan, np.float32), "TIFF"), "NaN"),
        "wide.png": (png(13000, 13000), "13000 x 13000 pixels"),
        "widest.png": (png(2**31 - 1, 2**31 - 1), "decompression bomb"),
        "text-bomb.png": (png(8, 8, png_chunk(b"iTXt", b"a\0\1\0\0\0" + bomb), rows=black_rows(8, 8)), broken),
    }


def write_class(folder: Path, files: dict[str, bytes]) -> Path:
    """A class folder with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_noise(folder: Path, num: int, seed: int, size: int = 12) -> Path:
    """A class folder of different images of noise."""
    images = np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    return write_class(folder, {f"{index}.png": encoded(image, "PNG") for index, image in enumerate(images)})
