"""Functions of the rows of a matrix in one kernel each way, where torch has about ten: they are in `rows.cu`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ccfa.kernels.cuda import can_run, kernel

WARPS = 4  # of a block, each with a row


def unit_rows(rows: Tensor) -> Tensor:
    """Each row divided by its length, as `F.normalize` does it."""
    if not _suits(rows):
        return F.normalize(rows)
    unit: Tensor = _Normalise.apply(rows)  # type: ignore[no-untyped-call]
    return unit


def cosine_distance(previous: Tensor, current: Tensor) -> Tensor | None:
    """What `ccfa.losses.cosine_distance` computes, or None where no kernel can be used."""
    if not (_suits(previous) and _suits(current)) or previous.requires_grad or previous.shape != current.shape:
        return None
    distance: Tensor = _CosineDistance.apply(previous, current)  # type: ignore[no-untyped-call]
    return distance


def _suits(rows: Tensor) -> bool:
    return can_run(rows.device) and rows.dtype == torch.float32 and rows.dim() == 2 and rows.numel() > 0


def _launch(name: str, rows: Tensor, *arguments: Tensor | int) -> None:
    kernel("rows.cu", name)((-(-len(rows) // WARPS),), 32 * WARPS, *arguments)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        unit, lengths = torch.empty(rows.shape, device=rows.device), torch.empty(len(rows), device=rows.device)
        _launch("normalise", rows, rows.contiguous(), *rows.shape, unit, lengths)
        ctx.save_for_backward(unit, lengths)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        unit, lengths = ctx.saved_tensors
        result = torch.empty_like(unit)
        _launch("normalise_gradient", unit, gradient.contiguous(), unit, lengths, *unit.shape, result)
        return result


class _CosineDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, previous: Tensor, current: Tensor) -> Tensor:
        distances, ctx.found = torch.empty(len(current), device=current.device), torch.empty_like(current)
        previous, current = previous.contiguous(), current.contiguous()
        _launch("cosine_distance", current, previous, current, *current.shape, distances, ctx.found)
        return distances.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.found * gradient
