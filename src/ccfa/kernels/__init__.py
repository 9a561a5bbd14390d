"""Triton kernels, each behind a function that uses it where it can run, and CUDA graphs.

Where its kernel cannot run, `Conv3x3` is torch's convolution, `normalised` adds torch's batch norm, and `sphere_attack`
returns None; `augmentation/attack.py` has the plain version. Modules named `*_kernel` need Triton.
"""

import torch

from ccfa.kernels.attack import sphere_attack
from ccfa.kernels.convolution import Conv3x3, normalised

__all__ = ["Conv3x3", "full_precision", "normalised", "sphere_attack"]


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which autocast, where somebody's loop uses it, rounds nothing to 16 bits."""
    return torch.autocast(device.type, enabled=False)
