"""Batch norm over the rows of all processes, for any module that calls torch's; SyncBatchNorm does not run on CPUs."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ccfa.errors import UsageError
from ccfa.learning.processes import Processes, applied


def shared_batch_norm(processes: Processes, num_rows: int) -> AbstractContextManager[Any]:
    """A context in which batch norm in training takes its statistics from the rows of all processes.

    Args:
        processes: The processes.
        num_rows: The number of rows of all processes. A process without any may pass a row of its own through the
            network, which changes nothing.
    """
    return nullcontext() if processes.is_alone else SharedBatchNorm(processes, num_rows)


class SharedBatchNorm(TorchFunctionMode):
    """Replaces `F.batch_norm`; every process must call it equally often, with its own rows."""

    def __init__(self, processes: Processes, num_rows: int) -> None:
        super().__init__()
        self.processes, self.num_rows = processes, num_rows
        rows = processes.own(num_rows)
        self.has_rows = rows.start < rows.stop

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.batch_norm and (kwargs or {}).get("training"):
            return self.batch_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """As `F.batch_norm` in training."""
        if self.num_rows * math.prod(x.shape[2:]) == 1:
            raise UsageError(
                "Batch norm needs more than one value per channel, and a batch of one image has a map of one pixel. "
                "Use a larger batch size or larger images."
            )
        with torch.no_grad():
            count, mean, variance = statistics(x, self.processes, self.has_rows)
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
        weight = torch.ones_like(mean) if weight is None else weight
        bias = torch.zeros_like(mean) if bias is None else bias
        scale = torch.rsqrt(variance + eps), weight, bias
        return applied(Normalised, x, mean, *scale, count, self.processes, self.has_rows)


def statistics(x: Tensor, processes: Processes, has_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The number of values of a channel, their mean and their variance, over all rows of all processes."""
    own = _precise(x)
    found = own.new_zeros(processes.number, 3, own.shape[1])
    if has_rows:
        variance, mean = torch.var_mean(own, _all_but_channels(x), correction=0)
        count = torch.full_like(mean, own.numel() / own.shape[1])
        found[processes.rank] = torch.stack([count, mean, count * variance])
    counts, means, squares = processes.sum(found).unbind(dim=1)
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(dim=0) / count


class Normalised(torch.autograd.Function):
    """weight * (x - mean) * inverse + bias, whose backward knows that the statistics are those of all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        inverse: Tensor,
        weight: Tensor,
        bias: Tensor,
        count: Tensor,
        processes: Processes,
        has_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, inverse, weight, count)
        ctx.processes, ctx.has_rows = processes, has_rows
        standard = (_precise(x) - _channels(mean, x)) * _channels(inverse, x)
        return (_channels(weight, x) * standard + _channels(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, weight, count = ctx.saved_tensors
        gradient, dims = _precise(gradient), _all_but_channels(x)
        standard = (_precise(x) - _channels(mean, x)) * _channels(inverse, x)
        own = torch.stack([gradient.sum(dims), (gradient * standard).sum(dims)])
        of_bias, of_weight = ctx.processes.sum(own.clone()) / count
        centred = gradient - _channels(of_bias, x) - standard * _channels(of_weight, x)
        # The statistics are not of a row that only stands in for none.
        of_x = (_channels(weight * inverse, x) * centred).to(x.dtype) if ctx.has_rows else torch.zeros_like(x)
        return of_x, None, None, own[1], own[0], None, None, None


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))
