"""A narrow ResNet, forward and backward, by the kernels of `resnet.cu`: one for each convolution, few besides."""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ccfa.kernels.cuda import Kernel, can_run, kernel, shared_memory
from ccfa.kernels.graphs import Aside, aside, lane_here

THREADS = 256  # of a block, as in resnet.cu
SCRATCH = 1024  # bytes for sums, beside maps and weights
GRADIENT_STEPS = 2.0**40  # of a sum of gradients, as in resnet.cu
SIDES = {16: 32, 32: 16, 64: 8}  # of the maps of each width
BUFFERS = {(16, 16): (2, 2), (16, 32): (2, 2), (32, 32): (2, 3), (32, 64): (1, 3), (64, 64): (1, 4)}
"""Parts of an image and buffers for them, where gradients of weights are computed, as in resnet.cu."""
LAYERS = {16: (2, 3), 32: (4,), 64: (8,)}
"""Convolutions of a width whose weights' gradients one kernel computes: the sizes of the first groups."""
MAX_LAYERS = 10  # of a group, as in resnet.cu
GRADIENT_BLOCKS = 72  # of such a kernel; each adds up the images of a part of the batch, and the parts are added later
MIN_SPLITS, MAX_SPLITS = 4, 64  # of a batch
GRADIENT_BRANCHES = 2  # on which such kernels run in turn
STEM_SPLITS = 128  # it comes last, when nothing else runs
MAX_BATCH = 1024  # more images could take a sum of squares beyond its limit
CHANNELS = 32  # of those read by a convolution, that a block computes gradients for
NONE, SAME, HALVED, SPREAD = 0, 1, 2, 3  # shortcuts
MAX_UNITS, MAX_BLOCKS = 40, 20  # of a network, as in resnet.cu
ALL, BY_NORM, BY_TRUNK = 0, 1, 2  # what a ReLU's gradient is masked by


