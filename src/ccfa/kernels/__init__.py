"""Functions that use a kernel of our own where it can run; `graphs.py` has CUDA graphs and streams.

Elsewhere `Conv3x3` is torch's convolution, `normalised` adds torch's batch norm, and others return None: their plain
version is where they are called. Kernels are CUDA C++ (`*.cu`, see `cuda.py`), or need Triton (`*_kernel.py`).
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

from ccfa.kernels.attack import DIMS, balanced_assignment, confident_classes, fused_attack
from ccfa.kernels.cuda import LAUNCHED, are_left_out, can_run, kernels_left_out
from ccfa.kernels.head_loss import head_loss

__all__ = [
    "LAUNCHED",
    "Conv3x3",
    "Normalise",
    "are_left_out",
    "balanced_assignment",
    "can_run",
    "confident_classes",
    "full_precision",
    "head_loss",
    "kernels_left_out",
    "normalised",
    "sphere_attack",
]

kernel: ModuleType | None = None
if importlib.util.find_spec("triton"):
    from ccfa.kernels import convolution_kernel as kernel

NARROW = (16, 32, 64)  # channels of a convolution


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution without bias, padded by 1."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__(channels, out, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolved map."""
        if kernel is None or not self.by_kernel(x):
            return super().forward(x)
        return kernel.conv3x3(x.bfloat16(), self.weight, self.stride[0])

    def by_kernel(self, x: Tensor) -> bool:
        """Whether our kernels convolve this map: on a GPU, in bfloat16, of few channels, counted in 32 bits."""
        in_bfloat16 = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        images = self.in_channels < min(NARROW) and not x.requires_grad
        narrow = self.out_channels in NARROW and (self.in_channels in NARROW or images)
        num_pixels = x.numel() // self.in_channels
        countable = num_pixels * max(self.in_channels, self.out_channels) < 2**31
        return x.is_cuda and in_bfloat16 and narrow and countable and not are_left_out()


def normalised(conv: Conv3x3, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """norm(conv(x)); in training the kernel takes the batch's sums while it convolves, instead of reading it again."""
    replaced = has_torch_function_unary(x)  # by a batch norm over the rows of several processes
    if kernel is None or replaced or norm.momentum is None or not (norm.training and conv.by_kernel(x)):
        return norm(conv(x))
    y, sums = kernel.conv3x3_with_sums(x.bfloat16(), conv.weight, conv.stride[0])
    with torch.no_grad():
        count = y.numel() / y.shape[1]
        mean, squares = sums.sum(0) / count
        variance = (squares - mean.square()).clamp(min=0)
        if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
    return Normalise.apply(y, mean, torch.rsqrt(variance + norm.eps), norm.weight, norm.bias)


class Normalise(torch.autograd.Function):
    """weight * (y - mean) * inverse + bias, whose backward knows that mean and inverse deviation are the batch's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The normalised map, in the precision of `y`."""
        ctx.save_for_backward(y, mean, inverse, weight)
        return (_channels(weight * inverse) * (y - _channels(mean)) + _channels(bias)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
        """Batch norm's gradients with respect to y, weight and bias."""
        y, mean, inverse, weight = ctx.saved_tensors
        gradient = gradient.float()
        standard = (y - _channels(mean)) * _channels(inverse)
        of_bias, of_weight = gradient.sum((0, 2, 3)), (gradient * standard).sum((0, 2, 3))
        count = y.numel() / y.shape[1]
        centred = gradient - _channels(of_bias / count) - standard * _channels(of_weight / count)
        return (_channels(weight * inverse) * centred).to(y.dtype), None, None, of_weight, of_bias


def _channels(values: Tensor) -> Tensor:
    return values[:, None, None]


def sphere_attack(
    proxies: Tensor,
    scale: Tensor,
    similarity: str,
    criterion: str,
    start: Tensor,
    targets: Tensor,
    alpha: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor] | None:
    """Attack a head that compares directions, in one kernel.

    Args:
        proxies: The head's proxies (classes, proxies per class, dim).
        scale: The factor on its logits, a scalar.
        similarity: `cosine`, or `distance` for minus the squared distance of unit vectors, 2 cos - 2.
        criterion: The loss whose gradient is followed: `cross_entropy`, `nca` or `nca_exclusive`.
        start: Unit-length features (N, dim).
        targets: The class each feature is pushed towards (N,).
        alpha: The step size of each feature (N, 1).
        steps: The number of steps.

    Returns:
        The attacked features and the classes the head gives them, or None if there is no GPU that can run it, or no
        kernel for this dimension.
    """
    if start.shape[1] not in DIMS or not can_run(start.device):
        return None
    return fused_attack(proxies, scale, similarity, criterion, start, targets, alpha, steps)


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which autocast, where somebody's loop uses it, rounds nothing to 16 bits."""
    return torch.autocast(device.type, enabled=False)
