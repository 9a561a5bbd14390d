"""Which rows make a batch, and where each random number comes from."""

import hashlib

import torch
from torch import Generator, Tensor


def named_generator(device: torch.device, *purpose: object) -> Generator:
    """A generator seeded by what it is for, so that no stream depends on how much another has drawn."""
    return torch.Generator(device).manual_seed(seed_of(*purpose))


def seed_of(*purpose: object) -> int:
    """A seed for a purpose, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:8], "big") >> 1


def num_batches(num_rows: int, batch_size: int) -> int:
    """Batches in an epoch."""
    return -(-num_rows // batch_size)


def batches(rows: Tensor, batch_size: int, generator: Generator) -> Tensor:
    """The rows in random order, (batches, size): all of one size, the last filled up with other rows.

    The published code keeps a ragged last batch; equal shapes are what lets a step be captured once.
    """
    size = min(batch_size, len(rows))
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    filler = torch.randperm(len(rows), generator=generator, device=rows.device)
    count = num_batches(len(rows), size)
    return rows[torch.cat([order, filler])[: count * size]].view(count, size)
