"""A trained model: opened from its folder, asked for predictions, measured on photos."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from ccfa.data import (
    Framing,
    Transforms,
    cache_folder,
    decode_files,
    find_images,
    frame,
    image_digests,
    read_photos,
)
from ccfa.data.images import some
from ccfa.deployment.folder import ModelFolder, State
from ccfa.deployment.scoring import Calibration, Classifier, probabilities, score
from ccfa.errors import DamagedError, DataError, ModelError, Notice, UsageError
from ccfa.experiments.experiment import experiment_method, experiment_of
from ccfa.files import damage_named
from ccfa.learning.acceleration import pick_device
from ccfa.learning.state import network_of
from ccfa.methods import Method
from ccfa.plugins import loaded_plugins
from ccfa.settings import Experiment, Running

if TYPE_CHECKING:
    from ccfa.settings import Learning

CHUNK = 64  # photos decoded at a time
RULES = ("logits", "nearest_mean")
ACCEPTED = "Images of any size are paths, images of PIL, or uint8 arrays of shape (height, width, 3), one or several"
Given = Path | str | Image.Image | NDArray[np.uint8]


class Prediction(NamedTuple):
    """What a model says about one image.

    Args:
        name: The predicted class, or "" if the file could not be read.
        confidence: How likely the class is, from 0 to 1.
        top: The most likely classes with their confidences, best first.
        unfamiliar: Whether the image is unlike the images that the model has learned.
        path: The file, if the image came from one.
        error: Why the file could not be read.
    """

    name: str
    confidence: float = 0.0
    top: tuple[tuple[str, float], ...] = ()
    unfamiliar: bool = False
    path: Path | None = None
    error: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the prediction as JSON shows it.

        >>> Prediction("ant", 0.75, (("ant", 0.75), ("bee", 0.25))).to_dict()["top"]
        [{'class': 'ant', 'confidence': 0.75}, {'class': 'bee', 'confidence': 0.25}]
        """
        file = {"file": str(self.path)} if self.path else {}
        if self.error:
            return {**file, "error": self.error}
        top = [{"class": name, "confidence": round(share, 4)} for name, share in self.top]
        return {
            **file,
            "class": self.name,
            "confidence": round(self.confidence, 4),
            "unfamiliar": self.unfamiliar,
            "top": top,
        }


class Evaluation(NamedTuple):
    """How well a model recognises the photos of a folder.

    Args:
        class_names: The classes of the model, in the order in which it learned them.
        confusion: The number of photos of class i that were taken for class j, (classes, classes).
        wrong: Each wrong photo: the true class and the prediction.
        unknown: The photos of classes that the model does not know, with their predictions.
        unreadable: The files that could not be read, with the reasons.
        seen: How many photos of known classes the model has learned from or held out before.
    """

    class_names: tuple[str, ...]
    confusion: NDArray[np.int64]
    wrong: tuple[tuple[str, Prediction], ...]
    unknown: tuple[tuple[str, Prediction], ...]
    unreadable: tuple[tuple[Path, str], ...]
    seen: int = 0

    @property
    def images(self) -> int:
        """The number of photos of known classes."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of these photos that is recognised."""
        return float(np.trace(self.confusion) / self.images) if self.images else float("nan")

    def by_class(self) -> dict[str, tuple[int, int]]:
        """The number of photos, and of recognised ones, of each class that has photos."""
        rows = zip(self.class_names, self.confusion.sum(axis=1), np.diag(self.confusion), strict=True)
        return {name: (int(images), int(right)) for name, images, right in rows if images}

    def to_dict(self) -> dict[str, object]:
        """Return everything as JSON shows it. The confusion has each true class, and what it was taken for how often.

        >>> found = Evaluation(("ant", "bee"), np.array([[3, 1], [0, 2]]), (), (), ())
        >>> found.to_dict()["confusion"]
        {'ant': {'ant': 3, 'bee': 1}, 'bee': {'bee': 2}}
        """
        by_class = {
            name: {"photos": images, "recognised": right, "accuracy": right / images}
            for name, (images, right) in self.by_class().items()
        }
        confusion = {
            name: {other: int(times) for other, times in zip(self.class_names, row, strict=True) if times}
            for name, row in zip(self.class_names, self.confusion, strict=True)
            if name in by_class
        }
        return {
            "photos": self.images,
            "seen_before": self.seen,
            "accuracy": self.accuracy,
            "mean_over_classes": sum(one["accuracy"] for one in by_class.values()) / len(by_class),
            "by_class": by_class,
            "confusion": confusion,
            "wrong": [_mistaken(*one) for one in self.wrong],
            "unknown": [_mistaken(*one) for one in self.unknown],
            "unreadable": [{"file": str(path), "error": reason} for path, reason in self.unreadable],
        }


