"""SGD's step, with gradients clipped by value, as one kernel where torch has one for each of its parts."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn, optim

from ccfa.kernels.cuda import can_run, kernel

THREADS, CHUNK, MOST = 256, 2048, 120  # threads and numbers of a block, tensors of a launch, as in sgd.cu


class _Tensors(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("values", "gradients", "momenta")),
        *((name, ctypes.c_int * MOST) for name in ("size", "first")),
    ]


def sgd_step(optimiser: optim.Optimizer, clip_value: float | None = None) -> bool:
    """Take the optimiser's step on gradients cut at plus and minus a value; the gradients stay as they are.

    Returns:
        Whether it was taken. If not, because this is no plain SGD with momentum or no GPU can run the kernel, nothing
        has changed.
    """
    if type(optimiser) is not optim.SGD or optimiser._optimizer_step_pre_hooks or optimiser._optimizer_step_post_hooks:
        return False
    groups = [(group, [own for own in group["params"] if own.grad is not None]) for group in optimiser.param_groups]
    if not all(_suits(group) for group, _ in groups):
        return False
    if not all(_is_plain(own, optimiser, group["lr"].device) for group, parameters in groups for own in parameters):
        return False
    for group, parameters in groups:
        momenta = [_momentum(optimiser, parameter) for parameter in parameters]
        limit = math.inf if clip_value is None else float(clip_value)
        numbers = limit, float(group["weight_decay"]), float(group["momentum"])
        for start in range(0, len(parameters), MOST):
            _launch(parameters[start : start + MOST], momenta[start : start + MOST], group["lr"], *numbers)
    return True


def _suits(group: dict[str, Any]) -> bool:
    rate, others = group["lr"], ("dampening", "nesterov", "maximize", "differentiable")
    on_gpu = isinstance(rate, Tensor) and rate.dtype == torch.float32 and can_run(rate.device)
    return on_gpu and bool(group["momentum"]) and not any(group[name] for name in others)


def _is_plain(parameter: nn.Parameter, optimiser: optim.SGD, device: torch.device) -> bool:
    """Whether parameter, gradient and momentum lie in memory in the same order, without gaps, in float32."""
    found = parameter, parameter.grad, optimiser.state[parameter].get("momentum_buffer")
    tensors = [tensor for tensor in found if tensor is not None]
    if any(tensor.device != device or tensor.dtype != torch.float32 or tensor.is_sparse for tensor in tensors):
        return False
    in_a_row = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return in_a_row and len({_order(tensor) for tensor in tensors}) == 1 and parameter.numel() < 2**31


def _order(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides, without the dimensions of size 1, whose strides mean nothing."""
    return tuple((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _momentum(optimiser: optim.SGD, parameter: nn.Parameter) -> Tensor:
    """Where torch keeps it; at first there is none."""
    state = optimiser.state[parameter]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    momentum: Tensor = state["momentum_buffer"]
    return momentum


@torch.no_grad()
def _launch(
    parameters: list[nn.Parameter], momenta: list[Tensor], rate: Tensor, limit: float, decay: float, momentum: float
) -> None:
    table, blocks = _Tensors(), 0
    for place, (parameter, moved) in enumerate(zip(parameters, momenta, strict=True)):
        assert parameter.grad is not None
        table.values[place], table.gradients[place] = parameter.data_ptr(), parameter.grad.data_ptr()
        table.momenta[place], table.size[place] = moved.data_ptr(), parameter.numel()
        table.first[place] = blocks
        blocks += -(-parameter.numel() // CHUNK)
    if blocks:
        kernel("sgd.cu", "sgd")((blocks,), THREADS, table, len(parameters), rate, limit, decay, momentum)
