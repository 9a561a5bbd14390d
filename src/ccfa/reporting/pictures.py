"""Thumbnails: exemplars of each class and mistaken test images, kept small beside the run for its page."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ccfa.data import ImageSet
from ccfa.errors import ModelError
from ccfa.experiments.experiment import Resolved
from ccfa.files import read_arrays, write_arrays
from ccfa.reporting.confusions import Pair
from ccfa.reporting.rundata import RunData

SIDE = 48  # pixels; larger photos are scaled down
SIDE_OF_MANY = 24  # with very many classes
MANY_CLASSES = 250
MAX_PER_CLASS = 10
MAX_PER_PAIR = 5
MAX_EXEMPLAR_BYTES = 2 * 2**20

Thumbnails = NDArray[np.uint8]  # [number, height, width, channels]
NO_THUMBNAILS: Thumbnails = np.empty((0, 1, 1, 1), dtype=np.uint8)


class Pictures(NamedTuple):
    """Thumbnails after a stage: exemplars with their class, mistaken test images with (true, predicted)."""

    stage: int
    exemplars: Thumbnails
    exemplar_classes: NDArray[np.int64]  # [number]
    mistakes: Thumbnails
    mistake_pairs: NDArray[np.int64]  # [number, 2]

    def of_class(self, label: int) -> Thumbnails:
        """Exemplars of a class, best first."""
        found: Thumbnails = self.exemplars[self.exemplar_classes == label]
        return found

    def of_pair(self, pair: Pair) -> Thumbnails:
        """Test images of one class taken for another."""
        found: Thumbnails = self.mistakes[(self.mistake_pairs == [pair.true, pair.predicted]).all(axis=1)]
        return found


def write_pictures(path: Path, run: RunData, pairs: Sequence[Pair], resolved: Resolved) -> None:
    """Choose thumbnails of the last stage and store them in the run directory."""
    kept = run.exemplars or []
    side = SIDE_OF_MANY if len(kept) > MANY_CLASSES else SIDE
    channels, height, width = resolved.train.shape
    one = channels * min(height, side) * min(width, side)
    per_class = max(1, min(MAX_PER_CLASS, MAX_EXEMPLAR_BYTES // (one * max(len(kept), 1))))
    chosen = [(label, row) for label, rows in enumerate(kept) for row in rows[:per_class]][: MAX_EXEMPLAR_BYTES // one]
    mistaken = [(pair.true, pair.predicted, row) for pair in pairs for row in pair.rows[:MAX_PER_PAIR]]
    seen = resolved.test.rows(0, run.num_seen[-1]).tolist() if run.num_seen else []
    arrays = {
        "stage": np.array(len(run.predictions) - 1),
        "exemplars": _thumbnails(resolved.train, [row for _, row in chosen], side),
        "exemplar_classes": np.array([label for label, _ in chosen], dtype=np.int64),
        "mistakes": _thumbnails(resolved.test, [seen[row] for *_, row in mistaken], SIDE),
        "mistake_pairs": np.array([labels for *labels, _ in mistaken], dtype=np.int64).reshape(-1, 2),
    }
    write_arrays(path / "pictures.npz", arrays)


def read_pictures(path: Path, stage: int) -> Pictures | None:
    """The thumbnails stored after that stage; None where there are none, or those of another stage."""
    try:
        arrays = read_arrays(path / "pictures.npz")
        pictures = Pictures(int(arrays["stage"]), *(arrays[name] for name in Pictures._fields[1:]))
    except (ModelError, KeyError, TypeError, ValueError):
        return None
    whole = all(_are_thumbnails(images) for images in (pictures.exemplars, pictures.mistakes)) and (
        pictures.exemplar_classes.shape == (len(pictures.exemplars),)
        and pictures.mistake_pairs.shape == (len(pictures.mistakes), 2)
    )
    return pictures if whole and pictures.stage == stage else None


def strip(thumbnails: Thumbnails) -> str:
    """Thumbnails side by side as one PNG, in a form that a page can hold; nothing for none."""
    if not len(thumbnails):
        return ""
    row = np.concatenate(list(thumbnails), axis=1)
    image = Image.fromarray(row[..., 0] if row.shape[2] == 1 else row)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _thumbnails(images: ImageSet, rows: Sequence[int], side: int) -> Thumbnails:
    """These rows, channels last, scaled to at most `side` pixels each way."""
    channels, height, width = images.shape
    size = (min(width, side), min(height, side))
    found = images.images[torch.tensor(rows, dtype=torch.int64)].permute(0, 2, 3, 1).cpu().numpy()
    if size == (width, height) or not len(found):
        return np.asarray(found[:, : size[1], : size[0]])
    scaled = [Image.fromarray(image.squeeze(2) if channels == 1 else image).resize(size) for image in found]
    return np.stack([np.asarray(image) for image in scaled]).reshape(len(found), size[1], size[0], channels)


def _are_thumbnails(images: NDArray[Any]) -> bool:
    if images.dtype != np.uint8 or images.ndim != 4:
        return False
    _, height, width, channels = images.shape
    return 0 < height <= SIDE and 0 < width <= SIDE and channels in (1, 3)