def _mistaken(truth: str, one: Prediction) -> dict[str, object]:
    found = {"predicted": one.name, "confidence": round(one.confidence, 4), "unfamiliar": one.unfamiliar}
    return {"file": str(one.path), "class": truth, **found}


class Model:
    """A classifier that can be asked, measured, and taught more classes. Open one with `load_model`.

    Example:
        >>> import tempfile
        >>> import ccfa
        >>> from PIL import Image
        >>> place = Path(tempfile.mkdtemp())
        >>> for name in ("gold", "navy", "teal"):
        ...     (place / "photos" / name).mkdir(parents=True)
        ...     for size in range(8, 20):
        ...         Image.new("RGB", (size, 16), name).save(place / "photos" / name / f"{size}.png")
        >>> asked = ccfa.Learning(method="finetune", options={"backbone": "small", "epochs": 4}, image_size=8)
        >>> model = ccfa.learn(place / "model", place / "photos", asked)
        >>> model.class_names
        ('gold', 'navy', 'teal')
        >>> model.predict(place / "photos" / "navy" / "12.png")[0].name
        'navy'
    """

    def __init__(self, path: Path, state: State, device: torch.device) -> None:
        self.path, self.state, self.device = path, state, device
        with damage_named(path / "config.json"):
            config = state.config
            self.experiment: Experiment = experiment_of(config)
            self.class_names = tuple(str(one["name"]) for one in config["classes"])
            self.calibration = Calibration(**config["calibration"])
            shown = config["preprocessing"]
            self.framing = Framing(int(shown["size"]), float(shown["crop"]), shown["interpolation"])
            self.channels = int(shown["channels"])
            mean, std = (tuple(float(value) for value in shown[name]) for name in ("mean", "std"))
            centre = float(shown["centre"])
            transforms = Transforms(mean, std, scale=(0.08, 1.0) if centre < 1 else None, centre=centre)
            self.rule = str(config["rule"])
            stage_index = int(config["learner"]["stage"][0])
        self.method = _method_of(path, self.experiment, config.get("plugins", {}))
        weights = dict(state.network)
        directions = weights.pop("directions", None)
        network = network_of(self.method, self.channels, stage_index, weights)
        if network.head.num_classes != len(self.class_names) or (self.rule, directions) == ("nearest_mean", None):
            raise ModelError(f"{path} is damaged: its network and its {len(self.class_names)} classes do not fit.")
        self.classifier = Classifier(
            network, transforms, self.calibration.temperature, directions, self.rule == "nearest_mean"
        ).to(device)

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r}, {len(self.class_names)} classes, {self.experiment.method})"

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, without the digests."""
        return self.state.config

    def predict(self, images: "Given | Iterable[Given] | Tensor", top: int = 5) -> list[Prediction]:
        """Predict the class of each image.

        Args:
            images: The path of a file or of a folder, an image of any size (of PIL, or a uint8 array of shape (height,
                width, 3)), several of these, or pixels that are framed as the model's own images: uint8, of shape
                (number of images, channels, size, size).
            top: How many classes to list for each image.

        Returns:
            One prediction per image. A file that cannot be read has a prediction with an `error`.
        """
        if isinstance(images, Tensor) or (isinstance(images, np.ndarray) and images.ndim != 3):
            return self._predicted(self._checked(images), top)
        given = [images] if isinstance(images, str | Path | Image.Image | np.ndarray) else images
        if not isinstance(given, Iterable):
            raise UsageError(f"{ACCEPTED}, got {type(given).__name__}.")
        found: list[Prediction] = []
        for is_path, group in groupby(given, lambda one: isinstance(one, str | Path)):
            if is_path:
                found += self.predict_files(expanded(group), top)
            else:
                found += self._predict_images(group, top)
        return found

    def _predict_images(self, images: Iterable[object], top: int) -> Iterator[Prediction]:
        while chunk := list(islice(images, CHUNK)):
            pixels = np.stack([_framed(image, self.framing) for image in chunk])
            yield from self._predicted(self.gray_if_needed(torch.from_numpy(pixels)), top)

    def predict_files(self, paths: Iterable[Path], top: int = 5) -> Iterator[Prediction]:
        """Predict the class of each file, one after the other; the files are read in chunks."""
        _require_some(top)
        paths = iter(paths)
        while chunk := list(islice(paths, CHUNK)):
            pixels, good, unreadable = decode_files(chunk, self.framing)
            reasons = dict(unreadable)
            found = iter(self._predicted(self.gray_if_needed(torch.from_numpy(pixels)), top) if len(good) else [])
            for path in chunk:
                if path in reasons:
                    error = "has no photos" if os.path.isdir(path) else reasons[path]
                    yield Prediction("", path=path, error=error)
                else:
                    yield next(found)._replace(path=path)

    def gray_if_needed(self, pixels: Tensor) -> Tensor:
        if self.channels == 3:
            return pixels
        weights = torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]
        return (pixels * weights).sum(dim=1, keepdim=True).round().to(torch.uint8)

    def _checked(self, pixels: Tensor | NDArray[Any]) -> Tensor:
        wanted, kind = (self.channels, self.framing.size, self.framing.size), str(pixels.dtype).removeprefix("torch.")
        if kind != "uint8" or tuple(pixels.shape[1:]) != wanted:
            raise UsageError(
                f"Framed images must be uint8 of shape (number of images, {', '.join(map(str, wanted))}), got {kind} "
                f"of shape {tuple(pixels.shape)}. {ACCEPTED}."
            )
        if isinstance(pixels, np.ndarray):
            pixels = np.require(pixels, requirements=["C", "W"])  # a copy where torch cannot share the memory
        return torch.as_tensor(pixels)

    def _predicted(self, pixels: Tensor, top: int) -> list[Prediction]:
        _require_some(top)
        scores, familiarity = score(self.classifier, pixels)
        shares = probabilities(scores, self.calibration.temperature)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        limit = self.calibration.unfamiliar_below
        predictions = []
        for row, order in enumerate(best):
            listed = tuple((self.class_names[label], float(shares[row, label])) for label in order)
            unfamiliar = limit is not None and bool(familiarity[row] < limit)
            predictions.append(Prediction(*listed[0], listed, unfamiliar))
        return predictions

    def evaluate(self, folder: Path | str, recursive: bool = False) -> Evaluation:
        """Measure how well the model recognises the photos of a folder.

        Args:
            folder: A folder with one subfolder per class. Photos of classes that the model does not know are
                predicted too and counted apart.
            recursive: Whether to read the subfolders of the class folders.

        Returns:
            The accuracy of each class, the confusions and the wrong photos.
        """
        photos = read_photos(Path(folder), self.framing, recursive=recursive, cache=cache_folder())
        names = [photos.images.class_names[label] for label in photos.images.labels.tolist()]
        found = self._predicted(self.gray_if_needed(photos.images.images), 5)
        labels = {name: label for label, name in enumerate(self.class_names)}
        confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
        wrong, unknown, seen = [], [], 0
        known = {bytes(one) for one in self.state.learner["photos"].numpy()}
        digests = image_digests(photos.images.images.numpy())
        for truth, prediction, path, digest in zip(names, found, photos.paths, digests, strict=True):
            told = truth, prediction._replace(path=path)
            if truth not in labels:
                unknown.append(told)
                continue
            seen += digest in known
            confusion[labels[truth], labels[prediction.name]] += 1
            if truth != prediction.name:
                wrong.append(told)
        if not confusion.any():
            raise DataError(f"No class of {folder} is known to the model. Its classes are {some(self.class_names)}.")
        return Evaluation(self.class_names, confusion, tuple(wrong), tuple(unknown), photos.unreadable, seen)

    def learn(self, folder: Path | str, asked: "Learning | None" = None) -> "Model":
        """Learn the new classes of a folder, from its photos and the model's own memory.

        The model's folder is changed when everything is learned, in one step. This object stays as it is. It learns on
        the device that the model was loaded on.

        Args:
            folder: A folder with one subfolder per class.
            asked: What to do with known classes, how long the history is, and so on.

        Returns:
            The model as it is now.
        """
        from ccfa.deployment.updating import learn

        return learn(self.path, folder, asked, Running(device=str(self.device)))


def _method_of(path: Path, experiment: Experiment, plugins: Mapping[str, str]) -> Method:
    """Build the model's method. Plug-ins that it was made with are named if they are missing, and never loaded."""
    loaded = loaded_plugins()
    if changed := [name for name in plugins if loaded.get(name, plugins[name]) != plugins[name]]:
        told = f"{path} was made with another version of {some(changed)}, so its predictions may have changed."
        warnings.warn(Notice(told), stacklevel=4)
    try:
        return experiment_method(experiment)
    except UsageError as error:
        if missing := sorted(plugins.keys() - loaded.keys()):
            told = f"{path} was made with plug-ins: add --plugin {' --plugin '.join(missing)}"
            raise UsageError(f"{told} (in Python, call ccfa.load_plugin before).") from error
        raise


