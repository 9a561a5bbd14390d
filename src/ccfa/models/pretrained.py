"""Pretrained backbones: any model of timm, and weights from a file that cannot execute code."""

import difflib
import hashlib
import importlib
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ccfa.data.images import some
from ccfa.errors import DataError, ModelError, ResourceError, UsageError, choose, installing
from ccfa.files import TENSOR_LIMIT, read_regular
from ccfa.models.backbone import Backbone, BackboneBuilder, Features, MapMixing, backbone_builder, require_backbone

# Parts of the name of a tensor that belongs to a classifier, in files of timm, of torchvision and of ccfa.
CLASSIFIERS = frozenset(("fc", "head", "heads", "head_dist", "classifier"))
TORCH_FILES = (".pt", ".pth", ".bin")


# Models of timm.


def import_timm() -> ModuleType:
    """Return the package timm, which is an optional extra."""
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError, AttributeError) as error:  # what a torchvision that does not fit raises
        if isinstance(error, ModuleNotFoundError) and error.name == "timm":
            raise UsageError(f"Backbones of timm need an extra: {installing('timm')}") from None
        raise UsageError(
            f"timm cannot be imported: {error}. It needs the torchvision that was built for torch {torch.__version__}: "
            f"install both from the same index, see docs/backbones.md."
        ) from error


class PretrainedConfig(NamedTuple):
    """What images a pretrained model was made for."""

    name: str  # with the tag of its weights
    size: int  # width and height
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float  # the part of a photo's shorter side that timm's own evaluation looks at
    interpolation: str
    fixed_size: bool  # the model must be built for the size of its images
    has_weights: bool


def pretrained_config(name: str) -> PretrainedConfig:
    """Return what timm says about a model: the size of its images, mean and std of their pixels, and more.

    Args:
        name: The name of a model of timm, with or without the tag of its weights, such as `resnet18.a1_in1k`.
    """
    timm = import_timm()
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):  # there are too many to name them all
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise UsageError(f"timm has no model {architecture!r}.{hint} timm.list_models() names them all.")
    found = timm.get_pretrained_cfg(architecture)
    if tag:
        found = choose(f"weights of {architecture}", name, timm.models.get_arch_pretrained_cfgs(architecture))
    return PretrainedConfig(
        name=".".join(filter(None, (found.architecture, found.tag))),
        size=found.input_size[-1],
        mean=tuple(found.mean),
        std=tuple(found.std),
        crop=found.crop_pct,
        interpolation=found.interpolation,
        fixed_size=found.fixed_input_size,
        has_weights=found.has_weights,
    )


@dataclass(frozen=True)
class Timm:
    """A model of timm without its classifier. Calling it with the number of channels builds the backbone.

    Args:
        name: The name of the model. Without a tag, timm's default weights are meant.
        pretrained: Start with timm's weights. They are downloaded once.
        image_size: The width and height on which the model works; other images are resized to it. By default it is
            the size that the weights were trained on.
    """

    name: str
    pretrained: bool = True
    image_size: int | None = None

    def __post_init__(self) -> None:
        config = self.config
        if self.image_size is not None and self.image_size < 1:
            raise UsageError(f"The image size must be at least 1 pixel, got {self.image_size}.")
        object.__setattr__(self, "name", config.name)
        object.__setattr__(self, "image_size", self.image_size or config.size)

    @property
    def config(self) -> PretrainedConfig:
        """What timm says about the model."""
        return pretrained_config(self.name)

    def __call__(self, channels: int) -> "TimmBackbone":
        timm, config, size = import_timm(), self.config, self.image_size or 0
        if self.pretrained and not config.has_weights:
            raise UsageError(f"timm has no weights for {self.name}. Use --weights none, or --weights FILE.")
        # Only models that must know the size of their images take it as an argument.
        sized = {"img_size": size} if config.fixed_size and size != config.size else {}
        arguments = {"num_classes": 0, "in_chans": channels, **sized}
        try:
            module = timm.create_model(self.name, pretrained=self.pretrained, **arguments)
        except Exception as error:  # of every kind: from the network, the hub's client, the model
            if not self.pretrained:
                raise UsageError(f"timm cannot build {self.name} for images of {size} pixels: {error}") from error
            raise ResourceError(
                f"The weights of {self.name} could not be loaded. Use --weights FILE with a file that you have, or "
                f"--weights none. {type(error).__name__}: {error}"
            ) from error
        return TimmBackbone(module, channels, size, config.interpolation)