@dataclass(frozen=True)
class Unit:
    """A convolution without bias, of 3x3 or, in a shortcut, of 1x1, and the batch norm after it."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    weight: Tensor
    factors: Tensor | None = None  # on the weight's kernels, (out, in, 1, 1), which are then trained in its place

    @property
    def shape(self) -> tuple[int, int]:
        """Channels in and out; the few of an image count as 16."""
        return max(self.conv.in_channels, 16), self.conv.out_channels

    @property
    def taps(self) -> int:
        """The weights of a channel for another one."""
        return math.prod(self.conv.kernel_size)

    @property
    def trained(self) -> Tensor:
        """What the convolution learns."""
        return self.weight if self.factors is None else self.factors


def placeholder(first: Unit) -> Unit:
    """What stands for the stem in a chain that reads a map: nothing is convolved, and the norm is not used.

    Where backward ends, a kernel reads numbers of the norm all the same; what it makes of them is dropped.
    """
    channels = first.conv.in_channels
    return Unit(nn.Conv2d(channels, channels, 3, device="meta"), first.norm, torch.empty(0))


@dataclass(frozen=True)
class Chain:
    """A stem, with a ReLU, and blocks of two units whose sum with the shortcut is the trunk; or blocks that read a map.

    A shortcut is the trunk itself or, where a block halves the sides, every second pixel, either with zeros in the new
    channels or projected by a unit of its own.
    """

    units: tuple[Unit, ...]  # the stem's, or its `placeholder`, then two for each block
    relu: tuple[bool, ...]  # whether one follows the sum of each block
    ends: tuple[int, ...]  # the blocks after which a level ends
    projections: tuple[Unit | None, ...]  # of each block
    reads_images: bool = True

    @cached_property
    def all_units(self) -> tuple[Unit, ...]:
        """The units, then those that project."""
        return (*self.units, *(unit for unit in self.projections if unit))

    @cached_property
    def convolving(self) -> tuple[Unit, ...]:
        """All units but a placeholder."""
        return self.all_units if self.reads_images else self.all_units[1:]

    @cached_property
    def projected(self) -> dict[int, int]:
        """By the first unit of each block that projects: the place of the projecting one among all units."""
        blocks = (block for block, unit in enumerate(self.projections) if unit)
        return {2 * block + 1: place for place, block in enumerate(blocks, start=len(self.units))}

    @property
    def is_whole(self) -> bool:
        """Whether it has all widths, as the kernel that evaluates a chain needs it."""
        return self.reads_images and {unit.conv.out_channels for unit in self.units} == set(SIDES)

    @property
    def is_known(self) -> bool:
        """Whether the kernels know these shapes: widths of 16, 32 and 64, and batch norms that keep statistics."""
        widths = [unit.conv.out_channels for unit in self.units]
        norms = [unit.norm for unit in self.all_units]
        projecting = [
            (unit.shape, self.units[2 * block + 1].shape) for block, unit in enumerate(self.projections) if unit
        ]
        return (
            set(widths) <= set(SIDES)
            and all(other in (one, 2 * one) for one, other in pairwise(widths))
            and (not self.reads_images or (widths[0] == 16 and self.units[0].conv.in_channels <= 4))
            and len(self.units) == 2 * len(self.relu) + 1
            and len(self.all_units) <= MAX_UNITS
            and len(self.relu) <= MAX_BLOCKS
            and all(shape == first and shape[0] < shape[1] for shape, first in projecting)
            and all(unit.taps == (1 if place >= len(self.units) else 9) for place, unit in enumerate(self.all_units))
            and self.ends[0] >= 0
            and all(one < other for one, other in pairwise(self.ends))
            and self.ends[-1] == len(self.relu) - 1
            and all(
                unit.conv.stride == ((2, 2) if unit.shape[0] < unit.shape[1] else (1, 1)) for unit in self.convolving
            )
            and all(norm.affine and norm.track_running_stats and norm.momentum is not None for norm in norms)
            and len({(norm.eps, norm.momentum) for norm in norms}) == 1
            and len({unit.factors is None for unit in self.convolving}) == 1
            and all(one.dtype == torch.float32 for one in (*self.parameters(), *(u.weight for u in self.convolving)))
        )

    def parameters(self) -> list[Tensor]:
        """What all convolutions learn, then weight and bias of each batch norm."""
        norms = [parameter for unit in self.convolving for parameter in (unit.norm.weight, unit.norm.bias)]
        return [*(unit.trained for unit in self.convolving), *norms]


class TwoChains(NamedTuple):
    """A level with two branches, which are blended."""

    stable: Chain
    plastic: Chain
    blend: Tensor


Maps = tuple[Tensor, ...]


def chain_features(chain: Chain, images: Tensor) -> tuple[Maps, Tensor] | None:
    """The maps at the ends of levels in bfloat16 and the embedding in float32, or None where no kernel can be used.

    In training mode batch norms use and remember the batch's moments. In evaluation mode there are no gradients.
    """
    return _features(chain, images) if _can_compute([chain], images) else None


def branch_features(
    levels: Sequence[TwoChains], images: Tensor, blended: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Maps, Tensor] | None:
    """The same of levels with two branches each; `blended` fuses what a stable and a plastic branch made."""
    chains, blends = [chain for level in levels for chain in level[:2]], [level.blend for level in levels]
    if not (_can_compute(chains, images, blends) and _fit(levels)):
        return None
    maps: list[Tensor] = []
    for stable, plastic, blend in levels:
        (one,), of_one = _features(stable, maps[-1] if maps else images)
        (other,), of_other = _features(plastic, maps[-1] if maps else images)
        maps.append(blended(one, other, blend))
    return tuple(maps), blended(of_one, of_other, blend)


def _fit(levels: Sequence[TwoChains]) -> bool:
    """Whether both branches of each level read what the level before makes, and are blended by a number."""
    reads, makes = (
        [{chain.units[place].conv.out_channels for chain in level[:2]} for level in levels] for place in (0, -1)
    )
    alike = reads[1:] == makes[:-1] and all(len(widths) == 1 for widths in makes)
    return alike and all(level.blend.dim() == 0 for level in levels)


def _can_compute(chains: Sequence[Chain], images: Tensor, others: Sequence[Tensor] = ()) -> bool:
    """Whether the kernels can compute chains in the mode that they are in; `others` are parameters beside theirs."""
    modes = {unit.norm.training for chain in chains for unit in chain.all_units}
    shape = chains[0].units[0].conv.in_channels, 32, 32
    suits = images.dtype == torch.float32 and images.shape[1:] == shape and not images.requires_grad
    known = can_run(images.device) and suits and len(modes) == 1 and all(chain.is_known for chain in chains)
    if not known or shared_memory(images.device) < EVALUATION_BYTES:
        return False
    if modes == {True}:
        return 2 <= len(images) <= MAX_BATCH
    parameters = (*others, *(parameter for chain in chains for parameter in chain.parameters()))
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters))


def _features(chain: Chain, read: Tensor) -> tuple[Maps, Tensor]:
    """The features of images, or of a map that a chain reads."""
    if chain.units[0].norm.training:
        *maps, embedding = _Chain.apply(chain, read, *chain.parameters())  # type: ignore[no-untyped-call]
    elif chain.is_whole:
        return _evaluated(chain, _Images.of(read))
    else:
        *maps, embedding = Run(chain, read, training=False).forward()
    return tuple(maps), embedding


def _map_bytes(channels: int, side: int) -> int:
    """What a map with its border takes in shared memory."""
    return (side + 2) ** 2 * (2 * channels + 16)


EVALUATION_BYTES = 2 * _map_bytes(64, 8) + 2 * 9 * 64 * 64 + _map_bytes(32, 16)


def _convolution(name: str, channels: int, out: int, side: int) -> tuple[Kernel, int]:
    """A kernel that convolves a map of so many channels and this side, and the shared memory that it takes."""
    shared = _map_bytes(channels, side) + 2 * 9 * channels * out + SCRATCH
    return kernel("resnet.cu", name, shared), shared


def _named(prefix: str, channels: int, out: int) -> str:
    return f"{prefix}_{channels}" if channels == out else f"{prefix}_{channels}_{out}"


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p * MAX_UNITS) for name in ("at", "factors")),
        *((name, ctypes.c_int * MAX_UNITS) for name in ("inputs", "outputs", "taps", "start")),
    ]


class _Norms(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p * MAX_UNITS) for name in ("weight", "bias", "mean", "variance")),
        *((name, ctypes.c_int * MAX_UNITS) for name in ("channels", "start")),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "bias", "mean", "variance", "batches", "moments")]


class _Before(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("y", "weight", "bias", "moments")]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("read", "of_result")]


class _Layers(ctypes.Structure):
    _fields_ = [("at", _Layer * MAX_LAYERS)]


class _Trunk(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p * MAX_BLOCKS), ("relu", ctypes.c_int * MAX_BLOCKS)]


@dataclass(frozen=True)
class _Images:
    """Images and the strides in which they lie."""

    pixels: Tensor
    channels: int
    by_channel: int
    by_pixel: int

    @classmethod
    def of(cls, images: Tensor) -> "_Images":
        channels_last = images.is_contiguous(memory_format=torch.channels_last)
        pixels = images if channels_last else images.contiguous()
        return cls(pixels, images.shape[1], *((1, images.shape[1]) if channels_last else (32 * 32, 1)))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.pixels, self.channels, self.by_channel, self.by_pixel))


def _weights(units: Sequence[Unit]) -> tuple[_Weights, list[Tensor], list[int]]:
    """The weights of convolutions as a table, with what must be kept for it, and where each begins among all."""
    starts = _starts(math.prod(unit.shape) * unit.taps for unit in units)
    weights = [unit.weight.detach().contiguous(memory_format=torch.channels_last) for unit in units]
    table = _Weights()
    for index, (unit, weight) in enumerate(zip(units, weights.copy(), strict=True)):
        table.at[index], table.start[index], table.taps[index] = weight.data_ptr(), starts[index], unit.taps
        table.inputs[index], table.outputs[index] = unit.conv.in_channels, unit.conv.out_channels
        if unit.factors is not None:
            weights.append(unit.factors.detach().contiguous())
            table.factors[index] = weights[-1].data_ptr()
    return table, weights, starts


def _reordered(units: Sequence[Unit], transposed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Each convolution's weights as its kernel reads them, and for the gradient of its input."""
    table, kept, starts = _weights(units)
    both = torch.empty(1 + transposed, starts[-1], dtype=torch.bfloat16, device=kept[0].device)
    kernel("resnet.cu", "reorder_weights")((9, len(units)), 256, table, both[0], both[1] if transposed else None)
    sizes = [end - start for start, end in pairwise(starts)]
    return list(both[0].split(sizes)), list(both[1].split(sizes)) if transposed else []