def load_model(path: Path | str, device: str = "auto") -> Model:
    """Open a model that `ccfa learn` or `ccfa model` has made.

    Every file is verified, and nothing in it can execute code. A method or a backbone of your own must be registered
    before: import its module, or call `load_plugin`.

    Args:
        path: The model's folder.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    Returns:
        The model.
    """
    folder = ModelFolder(path)
    with undo_named(folder):
        return Model(Path(path), folder.read(), pick_device(device))


@contextmanager
def undo_named(folder: ModelFolder) -> Iterator[None]:
    """Let an error about a damaged model say how to go back to the state before, if there is one."""
    try:
        yield
    except DamagedError as error:
        if not folder.earlier():
            raise
        hint = f"`ccfa undo {folder.path}` goes back to the state before the last update."
        raise DamagedError(f"{error} {hint}") from error


def _framed(image: object, framing: Framing) -> NDArray[np.uint8]:
    """Frame an image as if it were read from a file."""
    got = f"{image.dtype} of shape {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,) and image.size:
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image) or 0 in image.size:
        raise UsageError(f"{ACCEPTED}, got {got}.")
    return frame(ImageOps.exif_transpose(image), framing)


def _require_some(top: int) -> None:
    if top < 1:
        raise UsageError(f"At least one class must be listed for each image, got {top}.")


def expanded(paths: Iterable[Path | str]) -> Iterator[Path]:
    """The files that are meant: a folder stands for the images in it, and for itself if there are none."""
    for given in paths:
        path = Path(given)
        try:
            yield from find_images(path) if os.path.isdir(path) else [path]
        except DataError:
            yield path  # reading it will say why
