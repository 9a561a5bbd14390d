"""The one file that knows CUDA: which device, and what to say when it is missing or full."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ccfa.errors import ResourceError, UsageError


def pick_device(name: str) -> torch.device:
    """The device called `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"Unknown device {name!r}. Known: auto, cpu, cuda, cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Device {name!r} is not supported. Known: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(
            f"{name} was asked for, but torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices. "
            f"Try --device cpu, or install a CUDA build of torch (see the README)."
        )
    return device


def describe_device(device: torch.device) -> str:
    """The device as a report names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


@contextmanager
def memory_errors_explained(batch_size: int) -> Iterator[None]:
    """Turn running out of memory into an error that says what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"Out of memory at batch size {batch_size}: {error}. "
            f"Try a smaller one, e.g. --set batch_size={max(1, batch_size // 2)} (this changes results slightly)."
        ) from error
