"""Choosing exemplars: from the embeddings of each class, rows in order of preference."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

MAX_ROUNDS = 1000  # the published code's limit on picks for one class


def herd(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """iCaRL's herding, all classes at once: positions within each class, best first.

    w starts at the mean mu of the normalised embeddings; each round picks argmax w.x and adds mu - x to w. A row picked
    again moves w once more but is not counted.
    """
    classes = pad_sequence([F.normalize(rows) for rows in embeddings], batch_first=True)  # (C, n, d)
    sizes = torch.tensor([len(rows) for rows in embeddings], device=classes.device)
    absent = torch.arange(classes.shape[1], device=classes.device) >= sizes[:, None]
    mean = classes.sum(dim=1) / sizes[:, None]
    direction = mean
    picks: list[Tensor] = []
    chosen: list[dict[int, None]] = [{} for _ in embeddings]  # ordered sets
    wanted = [min(num_exemplars, len(rows)) for rows in embeddings]
    while len(picks) < MAX_ROUNDS and any(len(c) < w for c, w in zip(chosen, wanted, strict=True)):
        for _ in range(max(*wanted, 1)):  # as many rounds as picks wanted between looks from the host
            scores = torch.einsum("cnd,cd->cn", classes, direction).masked_fill(absent, float("-inf"))
            pick = scores.argmax(dim=1)
            direction = direction + mean - classes[torch.arange(len(classes)), pick]
            picks.append(pick)
        for order, column in zip(chosen, torch.stack(picks, dim=1).tolist(), strict=True):
            order.update(dict.fromkeys(column))
    return [
        torch.tensor(_filled(order, want, len(rows)), dtype=torch.int64, device=classes.device)
        for order, want, rows in zip(chosen, wanted, embeddings, strict=True)
    ]


def pick_at_random(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """Exemplars drawn uniformly."""
    return [
        torch.randperm(len(rows), generator=generator, device=generator.device)[:num_exemplars].to(rows.device)
        for rows in embeddings
    ]


def pick_first(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """The first exemplars of each class, as they are stored."""
    return [torch.arange(min(num_exemplars, len(rows)), device=rows.device) for rows in embeddings]


def _filled(order: dict[int, None], wanted: int, size: int) -> list[int]:
    """The first `wanted` picks, completed in storage order where identical images kept herding in one place."""
    return [*order, *(row for row in range(size) if row not in order)][:wanted]
