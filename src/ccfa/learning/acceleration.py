"""Devices, precision, compilation, and a step as one CUDA graph.

Nothing here changes what is computed, up to the rounding of the chosen precision.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Generator, Tensor, nn, optim

from ccfa import losses
from ccfa.data import ImageSet
from ccfa.errors import ResourceError, UsageError
from ccfa.kernels.graphs import Aside, StepFunction, aside, captured
from ccfa.kernels.pod import pod_spatial
from ccfa.kernels.resnet import branch_features, chain_features
from ccfa.kernels.rows import cosine_distance
from ccfa.models import Backbone, Branches, Features, Network
from ccfa.models.aggregation import blended, kernels_and_factors
from ccfa.models.backbone import MapMixing
from ccfa.models.resnet import as_branches, as_chain

MAX_VARIANTS = 128  # of a compiled function: a few for each backbone
TINY = 16 * 16  # numbers in an image
RESIDENT_SHARE = 0.5  # of the free memory of a GPU: the rest is for the networks
Precision = Literal["float32", "tf32", "bf16"]
BY_KERNELS: dict[Callable[..., Tensor], Callable[..., Tensor | None]] = {
    losses.pod_spatial: pod_spatial,
    losses.cosine_distance: cosine_distance,
}
"""Functions of which kernels of our own compute some cases; for the others they return None."""
T = TypeVar("T")


@dataclass(frozen=True)
class Acceleration:
    """How a step runs: precision, a compiled backbone, the whole step as one graph."""

    precision: Precision = "float32"
    compile: bool = False
    graph: bool = False

    @classmethod
    def for_device(
        cls, device: torch.device, precision: Precision | None = None, compile: bool = True, graph: bool = True
    ) -> "Acceleration":
        """Everything on a GPU, in bf16 unless `precision` says otherwise; nothing on a CPU, where it does not pay."""
        if device.type == "cuda":
            return cls(precision or "bf16", compile, graph)
        if precision not in (None, "float32"):
            raise UsageError(f"--precision {precision} needs a GPU; on a CPU everything is float32.")
        return cls()

    def shared_by(self, num_processes: int) -> "Acceleration":
        """The same for processes that share a step: several neither compile nor capture it."""
        return self if num_processes == 1 else replace(self, compile=False, graph=False)

    def place(self, network: Network, device: torch.device) -> Network:
        """The network on its device, in the memory layout that is fast there."""
        if device.type == "cuda":
            convolutions = (module for module in network.backbone.modules() if isinstance(module, nn.Conv2d))
            frozen = [found[0] for found in map(kernels_and_factors, convolutions) if found]
            for tensor in (*network.backbone.parameters(), *frozen):
                if tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        return network.to(device)

    def features(self, backbone: Backbone, images: Tensor, mixing: MapMixing | None = None) -> Features:
        """A training step's features: maps in the working precision, the embedding in float32.

        A process without images in a batch computes those of one blank image and drops them, since not every backbone
        or kernel takes an empty batch. `shared_batch_norm` learns nothing from the blank image.
        """
        if not len(images):
            maps, embedding = self.features(backbone, images.new_zeros(1, *images.shape[1:]), mixing)
            return Features(tuple(level[:0] for level in maps), embedding[:0])
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            if isinstance(backbone, Branches):
                images = _channels_last(images)  # once for all
                features = backbone.joined(lambda branch: self._forward(branch, images, mixing))
            else:
                features = self._forward(backbone, images, mixing)
        embedding = features.embedding
        return Features(features.maps, embedding.to(torch.promote_types(embedding.dtype, torch.float32)))

    def _forward(self, backbone: Backbone, images: Tensor, mixing: MapMixing | None) -> Features:
        """By our own kernels if they know the backbone, else compiled if compilation is on."""
        if self.compile and self.precision == "bf16" and mixing is None:
            found = None
            if chain := as_chain(backbone):
                found = chain_features(chain, images)
            elif levels := as_branches(backbone):
                found = branch_features(levels, images, self.fused(blended))
            if found:
                return Features(*found)
        images = _channels_last(images)
        if not self.compile:
            return _forward(backbone, images, mixing)
        # Compiled as a function of the backbone, so that one compilation serves every stage's network and every branch.
        features: Features = _compiled(_forward)(backbone, images, mixing)
        return features

    def fused(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of tensors as few kernels, where compilation is on: our own if there are any, else compiled."""
        if not self.compile:
            return function
        by_kernels, compiled = BY_KERNELS.get(function), _compiled(function)
        if by_kernels is None:
            return compiled

        def tried(*tensors: Any) -> Tensor:
            found = by_kernels(*tensors)
            result: Tensor = compiled(*tensors) if found is None else found
            return result

        return tried

    def set_rounding(self, device: torch.device) -> None:
        """Let a GPU round in convolutions and, if asked for, in products. This holds for the whole process."""
        if device.type == "cuda":
            # Products outside the backbone decide signs, targets and exemplars.
            torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = self.precision != "float32"

    def aside(self, name: str, device: torch.device, compute: Callable[[], T]) -> Aside[T]:
        """Compute a value beside the rest of the step, in a captured step as a branch of the graph.

        Every step must wait for what it computes aside.
        """
        return aside(name, device, compute) if self.has_branches(device) else Aside(compute())

    def has_branches(self, device: torch.device) -> bool:
        """Whether what is computed aside runs beside the rest of the step."""
        return self.graph and device.type == "cuda"

    def prepare(
        self,
        step: StepFunction,
        batch: tuple[Tensor, ...],
        network: nn.Module,
        optimiser: optim.Optimizer,
        generator: Generator,
    ) -> StepFunction:
        """The step as it will run on many batches of one shape: captured as a graph if it can be."""
        on_gpu = batch[0].is_cuda
        rates_can_change = all(isinstance(group["lr"], Tensor) for group in optimiser.param_groups)
        if self.graph and on_gpu and rates_can_change:
            return captured(step, batch, network, optimiser, generator)
        return step


