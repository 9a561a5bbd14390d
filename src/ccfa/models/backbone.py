"""Backbones f: what each must give, the chain of levels that ours are, and any torch module as a backbone."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from ccfa.errors import UsageError, choose
from ccfa.plugins import Registry


class Features(NamedTuple):
    """The maps of each level and the pooled embedding Z of a batch of images."""

    maps: tuple[Tensor, ...]  # (B, C, H, W) per level
    embedding: Tensor  # (B, dim)


class MapMixing(NamedTuple):
    """Row i becomes share * row i + (1 - share) * row partners[i], before the level drawn for the batch."""

    level: Tensor  # ()
    partners: Tensor  # (B,)
    share: Tensor  # ()

    def before(self, level: int, maps: Tensor) -> Tensor:
        """What enters a level: mixed if it is the chosen one, decided on the device."""
        share = torch.where(self.level == level, self.share, torch.ones_like(self.share)).to(maps.dtype)
        return share * maps + (1 - share) * maps[self.partners]


class Backbone(Protocol):
    """f: a torch module with a `dim` whose `forward` returns `Features`.

    Everything but `dim` and `forward` comes with `torch.nn.Module`. Use `wrap` for a module that returns a tensor.
    """

    dim: int  # of the embedding

    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        """The features of normalised images; with `mixing`, rows are mixed before one of the levels."""

    def __call__(self, images: Tensor, mixing: MapMixing | None = None) -> Features: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> Self: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


BackboneBuilder = Callable[[int], Backbone]
"""channels of the images -> a freshly initialised backbone."""

BACKBONES: Registry[BackboneBuilder] = Registry("backbone", "ccfa.backbones")


def register_backbone(name: str) -> Callable[[BackboneBuilder], BackboneBuilder]:
    """Give a backbone a name, for `podnet(backbone=NAME)` and `--set backbone=NAME`.

    Args:
        name: The name. A name that is taken is refused.

    Returns:
        A decorator for a function that takes the number of image channels and returns a backbone. It returns the
        function unchanged.

    Example:
        >>> from ccfa.models import BACKBONES
        >>> @register_backbone("two-layers")
        ... def two_layers(channels):
        ...     return wrap(nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3)), ["1", "2"])
        >>> BACKBONES["two-layers"](3).dim
        16
    """
    return lambda build: BACKBONES.add(name, build)


def backbone_builder(choice: str | BackboneBuilder | nn.Module) -> BackboneBuilder:
    """The function that makes a backbone: by name, as it is, or copies of a module with the weights that it has."""
    if isinstance(choice, str):
        if choice.startswith("timm:"):
            from ccfa.models.pretrained import Timm  # which is built on this module

            return Timm(choice.removeprefix("timm:"))
        try:
            return choose("backbone", choice, BACKBONES)
        except UsageError as error:
            raise UsageError(f"{error} Networks of timm, most of them pretrained, are called timm:NAME.") from None
    if isinstance(choice, nn.Module):
        module = require_backbone(choice)

        def copies(channels: int) -> Backbone:
            return copy.deepcopy(module)

        copies.__name__ = str(getattr(module, "description", type(module).__name__))  # as the configuration shows it
        return copies
    if not callable(choice):
        raise UsageError(
            f"A backbone is a name ({', '.join(BACKBONES)}), a function of the number of channels that returns one, "
            f"or a module made by wrap(...); got {choice!r}."
        )
    return choice


def require_backbone(made: object) -> Backbone:
    """The backbone, or an error that says what it lacks."""
    if isinstance(made, nn.Module) and isinstance(getattr(made, "dim", None), int):
        return made  # type: ignore[return-value]
    raise UsageError(
        f"{type(made).__name__} is not a backbone: it must be a torch module with a whole number `dim` whose forward "
        f"returns Features. Use ccfa.wrap(module, levels=[...]) to make one of any torch module."
    )


class ChainBackbone(nn.Module):
    """f: a chain of levels followed by global average pooling."""

    def __init__(self, levels: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.dim = dim

    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        maps = []
        for index, level in enumerate(self.levels):
            images = level(mixing.before(index, images) if mixing else images)
            maps.append(images)
        return Features(tuple(maps), maps[-1].mean(dim=(2, 3)))


class Branches(nn.Module):
    """Backbones side by side: their embeddings one after the other, and the maps of the active one, which alone trains.

    Branches after the active one do not run; at first the last one is active.
    """

    def __init__(self, branches: Sequence[Backbone]) -> None:
        super().__init__()
        self.branches: Sequence[Backbone] = nn.ModuleList(branches)  # type: ignore[assignment,arg-type]
        self.dim = sum(branch.dim for branch in branches)
        self.activate(len(branches) - 1)

    def activate(self, place: int) -> None:
        """Train this branch from now on; its mode is set by `train`."""
        self.active = place
        for index, branch in enumerate(self.branches):
            for parameter in branch.parameters():
                parameter.requires_grad_(index == place)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for index, branch in enumerate(self.branches):
            branch.train(mode and index == self.active)
        return self

    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        return self.joined(lambda branch: branch(images, mixing))

    def joined(self, features_of: Callable[[Backbone], Features]) -> Features:
        """The features of the whole, made of those that a function gives for each branch."""
        parts = [features_of(branch) for branch in self.branches[: self.active + 1]]
        return Features(parts[-1].maps, torch.cat([part.embedding for part in parts], dim=1))


def wrap(module: nn.Module, levels: Sequence[str], dim: int | None = None) -> "WrappedBackbone":
    """Make a backbone of any torch module, to be given to a method as `backbone`.

    Args:
        module: Takes normalised images (B, channels, H, W). Its output is the embedding, (B, dim), or maps
            (B, dim, H, W), which are averaged over space. Remove its classifier first.
        levels: Names of submodules, as in `module.named_modules()`, in the order in which they run. Their outputs,
            (B, C, H, W), are the maps that POD and AFC distil.
        dim: The size of the embedding. If None, one image of 32 x 32 pixels is passed through the module to find it.

    Returns:
        A backbone. It shares its weights with `module`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        >>> wrap(net, levels=["1", "3"]).dim
        16
    """
    if isinstance(levels, str) or not levels:
        raise UsageError(f"wrap needs the names of at least one submodule as levels, got {levels!r}.")
    for name in levels:
        choose(f"submodule of {type(module).__name__}", name, dict(module.named_modules()))
    return WrappedBackbone(module, tuple(levels), dim)


class WrappedBackbone(nn.Module):
    """Somebody else's module as a backbone; made by `wrap`."""

    def __init__(self, module: nn.Module, levels: tuple[str, ...], dim: int | None) -> None:
        super().__init__()
        self.module = module
        self.levels_read = levels
        self.dim = self._probed() if dim is None else dim

    @property
    def description(self) -> str:
        """The module and its levels, as a run's configuration names them."""
        return f"{type(self.module).__name__}[{', '.join(self.levels_read)}]"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # hooks that come and go cannot be traced
    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        if mixing and len(self.levels_read) < 2:
            raise UsageError("Manifold Mixup mixes before, after and between levels, so wrap at least 2.")
        seen: dict[str, Tensor] = {}

        def read(name: str, place: int, output: Tensor) -> Tensor | None:
            seen[name] = self._checked(f"Level {name!r}", output, (4,), "maps (B, C, H, W)")
            return mixing.before(place, output) if mixing else None

        with contextlib.ExitStack() as hooks:  # for this call only, so that copies of the module have none
            for place, name in enumerate(self.levels_read, start=1):
                level = self.module.get_submodule(name)
                hook = level.register_forward_hook(lambda m, i, output, n=name, p=place: read(n, p, output))
                hooks.callback(hook.remove)
            output = self.module(mixing.before(0, images) if mixing else images)
        if missing := [name for name in self.levels_read if name not in seen]:
            raise UsageError(f"{type(self.module).__name__} did not run its submodules {', '.join(missing)}.")
        output = self._checked("The output", output, (2, 4), "an embedding (B, dim) or maps (B, dim, H, W)")
        embedding = output if output.dim() == 2 else output.mean(dim=(2, 3))
        return Features(tuple(seen[name] for name in self.levels_read), embedding)

    def _checked(self, what: str, output: object, dims: tuple[int, ...], wanted: str) -> Tensor:
        if isinstance(output, Tensor) and output.dim() in dims:
            return output
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"{what} of {type(self.module).__name__} must be {wanted}, got {got}. Reshape tokens to maps.")

    def _probed(self) -> int:
        first = next((layer for layer in self.module.modules() if isinstance(layer, nn.Conv2d)), None)
        like = next(self.module.parameters(), torch.empty(0))
        image = like.new_zeros(1, first.in_channels if first else 3, 32, 32)
        was_training, _ = self.module.training, self.module.eval()
        try:
            with torch.no_grad():
                return self(image).embedding.shape[1]  # type: ignore[no-any-return]
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(
                f"{type(self.module).__name__} did not take an image of shape {tuple(image.shape)}, so give its `dim`: "
                f"{error}"
            ) from error
        finally:
            self.module.train(was_training)
