"""Which old class each feature is pushed towards (Y_target)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ccfa.errors import choose


class Targets(NamedTuple):
    """A target class for each copy of each row, and whether the row has one at all."""

    classes: Tensor  # (count, N)
    valid: Tensor  # (count, N) boolean


TargetRule = Callable[[Tensor, Tensor, int, Generator], Targets]
"""(scores of the current head over old classes (N, old), labels (N, L), count, generator) -> Targets."""


def most_confident(scores: Tensor, labels: Tensor, count: int, generator: Generator) -> Targets:
    """argmax over old classes without the own ones: the paper's choice (K = 1)."""
    return _best(scores, labels, count)


def least_confident(scores: Tensor, labels: Tensor, count: int, generator: Generator) -> Targets:
    """The old class with the lowest score, without the own ones ("farthest")."""
    return _best(-scores, labels, count)


def random_class(scores: Tensor, labels: Tensor, count: int, generator: Generator) -> Targets:
    """Any old class but the own ones, drawn anew for each copy."""
    noise = torch.rand(count, *scores.shape, generator=generator, device=scores.device)
    own = own_classes(labels, scores.shape[1]).expand(count, -1, -1)
    return Targets(noise.masked_fill(own, -1.0).argmax(dim=2), ~own.all(dim=2))


def own_label(scores: Tensor, labels: Tensor, count: int, generator: Generator) -> Targets:
    """The row's own label, where that is an old class ("towards the ground truth"); other rows have no target."""
    first = labels[:, 0].expand(count, -1)
    return Targets(first.clamp(max=scores.shape[1] - 1), first < scores.shape[1])


TARGETS: dict[str, TargetRule] = {
    "most-confident": most_confident,
    "least-confident": least_confident,
    "random": random_class,
    "own-label": own_label,
}


def target_rule(name: str) -> TargetRule:
    """The rule of that name."""
    return choose("target rule", name, TARGETS)


def own_classes(labels: Tensor, num_old: int) -> Tensor:
    """Mask (N, old) of the old classes that a row carries as a label."""
    return (labels[:, :, None] == torch.arange(num_old, device=labels.device)).any(dim=1)


def _best(scores: Tensor, labels: Tensor, count: int) -> Targets:
    own = own_classes(labels, scores.shape[1])
    # Minus infinity, not the paper's 0: logits that are never positive would let a 0 win.
    classes = scores.masked_fill(own, float("-inf")).argmax(dim=1)
    return Targets(classes.expand(count, -1), (~own.all(dim=1)).expand(count, -1))
