"""ImageNet-100 and ImageNet-1000 in the standard layout, by named lists of classes, with the published settings."""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ccfa.data.images import ImageSet, some
from ccfa.data.prepared import INDEX, PROGRESS, Source, read_prepared
from ccfa.data.registry import FAMILIES, DataSet, register_data
from ccfa.data.stages import IMAGENET_LISTS, published, recognise_imagenet
from ccfa.data.transforms import Transforms
from ccfa.errors import DataError, UsageError
from ccfa.files import read_regular

IMAGENET = Transforms(
    (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), flip=True, brightness=63 / 255, scale=(0.08, 1.0), centre=224 / 256
)
IMAGENET_UNJITTERED = replace(IMAGENET, brightness=0.0)

_WNID = re.compile(r"n\d{8}")
_LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG"
_OPTIONS = {"backbone": "resnet18-podnet", "transforms": IMAGENET, "epochs": 90}


def _method_options(weight_decay: float, ucir_balanced_epochs: int) -> dict[str, dict[str, Any]]:
    """The values of the published code; ImageNet-100 and ImageNet-1000 differ in the two that are given."""
    podnet = {"lambda_spatial": 8.0, "lambda_flat": 10.0, "balanced_lr": 0.01, "weight_decay": weight_decay}
    unjittered = {"transforms": IMAGENET_UNJITTERED}
    ucir = {
        **unjittered,
        "backbone": "resnet18-ucir",
        "milestones": (1 / 3, 2 / 3),
        "lambda_base": 10.0,
        "weight_decay": 1e-4,
        "balanced_epochs": ucir_balanced_epochs,
    }
    return {
        "podnet": {**podnet, "batch_size": 64, "lr": 0.05},
        "afc": {"lambda_disc": 10.0, "balanced_lr": 0.02, "weight_decay": 1e-4},
        "ucir": ucir,
        "geodl": ucir,
        "icarl": {
            **unjittered,
            "epochs": 60,
            "batch_size": 64,
            "lr": 1.0,
            "weight_decay": 1e-5,
            "milestones": (1 / 3, 1 / 2, 2 / 3, 5 / 6),
        },
        "bic": {
            **unjittered,
            "epochs": 100,
            "batch_size": 64,
            "lr": 0.025,
            "weight_decay": 1e-4,
            "milestones": (0.3, 0.6, 0.8, 0.9),
        },
        "gdumb": {**unjittered, "epochs": 128, "memory_epochs": 16},
        "ccfa": {"count": 1},  # the paper's step size follows from the dimension of the features
    }


SMALL, LARGE = _method_options(5e-4, 0), _method_options(1e-4, 20)


class ClassList(NamedTuple):
    """A list of ImageNet classes by WordNet id, in the order of their labels."""

    name: str
    wnids: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """A digest of the classes that does not depend on their order: several lists are called ImageNet-100."""
        return hashlib.sha256("\n".join(sorted(self.wnids)).encode()).hexdigest()


def class_list(data: str) -> ClassList:
    """Return the classes of imagenet100 or imagenet1000, or those in the file of `imagenet:FILE`.

    A line of the file begins with a WordNet id. Empty lines and lines that begin with # are left out.

    >>> class_list("imagenet100").sha256[:12]
    'e685f52fed13'
    """
    if data in IMAGENET_LISTS:
        return ClassList(data, tuple(published()["imagenet_wnids"][: IMAGENET_LISTS[data]]))
    path = Path(os.path.expanduser(data.partition(":")[2]))
    try:
        text = read_regular(path, 10**7).decode("utf-8", "replace")
    except DataError as error:
        raise UsageError(f"The list of classes {path} {error}.") from error
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    wnids = tuple(words[0] for words in lines)
    if wrong := [wnid for wnid in wnids if not _WNID.fullmatch(wnid)]:
        raise UsageError(f"{path} holds {wrong[0]!r}, expected one WordNet id such as n01440764 per line.")
    if not wnids or len(set(wnids)) < len(wnids):
        raise UsageError(f"{path} must hold at least one WordNet id, and each once.")
    return ClassList(data, wnids)


def described_list(data: str, class_names: Iterable[str]) -> dict[str, str] | None:
    """Return the name and the digest of the list that these classes are, if they are classes of ImageNet."""
    names = tuple(class_names)
    if not all(_WNID.fullmatch(name) for name in names):
        return None
    found = ClassList(recognise_imagenet(names) or data, names)
    return {"name": found.name, "sha256": found.sha256}


