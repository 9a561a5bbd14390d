"""Image files that attack the reader: bombs, endless files, damage at random, very many files."""

import os

import numpy as np
import pytest

import fuzzing
from ccfa.data.decoding import MAX_BYTES, Framing, decode_image
from ccfa.data.folder import load_folder
from ccfa.errors import DataError
from children import in_child, limit_memory
from zoo import SIDE, black_rows, good_files, png, write_noise


@pytest.mark.parametrize("side", [9000, 13000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_cost_no_memory(side, tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, rows=black_rows(side, 50)))
    refused_within(100_000_000, path, "at most 64 million")


def test_huge_files_are_not_read(tmp_path):
    path = tmp_path / "sparse.ppm"
    path.write_bytes(b"P6 8 8 255\n")
    os.truncate(path, MAX_BYTES + 1)
    refused_within(100_000_000, path, "bytes")


def refused_within(num_bytes, path, reason):
    def refused():
        limit_memory(num_bytes)
        with pytest.raises(DataError, match=reason):
            decode_image(path, Framing(SIDE))

    in_child(refused)


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_images_decode_or_fail(seconds, tmp_path):
    path = tmp_path / "fuzzed"

    def decode(content):
        path.write_bytes(content)
        try:
            pixels = decode_image(path, Framing(SIDE))
        except DataError:
            return
        assert (pixels.shape, pixels.dtype) == ((3, SIDE, SIDE), np.uint8)

    assert fuzzing.fuzz([content for content, _, _ in good_files().values()], decode, seconds) > 0


@pytest.mark.parametrize("num", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_classes_take_bounded_memory(num, tmp_path):
    for number in range(num // 10):
        folder = write_noise(tmp_path / "photos" / str(number), 1, seed=number % 50, size=8)
        for copy in range(9):
            os.link(folder / "0.png", folder / f"{copy}-copy.png")

    def read():
        limit_memory(num * 3 * 8 * 8 * 3 + 400_000_000)
        return len(load_folder(tmp_path / "photos", image_size=8)[0])

    assert in_child(read, timeout=600) == num * 8 // 10
