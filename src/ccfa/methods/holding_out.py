"""Exemplars that are never trained on: of every ten of a class, the second.

One rule, `parted`, divides a class in storage order before it is learned and its exemplars in order of preference after
that, so that a memory which shrinks to its first rows keeps both kinds. Of a new class, what is held out are as many
images as will be stored (BiC's authors), or a tenth of all (inclearn).
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from ccfa.methods.method import LearnerView
from ccfa.methods.selection import herd

EVERY = 10


def parted(rows: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The rows to train on and, of the first `limit`, every tenth, to be held out."""
    place = torch.arange(len(rows), device=rows.device)
    is_held = (place % EVERY == 1) & (place < limit)
    return rows[~is_held], rows[is_held]


def num_held_out(num_exemplars: int) -> int:
    """How many of a class's exemplars are held out: 2 of 20, and 1 of 2 to 11."""
    return len(range(1, num_exemplars, EVERY))


def not_held_out(learner: LearnerView) -> Tensor:
    """D'_k without what is held out."""
    rows = [parted(rows, _quota(learner))[0] for rows in learner.new_classes()]
    return torch.cat(rows + [parted(rows, len(rows))[0] for rows in learner.exemplars()])


def held_out(learner: LearnerView) -> Tensor:
    """Equally many held-out rows of every seen class."""
    return torch.cat([parted(rows, _quota(learner))[1] for rows in learner.exemplars() + learner.new_classes()])


def not_a_tenth(learner: LearnerView) -> Tensor:
    """D'_k without a tenth of the images of every class."""
    return torch.cat([parted(rows, len(rows))[0] for rows in learner.new_classes() + learner.exemplars()])


def held_out_exemplars(learner: LearnerView) -> Tensor:
    """Equally many held-out exemplars of every seen class, those of new classes selected now."""
    exemplars = learner.exemplars() + learner.select_new_exemplars()
    return torch.cat([parted(rows, _quota(learner))[1] for rows in exemplars])


def herd_beside_held_out(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """The held-out rows of each class at every tenth place, and herded ones of the rest in between."""
    parts = [parted(torch.arange(len(rows), device=rows.device), num_exemplars) for rows in embeddings]
    candidates = [rows[kept] for rows, (kept, _) in zip(embeddings, parts, strict=True)]
    herded = herd(candidates, num_exemplars - num_held_out(num_exemplars), generator)
    return [_in_turn(kept[picks], held) for (kept, held), picks in zip(parts, herded, strict=True)]


def herd_apart(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """Herded rows of the tenth of each class that is held out at every tenth place, and of the rest in between."""
    parts = [parted(torch.arange(len(rows), device=rows.device), len(rows)) for rows in embeddings]
    quotas = num_exemplars - num_held_out(num_exemplars), num_held_out(num_exemplars)
    kinds = []
    for indices, quota in zip(zip(*parts, strict=True), quotas, strict=True):  # to train on, then held out
        candidates = [rows[own] for rows, own in zip(embeddings, indices, strict=True)]
        herded = herd(candidates, quota, generator)
        kinds.append([own[picks] for own, picks in zip(indices, herded, strict=True)])
    return [_in_turn(*both) for both in zip(*kinds, strict=True)]


def _in_turn(to_train_on: Tensor, held: Tensor) -> Tensor:
    """Both kinds in one order, as `parted` takes them apart."""
    order = torch.empty(len(held) + len(to_train_on), dtype=torch.int64, device=held.device)
    places = parted(torch.arange(len(order), device=held.device), len(order))
    order[places[0]], order[places[1]] = to_train_on, held
    return order


def _quota(learner: LearnerView) -> int:
    return learner.method.memory.quota(learner.stage.num_seen)