class TimmBackbone(nn.Module):
    """f: a model of timm; made by `Timm`."""

    def __init__(self, module: Any, channels: int, image_size: int, interpolation: str) -> None:
        super().__init__()
        self.module = module
        self.image_size, self.interpolation = image_size, interpolation
        if not hasattr(module, "forward_intermediates"):
            raise UsageError(f"timm does not give the maps of {type(module).__name__}, so it cannot be a backbone.")
        for layer in module.modules():
            # What is dropped at random is in no checkpoint. Some models drop in functions, at a rate of their own.
            rates = {"p", "drop_prob"} if "Drop" in type(layer).__name__ else {"drop_rate", "attn_drop_p"}
            vars(layer).update(dict.fromkeys(vars(layer).keys() & rates, 0.0))
        self.dim = self._measured(channels)

    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        if mixing is not None:
            raise UsageError(
                "Manifold Mixup mixes maps between the levels of a backbone, and a model of timm runs as a whole. "
                "Use mixup or cutmix."
            )
        size = (self.image_size, self.image_size)
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode=self.interpolation, antialias=True)
        final, maps = self.module.forward_intermediates(images, output_fmt="NCHW")
        return Features(tuple(maps), self.module.forward_head(final, pre_logits=True))

    def _measured(self, channels: int) -> int:
        """Return the width of the embedding: of some models timm names another one."""
        self.eval()
        image = torch.zeros(1, channels, self.image_size, self.image_size)
        try:
            with torch.no_grad():
                shape = self(image).embedding.shape
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UsageError(
                f"{type(self.module).__name__} did not take images of {self.image_size} x {self.image_size} pixels. "
                f"Choose another --image-size. {error}"
            ) from error
        finally:
            self.train()
        if len(shape) != 2:
            raise UsageError(
                f"The embedding of {type(self.module).__name__} has the shape {tuple(shape)}, not (B, dim)."
            )
        return int(shape[1])


# Weights from a file.


class Loaded(NamedTuple):
    """What was taken from a file of weights."""

    num_tensors: int
    sha256: str


@dataclass(frozen=True)
class FromFile:
    """A backbone that starts with the weights of a file. Calling it with the number of channels builds the backbone.

    Args:
        backbone: Makes the backbone.
        sha256: The digest of the file.
        path: Where the file is. Not shown: it does not decide what is learned.
    """

    backbone: BackboneBuilder
    sha256: str
    path: Path = field(repr=False)

    def __call__(self, channels: int) -> Backbone:
        made = require_backbone(self.backbone(channels))
        if load_weights(made, self.path).sha256 != self.sha256:
            raise ModelError(f"{self.path} has changed since it was first read. Put it back, or start a new run.")
        return made


@dataclass(frozen=True)
class FromTensors:
    """A backbone that starts with given weights, by name."""

    backbone: BackboneBuilder
    tensors: Mapping[str, Tensor] = field(repr=False)

    def __call__(self, channels: int) -> Backbone:
        made = require_backbone(self.backbone(channels))
        made.load_state_dict(self.tensors)
        return made


def with_weights(choice: str | BackboneBuilder, weights: str | None, image_size: int | None = None) -> BackboneBuilder:
    """Return the function that makes a backbone with the weights it starts from.

    Args:
        choice: A backbone, as a method takes it.
        weights: `pretrained`, `none` (random), or the path of a file; by default `pretrained` for a model of timm.
        image_size: The width and height on which a model of timm works; by default its own.

    Returns:
        A function `channels -> backbone`, for the option `backbone` of a method.

    >>> import tempfile
    >>> from ccfa.files import write_tensors
    >>> from ccfa.models import BACKBONES
    >>> file = tempfile.mkdtemp() + "/small.safetensors"
    >>> write_tensors(Path(file), BACKBONES["small"](3).state_dict(), {})
    >>> with_weights("small", file)(3).dim
    64
    """
    builder = backbone_builder(choice)
    own = weights in (None, "pretrained")
    if isinstance(builder, Timm):
        builder = replace(builder, pretrained=own and builder.pretrained, image_size=image_size or builder.image_size)
    elif weights == "pretrained":
        raise UsageError("Only backbones of timm have weights of their own. Use timm:NAME, or --weights FILE.")
    if own or weights == "none":
        return builder
    path = Path(str(weights)).expanduser()
    return FromFile(builder, hashlib.sha256(_content(path)).hexdigest(), path)