def _starts(sizes: Iterator[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _map(num: int, channels: int, device: torch.device, side: int | None = None) -> Tensor:
    side = side or SIDES[channels]
    shape = num, channels, side, side
    return torch.empty(shape, dtype=torch.bfloat16, device=device, memory_format=torch.channels_last)


def _evaluated(chain: Chain, images: _Images) -> tuple[tuple[Tensor, ...], Tensor]:
    """The features in evaluation mode: one kernel, and two that prepare the weights."""
    num, device, blocks = len(images.pixels), images.pixels.device, chain.units[2::2]
    pairs = zip(chain.projections, chain.units[1::2], blocks, strict=True)
    units = [chain.units[0], *(unit for block in pairs for unit in block if unit)]  # in the order of the kernel
    weights, _ = _reordered(units, transposed=False)
    starts = _starts(unit.conv.out_channels for unit in units)
    scales = torch.empty(2 * starts[-1], device=device)
    norms = _Norms()
    for index, unit in enumerate(units):
        pointers = _pointers(unit.norm.weight, unit.norm.bias, unit.norm.running_mean, unit.norm.running_var)
        for table, pointer in zip((norms.weight, norms.bias, norms.mean, norms.variance), pointers, strict=True):
            table[index] = pointer
        norms.channels[index], norms.start[index] = unit.conv.out_channels, starts[index]
    kernel("resnet.cu", "fold_norms")((len(units),), 64, norms, units[0].norm.eps, scales)
    maps = {block: _map(num, blocks[block].conv.out_channels, device) for block in chain.ends}
    trunk = _Trunk()
    for block, relu in enumerate(chain.relu):
        trunk.relu[block] = relu
        trunk.at[block] = maps[block].data_ptr() if block in maps else None
    embedding = torch.empty(num, 64, device=device)
    widths = [unit.conv.out_channels for unit in blocks]
    counts = [widths.count(width) for width in SIDES]
    projects = [any(unit and unit.shape[1] == width for unit in chain.projections) for width in (32, 64)]
    evaluate = kernel("resnet.cu", "evaluate", EVALUATION_BYTES)
    evaluate(
        (num,), THREADS, *images, weights[0], scales, *counts, *projects, trunk, embedding, shared=EVALUATION_BYTES
    )
    return tuple(maps.values()), embedding


class _Chain(torch.autograd.Function):
    """A chain in training mode."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, read: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        run = ctx.run = Run(chain, read)
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in run.forward())  # what the run keeps must not keep the run

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *of_maps, of_embedding = gradients
        of_read, found = ctx.run.gradients_of(of_maps, of_embedding)
        wanted = ctx.needs_input_grad[2:]
        return None, of_read, *(one if needed else None for one, needed in zip(found, wanted, strict=True))


class Run:
    """One forward pass, with what backward needs of it. In evaluation mode, batch norms have their running moments."""

    def __init__(self, chain: Chain, read: Tensor, training: bool = True) -> None:
        self.chain, self.training = chain, training
        self.num, self.device = len(read), read.device
        self.lane = lane_here(self.device) if training else None
        places = range(len(chain.all_units))[-len(chain.convolving) :]
        self.weights, self.transposed = (
            dict(zip(places, given, strict=False)) for given in _reordered(chain.convolving, transposed=training)
        )
        norm = chain.units[-1].norm
        self.eps, self.momentum = norm.eps, float(norm.momentum or 0)
        outs = [unit.conv.out_channels for unit in chain.all_units]
        self.results = [_map(self.num, out, self.device) for out in outs]
        self.sizes = [2 * out for out in outs]  # of sums: each channel's results, and their squares
        self.sums = self.zeros().split(self.sizes) if training else [None] * len(outs)
        self.moments = [torch.empty(2, out, device=self.device) for out in outs]
        # What is made of each result: what the next convolution reads, the trunk where a block or the stem ends, or a
        # shortcut.
        self.made = [_map(self.num, out, self.device) for out in outs]
        if chain.reads_images:
            self.images = _Images.of(read)
        else:
            self.results[0] = read.bfloat16().contiguous(memory_format=torch.channels_last)

    def zeros(self) -> Tensor:
        """Two sums for each channel of each result."""
        return torch.zeros(sum(self.sizes), dtype=torch.int64, device=self.device)

    def norm(self, index: int) -> _Norm:
        norm, moments = self.chain.all_units[index].norm, self.moments[index]
        statistics = norm.running_mean, norm.running_var, norm.num_batches_tracked
        found = _Norm(*_pointers(norm.weight, norm.bias, *statistics, moments))
        if not self.training:
            found.batches = None
        if not (index or self.chain.reads_images):
            found.weight = found.bias = None
        return found

    def made_of(self, index: int) -> tuple[Tensor | None, int, bool]:
        """How the trunk after a unit, which ends a block or is the stem, is made: shortcut, its kind, ReLU."""
        if index == 0:
            return None, NONE, self.chain.reads_images
        if index - 1 in self.chain.projected:
            return self.made[self.chain.projected[index - 1]], SAME, self.chain.relu[index // 2 - 1]
        shortcut = self.made[index - 2]
        kind = SAME if shortcut.shape[1] == self.results[index].shape[1] else HALVED
        return shortcut, kind, self.chain.relu[index // 2 - 1]

    def forward(self) -> tuple[Tensor, ...]:
        units, num = self.chain.units, self.num
        if self.chain.reads_images:
            launch, shared = _convolution("forward_stem", 16, 16, 32)
            launch((num,), THREADS, *self.images, self.weights[0], self.results[0], self.sums[0], shared=shared)
        last, begins = len(units) - 1, self.chain.reads_images
        for index in range(last + 1):  # what is made of the result of one unit and read by the next
            ends_block = index % 2 == 0
            shortcut, kind, relu = self.made_of(index) if ends_block else (None, NONE, True)
            given = self.results[index], self.sums[index], self.norm(index), self.eps, self.momentum, shortcut
            if index == last:
                break
            channels, out = units[index + 1].shape
            launch, shared = _convolution(_named("forward", channels, out), channels, out, SIDES[channels])
            result = self.weights[index + 1], self.results[index + 1], self.sums[index + 1]
            early = index > 0 or begins  # not before the kernel that prepares the weights has ended
            launch((num,), THREADS, *given, kind, int(relu), self.made[index], *result, shared=shared, early=early)
            if index + 1 in self.chain.projected:
                self.project(self.made[index], self.chain.projected[index + 1])
        channels = units[last].conv.out_channels
        embedding = torch.empty(num, channels, device=self.device)
        made = self.made[last], embedding
        kernel("resnet.cu", f"forward_end_{channels}")((num,), THREADS, *given, kind, int(relu), *made, early=True)
        return *(self.made[2 * block + 2] for block in self.chain.ends), embedding

    def project(self, trunk: Tensor, place: int) -> None:
        """Make a shortcut."""
        channels, out = self.chain.all_units[place].shape
        launch, shared = _convolution(f"project_{channels}_{out}", channels, out, SIDES[channels])
        result = self.results[place]
        launch((self.num,), THREADS, trunk, self.weights[place], result, self.sums[place], shared=shared, early=True)
        norm = self.sums[place], self.norm(place), self.eps, self.momentum
        kernel("resnet.cu", f"normalise_{out}")((self.num,), THREADS, result, *norm, self.made[place], early=True)

    def project_back(self, gradient: Tensor, place: int, sums: Tensor) -> Tensor:
        """The gradient of every second pixel of the trunk, from that of the shortcut."""
        unit, moments = self.chain.all_units[place], self.moments[place]
        channels, out = unit.shape[::-1]
        kernel("resnet.cu", f"sum_gradients_{channels}")(
            (self.num,), THREADS, gradient, self.results[place], moments, sums, early=True
        )
        found = _map(self.num, out, self.device, SIDES[channels])
        launch, shared = _convolution(f"project_back_{channels}_{out}", channels, out, SIDES[channels])
        launch(
            (self.num,), THREADS, gradient, sums, self.results[place], unit.norm.weight, moments,
            self.of_results[place], self.transposed[place], found, shared=shared, early=True,
        )  # fmt: skip
        return found

    def before(self, index: int) -> _Before:
        norm = self.chain.units[index].norm
        return _Before(*_pointers(self.results[index], norm.weight, norm.bias, self.moments[index]))

    def gradients_of(
        self, of_maps: Sequence[Tensor | None], of_embedding: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of the map that was read, if it was one, and of the chain's parameters."""
        units, num, last = self.chain.units, self.num, len(self.chain.units) - 1
        external = {2 * block + 2: _as_map(given) for block, given in zip(self.chain.ends, of_maps, strict=True)}
        if of_embedding is not None:
            of_embedding = of_embedding.contiguous()
        # The gradients of what each batch norm makes, and of what it reads; of the latter the stem's is not stored.
        gradients = self.gradients = [torch.empty_like(result) for result in self.results[: last + 1]]
        self.of_results = [None, *map(torch.empty_like, self.results[1:])]
        flat = self.zeros()  # afresh each time: of gradients, and of gradients times normalised results
        sums = flat.split(self.sizes)
        mask = BY_TRUNK if self.chain.relu[-1] else ALL
        kernel("resnet.cu", f"backward_start_{gradients[last].shape[1]}")(
            (num,), THREADS, of_embedding, external[last], self.made[last], mask, self.before(last),
            gradients[last], sums[last],
        )  # fmt: skip
        groups = {group[0]: group for group in self.groups()}
        waiting: list[Aside[dict[int, Tensor]]] = []
        for index in range(last, 0, -1):  # from the result of one unit to that of the unit before
            channels, out = units[index].shape[::-1]
            launch, shared = _convolution(_named("backward", channels, out), channels, out, SIDES[out])
            starts_block = index % 2 == 1
            shortcut = gradients[index + 1] if starts_block else None  # of the trunk after this block
            kind = NONE if not starts_block else SAME if channels == out else HALVED
            if shortcut is not None and index in self.chain.projected:
                place = self.chain.projected[index]
                shortcut, kind = self.project_back(shortcut, place, sums[place]), SPREAD
            _, _, relu = self.made_of(index - 1) if starts_block else (None, NONE, True)
            by_trunk = starts_block and index > 1
            mask = ALL if not relu else BY_TRUNK if by_trunk else BY_NORM
            launch(
                (num,), THREADS, gradients[index], sums[index], self.results[index], units[index].norm.weight,
                self.moments[index], self.of_results[index], self.transposed[index], shortcut, kind,
                external.get(index - 1) if starts_block else None, self.made[index - 1] if by_trunk else None, mask,
                self.before(index - 1), gradients[index - 1], sums[index - 1], shared=shared, early=True,
            )  # fmt: skip
            if index in groups:
                compute, turn = partial(self.weight_gradients, groups[index]), len(waiting) % GRADIENT_BRANCHES
                waiting.append(aside(f"weights {turn}", self.device, compute, self.lane))
        of_weights = self.stem_gradient(sums[0]) if self.chain.reads_images else {}
        of_norms = (flat / GRADIENT_STEPS).split(self.sizes)[-len(self.chain.convolving) :]
        for group in waiting:
            of_weights |= group()
        in_order = (of_weights[index] for index in sorted(of_weights))
        of_parameters = [*in_order, *(part for both in of_norms for part in reversed(both.view(2, -1).unbind()))]
        return None if self.chain.reads_images else gradients[0], of_parameters

    def groups(self) -> list[list[int]]:
        """Convolutions of the same shape, whose gradients one kernel computes; all but the stem.

        A shortcut's of 1x1 is among those of 3x3: its gradient is that of the tap in the middle.
        """
        shapes = {index: unit.shape for index, unit in enumerate(self.chain.all_units) if index}
        alike = [[index for index in shapes if shapes[index] == shape] for shape in dict.fromkeys(shapes.values())]
        return [group for same in alike for group in _divided(same, LAYERS[shapes[same[0]][1]])]

    def weight_gradients(self, group: list[int]) -> dict[int, Tensor]:
        channels, out = self.chain.units[group[0]].shape
        launch, shared = _weights_kernel(_named("weights", channels, out), channels, out, *BUFFERS[channels, out])
        pieces = -(-channels // CHANNELS)
        splits = min(max(GRADIENT_BLOCKS // (len(group) * pieces), MIN_SPLITS), MAX_SPLITS, self.num)
        parts = torch.empty(splits, len(group), out, 3, 3, channels, device=self.device)
        reads = [*range(-1, len(self.chain.units) - 1), *(first - 1 for first in self.chain.projected)]
        table = _Layers()
        for place, index in enumerate(group):
            table.at[place] = _Layer(*_pointers(self.made[reads[index]], self.of_results[index]))
        launch((splits, len(group), pieces), THREADS, table, self.num, parts, shared=shared)
        return self.added(group, parts)

    def stem_gradient(self, sums: Tensor) -> dict[int, Tensor]:
        launch, shared = _weights_kernel("weights_stem", 16, 16, 1, 1)
        norm = self.chain.units[0].norm
        parts = torch.empty(min(STEM_SPLITS, self.num), 1, 16, 3, 3, self.images.channels, device=self.device)
        launch(
            (len(parts),), THREADS, self.gradients[0], sums, self.results[0], norm.weight, self.moments[0],
            *self.images, self.num, parts, shared=shared, early=True,
        )  # fmt: skip
        return self.added([0], parts)

    def added(self, group: list[int], parts: Tensor) -> dict[int, Tensor]:
        """The gradients of what convolutions learn, from those of their kernels: (part, convolution, out, 3, 3, in)."""
        units, (splits, *_, channels) = [self.chain.all_units[index] for index in group], parts.shape
        if units[0].factors is not None:
            table, _kept, _ = _weights(units)
            found = torch.empty(len(group), parts.shape[2], channels, 1, 1, device=self.device)
            blocks = math.ceil(found[0].numel() / THREADS), len(group)
            kernel("resnet.cu", "add_parts_of_factors")(blocks, THREADS, parts, splits, table, found)
            return dict(zip(group, found, strict=True))
        found = torch.empty(parts.shape[1:], device=self.device)
        size = found.numel()
        kernel("resnet.cu", "add_parts")((math.ceil(size / THREADS),), THREADS, parts, splits, size, found)
        kernels = zip(units, found.permute(0, 1, 4, 2, 3), strict=True)
        middle = (one if unit.taps > 1 else one[:, :, 1:2, 1:2] for unit, one in kernels)
        return dict(zip(group, middle, strict=True))


def _divided(indices: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """Groups of these sizes, which backward comes to last, so that little follows; then of at most `MAX_LAYERS`."""
    first = _starts(iter(sizes))
    starts = [*first, *range(first[-1] + MAX_LAYERS, len(indices), MAX_LAYERS), len(indices)]
    return [indices[start:end] for start, end in pairwise(starts) if indices[start:end]]


def _weights_kernel(name: str, channels: int, out: int, halves: int, buffers: int) -> tuple[Kernel, int]:
    part, side, out_side = min(channels, CHANNELS), SIDES[channels], SIDES[out]
    rows = side // halves + 2
    shared = buffers * (rows * (side + 2) * (2 * part + 16) + out_side**2 // halves * (2 * out + 16))
    return kernel("resnet.cu", name, shared), shared


def _pointers(*tensors: Tensor | None) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def _as_map(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.bfloat16().contiguous(memory_format=torch.channels_last)
