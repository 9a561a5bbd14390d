"""A tiny folder in the layout of ImageNet, with JPEG photos made on the spot."""

from pathlib import Path

import numpy as np
from PIL import Image

from ccfa.data import class_list

WNIDS = class_list("imagenet100").wnids[:10]
SIZE = 32  # pixels of the prepared images


def write_photos(root: Path, per_class: int = 6) -> Path:
    """Ten classes, each a pattern of its own; return the file that lists them."""
    random = np.random.default_rng(0)
    for part, num in (("train", per_class), ("val", 2)):
        for label, wnid in enumerate(WNIDS):
            folder = root / part / wnid
            folder.mkdir(parents=True)
            pattern = np.random.default_rng(label).integers(0, 256, (4, 4, 3)).astype(np.uint8)
            for number in range(num):
                size = (48, 40) if number % 2 else (40, 52)
                noise = random.normal(0, 10, (size[1], size[0], 3))
                pixels = np.asarray(Image.fromarray(pattern).resize(size, Image.Resampling.BICUBIC)) + noise
                picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
                picture.save(folder / f"{wnid}_{number}.JPEG", quality=90)
    listed = root / "ten.txt"
    listed.write_text("# ten classes\n" + "".join(f"{wnid} of ImageNet\n" for wnid in WNIDS))
    return listed
