"""pictures.npz: the thumbnails that a run's page shows, of exemplars and of mistaken test images."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ccfa.data import ImageSet
from ccfa.errors import ModelError
from ccfa.experiments.experiment import Resolved
from ccfa.files import read_arrays, write_arrays

FILE = "pictures.npz"
MAX_PER_CLASS = 10
MAX_PER_PAIR = 5
MAX_EXEMPLAR_BYTES = 2 * 2**20

Arrays = dict[str, NDArray[Any]]


def write_pictures(
    path: Path,
    stage: int,
    exemplars: Sequence[Sequence[int]],
    mistakes: Sequence[tuple[int, int, Sequence[int]]],
    resolved: Resolved,
) -> Arrays:
    """Store and return thumbnails of the exemplars of each class and of mistakes: true class, predicted class, rows."""
    side = 24 if len(exemplars) > 250 else 48
    channels, height, width = resolved.train.shape
    num_bytes = channels * min(height, side) * min(width, side)
    per_class = max(1, min(MAX_PER_CLASS, MAX_EXEMPLAR_BYTES // (num_bytes * max(len(exemplars), 1))))
    chosen = [(label, row) for label, rows in enumerate(exemplars) for row in rows[:per_class]]
    chosen = chosen[: MAX_EXEMPLAR_BYTES // num_bytes]
    mistaken = [(true, predicted, row) for true, predicted, rows in mistakes for row in rows[:MAX_PER_PAIR]]
    arrays = {
        "stage": np.array(stage),
        "exemplars": _thumbnails(resolved.train, [row for _, row in chosen], side),
        "exemplar_classes": np.array([label for label, _ in chosen], dtype=np.int64),
        "mistakes": _thumbnails(resolved.test, [row for *_, row in mistaken], 48),
        "mistake_pairs": np.array([pair for *pair, _ in mistaken], dtype=np.int64).reshape(-1, 2),
    }
    write_arrays(path / FILE, arrays)
    return arrays


def read_pictures(path: Path, stage: int) -> Arrays | None:
    """Return the thumbnails stored after a stage, or None if there are none of this stage."""
    try:
        arrays = read_arrays(path / FILE)
    except ModelError:
        return None
    return arrays if arrays["stage"] == stage else None


def strip(thumbnails: NDArray[np.uint8]) -> str:
    """Return thumbnails (n, height, width, channels) side by side as the data address of a PNG; empty for none."""
    if not len(thumbnails):
        return ""
    row = np.concatenate(list(thumbnails), axis=1)
    content = io.BytesIO()
    Image.fromarray(row[..., 0] if row.shape[2] == 1 else row).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _thumbnails(images: ImageSet, rows: Sequence[int], side: int) -> NDArray[np.uint8]:
    channels, height, width = images.shape
    size = (min(width, side), min(height, side))
    arrays = images.images[torch.tensor(rows, dtype=torch.int64)].permute(0, 2, 3, 1).cpu().numpy()
    scaled = [Image.fromarray(array.squeeze(2) if channels == 1 else array).resize(size) for array in arrays]
    return np.array(scaled, dtype=np.uint8).reshape(len(rows), size[1], size[0], channels)