def find_photos(data: str, data_dir: Path | None = None) -> Source:
    """Return the photos of a list of classes in `data_dir` or $CCFA_DATA.

    Args:
        data: imagenet100, imagenet1000, or imagenet:FILE.
        data_dir: The folder with train/<class>/ and val/<class>/; other classes may be there, too.

    Raises:
        DataError: If a class is missing or empty.
    """
    chosen, root = class_list(data), _root(data_dir)
    if root is None:
        raise UsageError(f"Where is ImageNet? Give --data-dir DIR or set CCFA_DATA=DIR: DIR has {_LAYOUT}.")
    if not root.is_dir():
        raise DataError(f"{root} does not exist. Expected {_LAYOUT}.")
    files: dict[str, list[str]] = {}
    labels: dict[str, list[int]] = {}
    for part, folder in (("train", "train"), ("test", "val")):
        found = [_photos(root, f"{folder}/{wnid}") for wnid in chosen.wnids]
        if empty := [f"{folder}/{wnid}" for wnid, names in zip(chosen.wnids, found, strict=True) if not names]:
            raise DataError(f"{root} has no photos in {some(empty)}. Expected {_LAYOUT}.")
        files[part] = [name for names in found for name in names]
        labels[part] = [label for label, names in enumerate(found) for _ in names]
    return Source(_short(data), root, chosen.wnids, files, labels)


def _photos(root: Path, folder: str) -> list[str]:
    """The photos of a class, relative to the root; none if it has no folder."""
    try:
        names = sorted(os.listdir(root / folder))
    except OSError:
        return []
    return [f"{folder}/{name}" for name in names if name.lower().endswith((".jpeg", ".jpg", ".png"))]


def prepared_folder(data: str, data_dir: Path | None = None) -> Path | None:
    """Where `ccfa prepare` writes by default: prepared-NAME in `data_dir` or $CCFA_DATA."""
    root = _root(data_dir)
    return root / f"prepared-{_short(data)}" if root else None


def _find(data: str, data_dir: Path | None = None) -> Path | None:
    """The prepared folder in the data folder, or that is the data folder."""
    places = [place for place in (_root(data_dir), prepared_folder(data, data_dir)) if place]
    return next((place for place in places if (place / INDEX).exists() or (place / PROGRESS).exists()), None)


def _load(data: str, data_dir: Path | None = None) -> tuple[ImageSet, ImageSet]:
    chosen, found = class_list(data), _find(data, data_dir)
    if found is None:
        place = _root(data_dir) or "DIR"
        raise DataError(
            f"{data} is not prepared. Get ImageNet (image-net.org), as {_LAYOUT} in a folder, and decode it once: "
            f"ccfa prepare {data} --data-dir {place}. Then give the same --data-dir."
        )
    train, test = read_prepared(found)
    if train.class_names != chosen.wnids:
        raise DataError(f"{found} holds other classes than {data}. Prepare {data} in another folder.")
    return train, test


@register_data(
    "imagenet100",
    scenario="B50-inc10",
    order="podnet",
    options=_OPTIONS,
    method_options=SMALL,
    find=partial(_find, "imagenet100"),
)
def load_imagenet100(data_dir: Path | None = None) -> tuple[ImageSet, ImageSet]:
    """the first 100 classes of ImageNet, PODNet's list; decoded once by `ccfa prepare`"""
    return _load("imagenet100", data_dir)


@register_data(
    "imagenet1000",
    scenario="B500-inc100",
    order="podnet",
    options=_OPTIONS,
    method_options=LARGE,
    find=partial(_find, "imagenet1000"),
)
def load_imagenet1000(data_dir: Path | None = None) -> tuple[ImageSet, ImageSet]:
    """the 1,000 classes of ImageNet (ILSVRC 2012); decoded once by `ccfa prepare`"""
    return _load("imagenet1000", data_dir)


def listed(data: str) -> DataSet:
    """The data set imagenet:FILE, with the settings of imagenet100; the file is read when the images are."""
    found = partial(_find, data)
    return DataSet(data, partial(_load, data), order="seed-1993", options=_OPTIONS, method_options=SMALL, find=found)


FAMILIES["imagenet"] = listed


def _root(data_dir: Path | None) -> Path | None:
    chosen = data_dir or os.environ.get("CCFA_DATA")
    return Path(os.path.expanduser(chosen)) if chosen else None


def _short(data: str) -> str:
    return data if data in IMAGENET_LISTS else Path(data.partition(":")[2]).stem