def untrained(builder: BackboneBuilder) -> BackboneBuilder:
    """Return the same backbone with random weights, for a network that takes over stored ones."""
    if isinstance(builder, FromFile | FromTensors):
        return untrained(builder.backbone)
    return replace(builder, pretrained=False) if isinstance(builder, Timm) else builder


def timm_model(builder: BackboneBuilder) -> Timm | None:
    """Return the model of timm that a builder makes, if it makes one."""
    if isinstance(builder, FromFile | FromTensors):
        return timm_model(builder.backbone)
    return builder if isinstance(builder, Timm) else None


def timm_version(builder: BackboneBuilder) -> str | None:
    """Return the version of timm if a builder makes one of its models: it decides what is computed."""
    return None if timm_model(builder) is None else str(import_timm().__version__)


def load_weights(backbone: Backbone, file: Path | str) -> Loaded:
    """Load the weights of a file into a backbone.

    The names in the file may have any prefix. The classifier in the file is left out. Everything else must fit.

    Args:
        backbone: The backbone. It is changed in place.
        file: A safetensors file, or a file of torch (.pt, .pth, .bin) that holds tensors only. The files in
            `networks/` of a run are safetensors files, too.

    Returns:
        The number of tensors that were taken, and the SHA-256 digest of the file.

    >>> import tempfile
    >>> from ccfa.models import BACKBONES
    >>> file = tempfile.mkdtemp() + "/small.pt"
    >>> torch.save({"state_dict": BACKBONES["small"](3).state_dict()}, file)
    >>> load_weights(BACKBONES["small"](3), file).num_tensors
    42
    """
    path = Path(file)
    content = _content(path)
    target = getattr(backbone, "module", backbone)  # of timm's models and of wrapped ones
    own, stored = target.state_dict(), _tensors(path, content)
    prefix = _prefix(stored, own)
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    taken = {name: tensor for name, tensor in found.items() if name in own}
    problems = {
        "Missing": [name for name in own if name not in taken and not name.endswith("num_batches_tracked")],
        "Not part of the network": [
            name
            for name in stored
            if not CLASSIFIERS.intersection(name.split("."))
            and not (name.startswith(prefix) and name.removeprefix(prefix) in own)
        ],
        "Of another shape": [
            f"{name} {tuple(taken[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in taken and taken[name].shape != tensor.shape
        ],
    }
    if any(problems.values()):
        told = "".join(f"\n{problem}: {some(names)}." for problem, names in problems.items() if names)
        raise ModelError(f"{path}: these weights are of another network.{told}")
    target.load_state_dict({**own, **taken})
    return Loaded(len(taken), hashlib.sha256(content).hexdigest())


def _content(path: Path) -> bytes:
    if path.suffix != ".safetensors" and path.suffix not in TORCH_FILES:
        kinds = ", ".join((".safetensors", *TORCH_FILES))
        raise UsageError(f"Weights are `pretrained`, `none`, or a file with the ending {kinds}; got {str(path)!r}.")
    try:
        return read_regular(path, TENSOR_LIMIT)
    except DataError as error:
        raise ModelError(f"{path} {error}.") from error


def _tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file by name; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load(content)
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make the readers raise almost anything
        raise ModelError(
            f"{path} cannot be read as a file of tensors. If it holds other objects, save the weights alone, best with "
            f"safetensors. {error}"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
    if not isinstance(stored, Mapping) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ModelError(f"{path} does not hold tensors by name, nor a `state_dict` or `model` of them.")
    return {str(name): tensor for name, tensor in stored.items()}


def _prefix(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return what most of the network's names have in front of them in the file."""
    prefixes: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for start in range(min(len(parts), 8)):
            if ".".join(parts[start:]) in own:
                prefixes[".".join([*parts[:start], ""])] += 1
    return min(prefixes, key=lambda prefix: (-prefixes[prefix], len(prefix), prefix), default="")
