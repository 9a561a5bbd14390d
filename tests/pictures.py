"""Folders of small pictures that a tiny network tells apart: one colour for each class, with noise."""

from pathlib import Path

import numpy as np
from PIL import Image

from ccfa import Learning

SIZE = 8
QUICK = Learning(
    method="replay", options={"backbone": "small", "epochs": 3, "batch_size": 8}, image_size=SIZE, memory=4
)


def draw(folder: Path, names: str, count: int = 10, seed: int = 0) -> Path:
    """Draw pictures of classes that are named by single letters."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng([seed, ord(name)])
        colour = np.random.default_rng(ord(name)).integers(40, 216, 3)
        for number in range(count):
            pixels = np.clip(colour + random.normal(0, 25, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")
    return folder
