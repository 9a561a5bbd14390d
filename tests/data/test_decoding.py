"""Image files of every kind become the RGB a person sees, and broken ones a reason."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from ccfa.data.decoding import decode_image
from ccfa.errors import DataError, UsageError

SIDE = 16


def picture(mode="RGB"):
    """A smooth gradient: JPEG keeps it, rotation and mirroring change it."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] * (255 / (SIDE - 1))
    rgb = np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def array(image):
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def decoded(image, path, size=SIDE, **options):
    image.save(path, **options)
    return decode_image(path, size).pixels


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tiff", "upper.PNG"])
def test_lossless_formats_are_exact(name, tmp_path):
    np.testing.assert_array_equal(decoded(picture(), tmp_path / name), array(picture()))


def test_content_decides_not_the_ending(tmp_path):
    found = decoded(picture(), tmp_path / "photo.jpg", format="PNG")
    np.testing.assert_array_equal(found, array(picture()))
    np.testing.assert_array_equal(decoded(picture(), tmp_path / "photo", format="PNG"), array(picture()))


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr"])
def test_modes_without_alpha(mode, tmp_path):
    image = picture(mode)
    name = "a.tiff" if mode in ("CMYK", "YCbCr") else "a.png"
    np.testing.assert_array_equal(decoded(image, tmp_path / name), array(image))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_lies_over_white(mode, tmp_path):
    image = picture(mode)
    alpha = np.linspace(0, 255, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint8)
    image.putalpha(Image.fromarray(alpha))
    expected = array(image) * (alpha / 255) + 255 * (1 - alpha / 255)
    np.testing.assert_allclose(decoded(image, tmp_path / "a.png"), expected, atol=1)


def test_transparent_palette_colour_is_white(tmp_path):
    image = Image.new("P", (SIDE, SIDE), 0)
    image.putpalette([0, 0, 0, 200, 10, 20])
    image.paste(1, (0, 0, 8, SIDE))
    found = decoded(image, tmp_path / "a.gif", transparency=0)
    assert np.all(found[:, :, 8:] == 255)
    assert found[:, 0, 0].tolist() == [200, 10, 20]


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.pgm"])
def test_sixteen_bits_are_scaled(name, tmp_path):
    values = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    found = decoded(Image.fromarray(values), tmp_path / name)
    np.testing.assert_array_equal(found, np.stack([np.rint(values / 257)] * 3))


def test_dark_sixteen_bits_stay_dark(tmp_path):
    values = np.full((SIDE, SIDE), 2570, dtype=np.uint16)
    assert np.all(decoded(Image.fromarray(values), tmp_path / "a.png") == 10)


def test_floats_are_scaled_by_their_range(tmp_path):
    values = np.linspace(-3, 7, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.float32)
    found = decoded(Image.fromarray(values), tmp_path / "a.tiff")
    np.testing.assert_allclose(found[0], (values + 3) * 25.5, atol=0.51)
    values[0, 0] = np.nan
    with pytest.raises(DataError, match="NaN"):
        decoded(Image.fromarray(values), tmp_path / "b.tiff")


UPRIGHT = {  # what a viewer does for each orientation tag
    1: lambda image: image,
    2: ImageOps.mirror,
    3: lambda image: image.rotate(180),
    4: ImageOps.flip,
    5: lambda image: ImageOps.mirror(image.rotate(270, expand=True)),
    6: lambda image: image.rotate(270, expand=True),
    7: lambda image: ImageOps.mirror(image.rotate(90, expand=True)),
    8: lambda image: image.rotate(90, expand=True),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decoded(picture(), tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(found, array(UPRIGHT[orientation](picture())))


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.tiff", "a.png"])
def test_first_frame_of_many(name, tmp_path):
    first, second = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue"))
    options = {"lossless": True} if name == "a.webp" else {}
    found = decoded(first, tmp_path / name, save_all=True, append_images=[second], **options)
    np.testing.assert_array_equal(found, array(first))


@pytest.mark.parametrize("size", [(60, 20), (20, 60), (41, 20), (20, 20), (1, 1), (3, 2000)])
@pytest.mark.parametrize("target", [8, 20, 32])
def test_centre_square_is_resized(size, target, tmp_path):
    width, height = size
    noise = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    side = min(size)
    box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    expected = Image.fromarray(noise).resize((target, target), Image.Resampling.BILINEAR, box=box)
    found = decoded(Image.fromarray(noise), tmp_path / "a.png", size=target)
    np.testing.assert_array_equal(found, array(expected))


def test_shrinking_averages(tmp_path):
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    found = decoded(Image.fromarray(board), tmp_path / "a.png", size=4)
    assert np.all(np.abs(found.astype(int) - 127) < 8)


def png_header(width, height):
    """A PNG that claims a size and holds no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + end


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("size", "match"),
    [
        ((8001, 8000), "8001 x 8000 pixels, at most 64 million"),
        ((13000, 13000), "13000 x 13000 pixels"),
        ((20000, 20000), "could be decompression bomb"),
    ],
)
def test_too_many_pixels_are_refused_from_the_header(size, match, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png_header(*size))
    with pytest.raises(DataError, match=match):
        decode_image(path, SIDE)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.bmp", "a.tiff"])
def test_half_a_file_is_refused(name, tmp_path):
    path = tmp_path / name
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"cannot be decoded|not an image"):
        decode_image(path, SIDE)


@pytest.mark.parametrize("content", [b"", b"just text", b"%PDF-1.4", b"8BPS\0\1", b"\xff\xd8\xff"])
def test_what_is_not_an_image_is_refused(content, tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not an image"):
        decode_image(path, SIDE)


@pytest.mark.parametrize("size", [0, -1, 5000])
def test_impossible_sizes_are_refused(size, tmp_path):
    with pytest.raises(UsageError, match="from 1 to 4096"):
        decode_image(tmp_path / "a.png", size)