def _channels_last(images: Tensor) -> Tensor:
    """In the memory layout that is fast on a GPU."""
    return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images


def _forward(backbone: Backbone, images: Tensor, mixing: MapMixing | None) -> Features:
    features: Features = backbone(images) if mixing is None else backbone(images, mixing)
    return features


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled once in a process."""
    # One function serves the backbones of all runs of a sweep. Beyond the limit the rest would not be compiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    # Kernels that do not depend on each other, such as the casts of all weights, are launched as one.
    return torch.compile(function, dynamic=False, options={"combo_kernels": True})


class LossReader:
    """Reads a number from a device without waiting for it: ask, go on, and look for the answer later."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def ask(self, number: Tensor) -> None:
        """Ask for the value that the number will have when all steps so far are finished."""
        if not number.is_cuda:
            self._copy, self._arrived = number.detach(), None
            return
        if self._copy is None or self._arrived is None:  # made once: memory that is freed amid a capture ends it
            self._copy, self._arrived = torch.empty((), dtype=number.dtype, pin_memory=True), torch.cuda.Event()
        self._copy.copy_(number.detach(), non_blocking=True)
        self._arrived.record()

    def answer(self) -> float | None:
        """Return the value that was asked for, or None if it has not arrived yet."""
        if self._copy is None or (self._arrived and not self._arrived.query()):
            return None
        return float(self._copy)


def images_on(device: torch.device, images: ImageSet) -> ImageSet:
    """The images on a device; streamed ones are read into a GPU's memory if they take at most half of what is free.

    Otherwise each batch is read from its file, which the system keeps in the host's memory as far as it fits.
    """
    if device.type != "cuda":
        return images.to(device)
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device, resident=len(images) * math.prod(images.shape) <= RESIDENT_SHARE * free)


_lowered_from: int | None = None  # threads before tiny images


def suit_threads(num_values: int) -> None:
    """Use one CPU thread for tiny images, where more cost time, and all of them again for others.

    The variable OMP_NUM_THREADS takes precedence.

    Args:
        num_values: The numbers in an image: channels times height times width.
    """
    global _lowered_from
    wanted, now = threads_for(num_values), torch.get_num_threads()
    if wanted == 1 < now:
        _lowered_from = now
        torch.set_num_threads(1)
    elif _lowered_from and wanted > 1:
        torch.set_num_threads(wanted)
        _lowered_from = None


def threads_for(num_values: int) -> int:
    """The number of CPU threads that a run on images of this size uses."""
    usual = max(torch.get_num_threads(), _lowered_from or 1)
    return 1 if num_values <= TINY and "OMP_NUM_THREADS" not in os.environ else usual


def pick_device(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"Unknown device {name!r}. Known: auto, cpu, cuda, cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Device {name!r} is not supported. Known: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= count_gpus():
        raise ResourceError(
            f"There is no device {name}: torch {torch.__version__} finds {count_gpus()} CUDA devices. "
            f"Try --device cpu, or install a CUDA build of torch (see docs/start.md)."
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and kernels are made on the current one
    return device


def count_gpus() -> int:
    """The number of CUDA devices that torch finds."""
    return torch.cuda.device_count()


def describe_device(device: torch.device) -> str:
    """The name of a device in reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"


@contextmanager
def memory_errors_explained(batch_size: int) -> Iterator[None]:
    """Turn running out of memory into an error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # a CPU out of memory is a plain RuntimeError of torch's
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ResourceError(
            f"Out of memory at batch size {batch_size}: {error}. "
            f"Try a smaller one, e.g. --set batch_size={max(1, batch_size // 2)} (this changes results slightly)."
        ) from error
