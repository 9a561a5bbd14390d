"""Data: labelled images, where they come from, class orders, stages and transforms."""

import os
from collections.abc import Callable
from pathlib import Path

from ccfa.data.cifar100 import download_cifar100, find_cifar100, load_cifar100
from ccfa.data.digits import load_digits_images
from ccfa.data.folder import load_classes, load_folder
from ccfa.data.glyphs import GLYPHS, load_glyphs
from ccfa.data.images import ImageSet, require_same_classes
from ccfa.data.orders import class_order, order_names
from ccfa.data.stages import Stage, parse_scenario, split
from ccfa.data.transforms import CIFAR100_PODNET, CIFAR100_UCIR, CIFAR100_UNJITTERED, DIGITS, FOLDER, Transforms
from ccfa.errors import unknown

__all__ = [
    "CIFAR100_PODNET",
    "CIFAR100_UCIR",
    "CIFAR100_UNJITTERED",
    "DATASETS",
    "DIGITS",
    "FOLDER",
    "GLYPHS",
    "ImageSet",
    "Loader",
    "Stage",
    "Transforms",
    "class_order",
    "download_cifar100",
    "find_cifar100",
    "load",
    "load_cifar100",
    "load_classes",
    "load_digits_images",
    "load_folder",
    "load_glyphs",
    "load_parts",
    "order_names",
    "parse_scenario",
    "require_same_classes",
    "split",
]

DATASETS = {
    "digits": "1,797 handwritten digits, 10 classes, 1 x 8 x 8; comes with scikit-learn",
    "glyphs": "3,960 drawn letters and digits, 36 classes, 1 x 12 x 12; drawn by Pillow when they are loaded",
    "cifar100": "60,000 photos, 100 classes, 3 x 32 x 32; read from the data folder or downloaded to it",
}

Loader = Callable[[str, Path | None, int, bool, float], tuple[ImageSet, ImageSet]]
"""What takes the arguments of `load_parts` and returns its two sets."""


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    image_size: int = 64,
    held_out: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    download: bool = True,
) -> tuple[ImageSet, ImageSet]:
    """Train and test sets of "digits", "glyphs", "cifar100" or the folder at a path; other options are the folder's."""
    if name == "digits":
        return load_digits_images()
    if name == "glyphs":
        return load_glyphs()
    if name == "cifar100":
        return load_cifar100(data_dir, download=download)
    path = Path(name).expanduser()
    if os.sep in name or path.exists():
        return load_folder(path, image_size, held_out, seed, skip_bad)
    raise unknown("data", name, [*DATASETS, "the path of a folder such as ./photos"])


def load_parts(
    name: str, data_dir: Path | None, image_size: int, skip_bad: bool, validation: float
) -> tuple[ImageSet, ImageSet]:
    """The images to train on and those to evaluate on: with `validation`, a fraction held out from the former."""
    train, test = load(name, data_dir, image_size=image_size, skip_bad=skip_bad)
    require_same_classes(train, test)
    return train.hold_out(validation, seed=0) if validation else (train, test)
