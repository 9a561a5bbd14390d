"""POD-spatial, forward and backward, by the two kernels of `pod.cu`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ccfa.kernels.cuda import can_run, kernel, shared_memory

THREADS, MAX_LEVELS = 256, 8  # of a block and of a launch, as in pod.cu
SCRATCH = 2 * THREADS // 32 * 8  # bytes for sums over a block
PARTS = 4  # blocks that share a map in backward


class _Level(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("previous", "current", "slopes", "gradient")),
        *((name, ctypes.c_int) for name in ("height", "width", "octets", "is_copied")),
    ]


class _Levels(ctypes.Structure):
    _fields_ = [("at", _Level * MAX_LEVELS)]


def pod_spatial(previous: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor | None:
    """What `ccfa.losses.pod_spatial` computes, for bfloat16 maps on a GPU.

    Args:
        previous: Each level's maps (B, C, H, W) of the previous network, which need no gradient.
        current: Those of the current network.

    Returns:
        A scalar in float32, or None where no kernel can be used.
    """
    if not (len(previous) == len(current) <= MAX_LEVELS and current and can_run(current[0].device)):
        return None
    if torch.compiler.is_compiling():  # a launch cannot be traced
        return None
    device, batch = current[0].device, len(current[0])
    if not all(_suits(maps, batch, device) for maps in (*previous, *current)):
        return None
    if any(old.shape != new.shape or old.requires_grad for old, new in zip(previous, current, strict=True)):
        return None
    if SCRATCH + 2 * 4 * max(map(_num_sums, current)) > shared_memory(current[0].device):
        return None
    loss: Tensor = _PodSpatial.apply(len(current), *previous, *current)  # type: ignore[no-untyped-call]
    return loss


def _suits(maps: Tensor, batch: int, device: torch.device) -> bool:
    return (
        maps.device == device
        and maps.dtype == torch.bfloat16
        and maps.ndim == 4
        and len(maps) == batch
        and maps.numel() > 0
        and maps.shape[1] % 8 == 0
        and maps.is_contiguous(memory_format=torch.channels_last)
        and maps.data_ptr() % 16 == 0
    )


def _num_sums(maps: Tensor) -> int:
    """The length of the vectors that are compared: each channel has a sum for each row and for each column."""
    return maps.shape[1] * sum(maps.shape[2:])


class _PodSpatial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_levels: int, *maps: Tensor) -> Tensor:
        previous, current = maps[:num_levels], maps[num_levels:]
        batch, limit = len(current[0]), shared_memory(current[0].device)
        lengths = [batch * _num_sums(level) for level in current]
        slopes = torch.empty(sum(lengths), device=current[0].device)
        distances = torch.empty(num_levels, batch, device=current[0].device)
        table, shared = _Levels(), 0
        for place, (old, new, part) in enumerate(zip(previous, current, slopes.split(lengths), strict=True)):
            _, channels, height, width = new.shape
            needed = SCRATCH + 2 * 4 * _num_sums(new)
            with_copies = needed + 2 * 2 * channels * height * width
            is_copied = with_copies <= limit  # larger maps are read twice, from global memory
            shared = max(shared, with_copies if is_copied else needed)
            pointers = old.data_ptr(), new.data_ptr(), part.data_ptr(), None
            table.at[place] = _Level(*pointers, height, width, channels // 8, is_copied)
        compare = kernel("pod.cu", "compare", limit)
        compare((batch, num_levels), THREADS, table, 1 / (num_levels * batch), distances, shared=shared)
        ctx.table, ctx.slopes = table, slopes
        ctx.save_for_backward(*current)
        return distances.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        current = ctx.saved_tensors
        results = [torch.empty_like(maps) for maps in current]
        for level, maps, result in zip(ctx.table.at, current, results, strict=False):
            level.current, level.gradient = maps.data_ptr(), result.data_ptr()
        kernel("pod.cu", "gradients")((len(current[0]), len(current), PARTS), THREADS, ctx.table, gradient)
        return None, *(None for _ in current), *results
