"""The data sets: the name of each, how it is loaded, and what experiments on it use by default."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ccfa.data.decoding import Framing, Interpolation
from ccfa.data.folder import FOLDER_METHOD_OPTIONS, FOLDER_OPTIONS, load_folder
from ccfa.data.images import ImageSet, require_same_classes
from ccfa.errors import UsageError, matching, unknown
from ccfa.plugins import Registry

Loader = Callable[[str, Path | None, Framing, bool, float, bool], tuple[ImageSet, ImageSet]]
"""What takes the arguments of `load_parts` and returns its two sets."""
_Loader = TypeVar("_Loader", bound=Callable[..., tuple[ImageSet, ImageSet]])


@dataclass(frozen=True)
class DataSet:
    """A data set, and what experiments on it use unless they are told otherwise."""

    name: str
    loader: Callable[..., tuple[ImageSet, ImageSet]]
    description: str = ""
    scenario: str | None = None
    order: str = "natural"
    options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    find: Callable[[Path | None], Path | None] | None = None
    folder: Path | None = None

    def default_scenario(self, num_classes: int) -> str:
        """The scenario of the data set, or else half of the classes first and the rest in about five stages."""
        initial = -(-num_classes // 2)
        return self.scenario or f"B{initial}-inc{max(1, -(-(num_classes - initial) // 5))}"


DATASETS: Registry[DataSet] = Registry("data set", "ccfa.data", lambda name, loader: DataSet(name, loader))
"""The data sets by name. Image folders are not listed: their name is a path."""

FAMILIES: dict[str, Callable[[str], DataSet]] = {}
"""Data sets whose name is KIND:FILE, by their kind."""


def register_data(
    name: str,
    *,
    scenario: str | None = None,
    order: str = "natural",
    options: Mapping[str, Any] | None = None,
    method_options: Mapping[str, Mapping[str, Any]] | None = None,
    find: Callable[[Path | None], Path | None] | None = None,
) -> Callable[[_Loader], _Loader]:
    """Register a function as the data set `name`, for `load`, `build_method` and `--data`.

    The function returns two `ImageSet`s with the same class names: the train set and the test set. It takes no
    arguments, or some of these by name, as given to `load` or on the command line: `data_dir` (a path or None),
    `image_size`, `crop`, `interpolation`, `held_out`, `seed`, `skip_bad`, `recursive`, `download`. The first line of
    its docstring describes the data set in `ccfa list datasets`.

    Args:
        name: What users type. It must not contain a path separator.
        scenario: The default scenario, such as "B50-inc10". Without one, half of the classes come first.
        order: The default class order.
        options: Options of methods on this data set, for every method that has them, such as `epochs`, `backbone`
            or `transforms`. A method's own defaults are its published values for CIFAR-100: colour images.
        method_options: Further options by the name of a method, or of "ccfa".
        find: A function that takes the data folder and returns the path that would be read, or None. Only data
            that may be missing needs it; `ccfa doctor` calls it.

    A package can also bring data sets without being imported first: an entry point of the group `ccfa.data`
    with the name of the data set that refers to the registered function.

    >>> import numpy as np
    >>> from ccfa import ImageSet, load, register_data
    >>> @register_data("noise", scenario="2,1", options={"backbone": "small", "epochs": 1})
    ... def noise(seed):
    ...     '''60 images of noise, 3 classes, 3 x 8 x 8.'''
    ...     images = np.random.default_rng(seed).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    ...     return ImageSet(images, np.arange(60) % 3, ["a", "b", "c"]).hold_out(0.25, seed=0)
    >>> load("noise", seed=1)
    (ImageSet(45 images 3x8x8, 3 classes, cpu), ImageSet(15 images 3x8x8, 3 classes, cpu))
    """
    if not name or os.sep in name:
        raise UsageError(f"The name of a data set must be text without {os.sep!r}, got {name!r}.")

    def register(loader: _Loader) -> _Loader:
        description = (inspect.getdoc(loader) or "").partition("\n")[0]
        DATASETS.add(
            name,
            DataSet(name, loader, description, scenario, order, dict(options or {}), dict(method_options or {}), find),
        )
        return loader

    return register


def data_set(name: str | Path) -> DataSet:
    """Return the data set of that name, of a family such as imagenet:FILE, or the image folder at that path.

    A path is a `Path`, a text with a separator, or the name of something that exists. Any other name matches in any
    case.
    """
    if name in DATASETS:
        return DATASETS[str(name)]
    kind, colon, _ = str(name).partition(":")
    if colon and kind in FAMILIES:
        return FAMILIES[kind](str(name))
    path = Path(os.path.expanduser(name))
    if isinstance(name, Path) or os.sep in name or os.path.exists(path):
        return DataSet(
            str(name),
            partial(load_folder, path),
            options=FOLDER_OPTIONS,
            method_options=FOLDER_METHOD_OPTIONS,
            folder=path,
        )
    if found := matching(name, DATASETS):
        return DATASETS[found]
    raise unknown("data", name, [*DATASETS, "the path of a folder such as ./photos"])


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    *,
    image_size: int = 64,
    held_out: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    recursive: bool = False,
    download: bool = True,
    crop: float = 1.0,
    interpolation: Interpolation = "bilinear",
) -> tuple[ImageSet, ImageSet]:
    """Load the train and the test set of a data set by name, or of an image folder by path.

    Args:
        name: "digits", "glyphs", "cifar100", "imagenet100", "imagenet1000", a registered name (`register_data`), or
            the path of an image folder.
        data_dir: Where CIFAR-100 is, or is downloaded to, or where ImageNet is. By default this is $CCFA_DATA.
        image_size: Width and height in pixels to which the images of a folder are resized.
        held_out: The fraction of each class of a folder that becomes the test set if there is no test part.
        seed: Decides which images of a folder are held out.
        skip_bad: Leave out unreadable files of a folder instead of raising an error.
        recursive: Read the folders inside the class folders of a folder, too.
        download: Download CIFAR-100 if it is missing.
        crop: The share of a photo's shorter side that is the side of the centre square, see `Framing`.
        interpolation: How the photos of a folder are resized: "bilinear" or "bicubic".

    Returns:
        The train set and the test set.

    Example:
        >>> import ccfa
        >>> train, test = ccfa.load("digits")
        >>> train
        ImageSet(1347 images 1x8x8, 10 classes, cpu)
    """
    arguments = {
        "data_dir": Path(data_dir) if data_dir else None,
        "image_size": image_size,
        "held_out": held_out,
        "seed": seed,
        "skip_bad": skip_bad,
        "recursive": recursive,
        "download": download,
        "crop": crop,
        "interpolation": interpolation,
    }
    loader = data_set(name).loader
    named = inspect.signature(loader).parameters
    train, test = loader(**{argument: value for argument, value in arguments.items() if argument in named})
    require_same_classes(train, test)
    return train, test


def load_parts(
    name: str, data_dir: Path | None, framing: Framing, skip_bad: bool, validation: float, recursive: bool = False
) -> tuple[ImageSet, ImageSet]:
    """The images to train on and those to evaluate on: with `validation`, a fraction held out from the former."""
    train, test = load(
        name,
        data_dir,
        image_size=framing.size,
        skip_bad=skip_bad,
        recursive=recursive,
        crop=framing.crop,
        interpolation=framing.interpolation,
    )
    return train.hold_out(validation, seed=0) if validation else (train, test)


def describe_data_sets() -> dict[str, str]:
    """Return every data set by name with its description; packages that are not imported yet stay so."""
    added = {name: DATASETS[name].description for name in DATASETS if name not in DATASETS.offered}
    offered = {name: f"from the package {point.value}" for name, point in DATASETS.offered.items()}
    listed = {"imagenet:FILE": "the classes of ImageNet that a file lists, one WordNet id per line"}
    return {**added, **listed, **offered, "PATH": "an image folder: train/<class>/ and test/<class>/, or <class>/"}
