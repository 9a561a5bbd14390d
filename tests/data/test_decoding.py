"""Image files as pixels: every kind of file, framing, drafts of large JPEGs, and photos of phones."""

import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from ccfa.data.decoding import Framing, _formats, decode_bytes, decode_image
from ccfa.errors import DataError, UsageError
from zoo import SIDE, bad_files, encoded, good_files, gradient, write_class


@pytest.mark.parametrize("name", good_files())
def test_good_files_are_decoded(name, tmp_path):
    content, expected, tolerance = good_files()[name]
    write_class(tmp_path, {name: content})
    pixels = decode_image(tmp_path / name, Framing(SIDE)).transpose(1, 2, 0)
    assert np.abs(pixels.astype(int) - np.rint(expected)).max() <= tolerance


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_refused(name, tmp_path):
    content, reason = bad_files()[name]
    write_class(tmp_path, {name: content})
    with pytest.raises(DataError, match=reason):
        decode_image(tmp_path / name, Framing(SIDE))


@pytest.mark.parametrize(("width", "height", "target"), [(60, 20, 8), (41, 20, 32), (3, 2000, 8), (1, 1, 8)])
def test_centre_square_is_resized(width, height, target, tmp_path):
    side = min(width, height)
    noise = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    write_class(tmp_path, {"a.png": encoded(noise, "PNG")})
    box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    expected = Image.fromarray(noise).resize((target, target), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(
        decode_image(tmp_path / "a.png", Framing(target)).transpose(1, 2, 0), np.asarray(expected)
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crop_is_a_share_of_the_shorter_side(interpolation):
    picture = Image.fromarray(np.random.RandomState(0).randint(0, 256, (40, 60, 3)).astype(np.uint8))
    expected = picture.resize((8, 8), Image.Resampling[interpolation.upper()], box=(20, 10, 40, 30))
    pixels = decode_bytes(encoded(picture, "PNG"), Framing(8, 0.5, interpolation))
    np.testing.assert_array_equal(pixels.transpose(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize("given", [{"size": 0}, {"size": 5000}, {"crop": 0}, {"crop": 1.1}, {"interpolation": "cubic"}])
def test_impossible_framings_are_refused(given):
    with pytest.raises(UsageError, match=str(*given.values())):
        Framing(**given)


@pytest.fixture
def sizes(monkeypatch):
    """The sizes at which files are decoded."""
    seen, transpose = [], ImageOps.exif_transpose
    monkeypatch.setattr(
        ImageOps, "exif_transpose", lambda file, **how: (seen.append(file.size), transpose(file, **how))
    )
    return seen


@pytest.mark.parametrize("size", [(1000, 400), (400, 1000), (401, 403), (100, 100)])
@pytest.mark.parametrize("crop", [1.0, 0.4])
def test_large_jpegs_are_decoded_smaller_but_not_too_small(size, crop, sizes):
    picture = Image.fromarray(gradient()).resize(size)
    pixels = decode_bytes(encoded(picture, "JPEG", quality=95), Framing(48, crop))
    ((width, height),) = sizes
    scale = max((n for n in (1, 2, 4, 8) if min(size) // n >= 2 * 48 / crop), default=1)
    assert (width, height) == (-(-size[0] // scale), -(-size[1] // scale))
    whole = decode_bytes(encoded(picture, "PNG"), Framing(48, crop))
    assert np.abs(pixels.astype(int) - whole).max() <= 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_drafts_are_turned_upright(orientation, sizes):
    picture = Image.fromarray(gradient()).resize((640, 320))
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg, plain = encoded(picture, "JPEG", quality=95, exif=exif), encoded(picture, "PNG", exif=exif)
    drafted, whole = (decode_bytes(content, Framing(16)).astype(int) for content in (jpeg, plain))
    assert sizes == [(80, 40), (640, 320)]
    assert np.abs(drafted - whole).max() <= 6


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_drafts_keep_their_colours(mode, sizes):
    picture = Image.fromarray(gradient()).resize((320, 320)).convert(mode)
    pixels = decode_bytes(encoded(picture, "JPEG", quality=95), Framing(SIDE))
    expected = np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    assert sizes == [(40, 40)]
    assert np.abs(pixels.transpose(1, 2, 0).astype(int) - expected).max() <= 8


def test_sixteen_bits_take_little_memory():
    """A small file of 4 million pixels: no copy of all of them in floating point."""
    side = 2000
    content = encoded(np.full((side, side), 40_000, np.uint16), "PNG")
    assert len(content) < 100_000
    tracemalloc.start()
    try:
        pixels = decode_bytes(content, Framing(SIDE))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(pixels.flat) == {round(40_000 / 65_535 * 255)}
    assert peak < 6 * side**2, f"{peak / side**2:.1f} bytes a pixel"


def test_pixels_are_limited_where_they_are_unpacked():
    picture = Image.fromarray(gradient()).resize((640, 320))
    with pytest.raises(DataError, match=r"640 x 320 pixels, expected at most 0\.1 million"):
        decode_bytes(encoded(picture, "PNG"), Framing(16), max_pixels=100_000)
    assert decode_bytes(encoded(picture, "JPEG"), Framing(16), max_pixels=100_000).shape == (3, 16, 16)


@pytest.fixture
def formats(monkeypatch):
    """The known formats are found anew, now and after the test."""
    _formats.cache_clear()
    yield monkeypatch
    _formats.cache_clear()


def test_heic_without_its_package_names_the_extra(formats):
    formats.setitem(sys.modules, "pillow_heif", None)
    for brand in (b"heic", b"mif1"):
        with pytest.raises(DataError, match=r"\[heic\]"):
            decode_bytes(b"\0\0\0\x1cftyp" + brand + bytes(40), Framing(SIDE))


def test_heic_is_read_upright(formats):
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra heic is not installed")
    pillow_heif.register_heif_opener()
    picture = Image.fromarray(gradient()).resize((64, 48))
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture, "HEIF", quality=95, exif=exif.tobytes())
    turned = encoded(picture.rotate(-90, expand=True), "PNG")
    pixels, expected = (decode_bytes(one, Framing(SIDE)).astype(int) for one in (content, turned))
    assert np.abs(pixels - expected).max() <= 6
    with pytest.raises(DataError, match=r"damaged|decoded"):
        decode_bytes(content[: len(content) // 2], Framing(SIDE))
