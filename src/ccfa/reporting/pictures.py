"""Thumbnails of exemplars and of mistaken test images, stored beside the run for its page."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ccfa.data import ImageSet
from ccfa.experiments.experiment import Resolved
from ccfa.files import write_arrays

MAX_PER_CLASS = 10
MAX_PER_PAIR = 5
MAX_EXEMPLAR_BYTES = 2 * 2**20

Thumbnails = NDArray[np.uint8]  # [number, height, width, channels]


def write_pictures(
    path: Path,
    stage: int,
    exemplars: Sequence[Sequence[int]],
    mistakes: Sequence[tuple[int, int, Sequence[int]]],
    resolved: Resolved,
) -> None:
    """Store thumbnails of the exemplars of each class and of mistakes: true class, predicted class, test rows."""
    side = 24 if len(exemplars) > 250 else 48
    channels, height, width = resolved.train.shape
    one = channels * min(height, side) * min(width, side)
    per_class = max(1, min(MAX_PER_CLASS, MAX_EXEMPLAR_BYTES // (one * max(len(exemplars), 1))))
    chosen = [(label, row) for label, rows in enumerate(exemplars) for row in rows[:per_class]]
    chosen = chosen[: MAX_EXEMPLAR_BYTES // one]
    mistaken = [(true, predicted, row) for true, predicted, rows in mistakes for row in rows[:MAX_PER_PAIR]]
    arrays = {
        "stage": np.array(stage),
        "exemplars": _thumbnails(resolved.train, [row for _, row in chosen], side),
        "exemplar_classes": np.array([label for label, _ in chosen], dtype=np.int64),
        "mistakes": _thumbnails(resolved.test, [row for *_, row in mistaken], 48),
        "mistake_pairs": np.array([pair for *pair, _ in mistaken], dtype=np.int64).reshape(-1, 2),
    }
    write_arrays(path / "pictures.npz", arrays)


def strip(thumbnails: Thumbnails) -> str:
    """Return thumbnails side by side as one PNG, as the address of an image; empty for none."""
    if not len(thumbnails):
        return ""
    row = np.concatenate(list(thumbnails), axis=1)
    content = io.BytesIO()
    Image.fromarray(row[..., 0] if row.shape[2] == 1 else row).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _thumbnails(images: ImageSet, rows: Sequence[int], side: int) -> Thumbnails:
    channels, height, width = images.shape
    size = (min(width, side), min(height, side))
    found = images.images[torch.tensor(rows, dtype=torch.int64)].permute(0, 2, 3, 1).cpu().numpy()
    scaled = [Image.fromarray(image.squeeze(2) if channels == 1 else image).resize(size) for image in found]
    return np.array([np.asarray(image) for image in scaled], dtype=np.uint8).reshape(
        len(found), size[1], size[0], channels
    )
