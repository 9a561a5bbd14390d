"""Which rows make a batch, and where each random number comes from."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Generator, Tensor


def named_generator(device: torch.device, *purpose: object) -> Generator:
    """A generator seeded by what it is for, so that no stream depends on how much another has drawn."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def num_batches(num_rows: int, batch_size: int) -> int:
    """Batches in an epoch."""
    return -(-num_rows // batch_size)


def batches(rows: Tensor, batch_size: int, generator: Generator) -> Iterator[Tensor]:
    """The rows in random order, as batches of one size: the last is filled up with other rows.

    The published code keeps a ragged last batch; equal shapes are what lets a step be captured once.
    """
    size = min(batch_size, len(rows))
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    filler = torch.randperm(len(rows), generator=generator, device=rows.device)
    order = torch.cat([order, filler])
    for index in range(num_batches(len(rows), size)):
        yield rows[order[index * size : (index + 1) * size]]
