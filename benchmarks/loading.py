"""How long it takes to load a folder of photos: ccfa, a plain Pillow loop, and a DataLoader, in one run.

500 JPEGs of 400 to 500 pixels are made on the spot. Every way reads all of them and gives one uint8 array of centre
squares; the files are in the memory of the operating system for all. `python benchmarks/loading.py`
"""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import DataLoader, Dataset

from ccfa.data import Framing, decode_files


def write_photos(folder: Path, num: int) -> list[Path]:
    """Write JPEGs with the look of photos: soft noise, some shapes, a little grain."""
    random = np.random.default_rng(0)
    paths = [folder / f"{number:04}.jpg" for number in range(num)]
    for path in paths:
        width, height = (int(side) for side in random.integers(400, 501, 2))
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        photo = coarse.resize((width, height), Image.Resampling.BICUBIC)
        draw = ImageDraw.Draw(photo)
        for _ in range(12):
            x, y, size = (int(value) for value in random.integers(0, 400, 3))
            colour = tuple(int(value) for value in random.integers(0, 256, 3))
            draw.ellipse((x, y, x + size // 3, y + size // 4), fill=colour)
        pixels = np.asarray(photo.filter(ImageFilter.GaussianBlur(1))) + random.normal(0, 6, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)
    return paths


def plain_decode(path: Path, size: int) -> np.ndarray[Any, Any]:
    """Decode a photo as most scripts do."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(square).transpose(2, 0, 1)


class Photos(Dataset[torch.Tensor]):
    """The photos for a DataLoader."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(plain_decode(self.paths[row], self.size).copy())


def by_loop(paths: list[Path], size: int) -> int:
    """Decode one photo after the other."""
    return len(np.stack([plain_decode(path, size) for path in paths]))


def by_data_loader(paths: list[Path], size: int) -> int:
    """Decode in two worker processes."""
    return len(torch.cat(list(DataLoader(Photos(paths, size), batch_size=64, num_workers=2))))


def by_ccfa(paths: list[Path], size: int, cache: Path | None = None) -> int:
    """Decode as `ccfa run` does."""
    return len(decode_files(paths, Framing(size), cache).images)


def cost(way: Callable[[], int], num: int) -> tuple[float, float]:
    """Return the seconds that pass and the CPU seconds, those of worker processes included."""
    began, before = time.perf_counter(), sum(os.times()[:4])
    found = way()
    took, used = time.perf_counter() - began, sum(os.times()[:4]) - before
    assert found == num
    return took, max(used, 0.01)  # the clock's step


def main() -> None:
    """Measure every way in turn, several times, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = write_photos(folder, given.photos)
        num_bytes = sum(os.path.getsize(path) for path in paths)
        print(f"{len(paths)} JPEGs, {num_bytes / 1e6:.0f} MB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
        print("pixels way                     seconds  CPU s  faster than the loop (CPU)  than DataLoader (CPU)")
        for size in (64, 224):
            cache = folder / "cache"
            by_ccfa(paths, size, cache)
            ways: dict[str, Callable[[], int]] = {
                "plain Pillow loop": functools.partial(by_loop, paths, size),
                "DataLoader, 2 workers": functools.partial(by_data_loader, paths, size),
                "ccfa, without a cache": functools.partial(by_ccfa, paths, size),
                "ccfa, from its cache": functools.partial(by_ccfa, paths, size, cache),
            }
            costs = {name: np.empty((given.repeats, 2)) for name in ways}
            for repeat in range(given.repeats):
                for name, way in ways.items():
                    costs[name][repeat] = cost(way, len(paths))
            for name, spent in costs.items():
                seconds, used = np.median(spent, axis=0)
                bases = (costs["plain Pillow loop"], costs["DataLoader, 2 workers"])
                loop, loader = (np.median(base / spent, axis=0) for base in bases)
                ratios = f"{loop[0]:14.1f} {f'({loop[1]:.1f})':>12} {loader[0]:14.1f} {f'({loader[1]:.1f})':>8}"
                print(f"{size:>6} {name:<22} {seconds:8.2f} {used:6.2f} {ratios}")


if __name__ == "__main__":
    main()
