"""Data: labelled images, where they come from, class orders, stages and transforms."""

from collections.abc import Callable
from pathlib import Path

from ccfa.data.cifar100 import CIFAR100_PODNET, CIFAR100_UCIR, CIFAR100_UNJITTERED, load_cifar100
from ccfa.data.digits import DIGITS, load_digits_images
from ccfa.data.folder import FOLDER
from ccfa.data.glyphs import GLYPHS, load_glyphs
from ccfa.data.images import ImageSet, require_same_classes
from ccfa.data.orders import class_order, order_names
from ccfa.data.registry import DATASETS, DataSet, data_set, describe_data_sets, register_data
from ccfa.data.stages import Stage, parse_scenario, split
from ccfa.data.transforms import Transforms

__all__ = [
    "CIFAR100_PODNET",
    "CIFAR100_UCIR",
    "CIFAR100_UNJITTERED",
    "DATASETS",
    "DIGITS",
    "FOLDER",
    "GLYPHS",
    "DataSet",
    "ImageSet",
    "Loader",
    "Stage",
    "Transforms",
    "class_order",
    "data_set",
    "describe_data_sets",
    "load",
    "load_cifar100",
    "load_digits_images",
    "load_glyphs",
    "load_parts",
    "order_names",
    "parse_scenario",
    "register_data",
    "require_same_classes",
    "split",
]

Loader = Callable[[str, Path | None, int, bool, float], tuple[ImageSet, ImageSet]]
"""What takes the arguments of `load_parts` and returns its two sets."""


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    *,
    image_size: int = 64,
    held_out: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    download: bool = True,
) -> tuple[ImageSet, ImageSet]:
    """Load the train and the test set of a data set by name, or of an image folder by path.

    Args:
        name: "digits", "glyphs", "cifar100", a registered name (`register_data`), or the path of an image folder.
        data_dir: Where CIFAR-100 is, or is downloaded to. By default this is $CCFA_DATA.
        image_size: Width and height in pixels to which the images of a folder are resized.
        held_out: The fraction of each class of a folder that becomes the test set if there is no test part.
        seed: Decides which images of a folder are held out.
        skip_bad: Leave out unreadable files of a folder instead of raising an error.
        download: Download CIFAR-100 if it is missing.

    Returns:
        The train set and the test set.

    Example:
        >>> import ccfa
        >>> train, test = ccfa.load("digits")
        >>> train
        ImageSet(1347 images 1x8x8, 10 classes, cpu)
    """
    return data_set(name).load(
        data_dir=Path(data_dir) if data_dir else None,
        image_size=image_size,
        held_out=held_out,
        seed=seed,
        skip_bad=skip_bad,
        download=download,
    )


def load_parts(
    name: str, data_dir: Path | None, image_size: int, skip_bad: bool, validation: float
) -> tuple[ImageSet, ImageSet]:
    """The images to train on and those to evaluate on: with `validation`, a fraction held out from the former."""
    train, test = load(name, data_dir, image_size=image_size, skip_bad=skip_bad)
    require_same_classes(train, test)
    return train.hold_out(validation, seed=0) if validation else (train, test)
