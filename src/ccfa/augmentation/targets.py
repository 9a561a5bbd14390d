"""Which old class each feature is pushed towards (Y_target)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ccfa.augmentation.balanced import draw_places, solve
from ccfa.errors import UsageError, unknown


class Targets(NamedTuple):
    """A target class for each copy of each row, and whether the row has one at all."""

    classes: Tensor  # (count, N)
    valid: Tensor  # (count, N) boolean


TargetRule = Callable[[Tensor, Tensor, int, int, Generator | None], Targets]
"""(logits of the current head, old classes first (N, outputs), labels (N, L), num_old, count, generator) -> Targets.

Every label is an own class of its row: labels of weight 0 are replaced before (`Samples.weighing_labels`).
"""


def most_confident(logits: Tensor, labels: Tensor, num_old: int, count: int, generator: Generator | None) -> Targets:
    """argmax over old classes without the own ones: the paper's choice (K = 1)."""
    return _best(logits[:, :num_old], labels, count)


def least_confident(logits: Tensor, labels: Tensor, num_old: int, count: int, generator: Generator | None) -> Targets:
    """The old class with the lowest score, without the own ones ("farthest")."""
    return _best(-logits[:, :num_old], labels, count)


def random_class(logits: Tensor, labels: Tensor, num_old: int, count: int, generator: Generator | None) -> Targets:
    """Any old class but the own ones, drawn anew for each copy."""
    noise = torch.rand(count, len(logits), num_old, generator=generator, device=logits.device)
    own = own_classes(labels, num_old).expand(count, -1, -1)
    return Targets(noise.masked_fill(own, -1.0).argmax(dim=2), ~own.all(dim=2))


def own_label(logits: Tensor, labels: Tensor, num_old: int, count: int, generator: Generator | None) -> Targets:
    """The row's own label, where that is an old class ("towards the ground truth"); other rows have no target."""
    first = labels[:, 0].expand(count, -1)
    return Targets(first.clamp(max=num_old - 1), first < num_old)


@dataclass(frozen=True)
class Balanced:
    """Among each row's K most confident old classes, those that spread the batch evenly over the old classes (eq. 2).

    W is the softmax over the seen classes of the current head, at most 1 in a batch, or the logits as they are; every
    copy draws from the rows of S.
    """

    k: int
    scores: Literal["softmax", "logits"] = "softmax"

    def __post_init__(self) -> None:
        if self.k < 1 or self.scores not in ("softmax", "logits"):
            raise UsageError(
                f"Balanced targets need k >= 1 and scores 'softmax' or 'logits'; "
                f"got k={self.k}, scores={self.scores!r}."
            )

    def __call__(
        self, logits: Tensor, labels: Tensor, num_old: int, count: int, generator: Generator | None
    ) -> Targets:
        if self.k == 1:
            return most_confident(logits, labels, num_old, count, generator)
        assigned, classes, valid = self.assignment(logits, labels, num_old)
        places = draw_places(assigned, count, generator)
        drawn = classes.expand(count, -1, -1).gather(2, places[:, :, None]).squeeze(2)
        return Targets(drawn.clamp(max=num_old - 1), valid.expand(count, -1))

    def assignment(self, logits: Tensor, labels: Tensor, num_old: int) -> tuple[Tensor, Tensor, Tensor]:
        """S (N, K), the old class of each place (`num_old` where there is none), and whether a row has any (N,)."""
        own = own_classes(labels, num_old)
        valid = ~own.all(dim=1)
        lowest = torch.finfo(logits.dtype).min / 4
        allowed = logits[:, :num_old].masked_fill(own, lowest)
        classes = allowed.topk(min(self.k, num_old), dim=1).indices  # by logits: softmax may round two classes to one
        excluded = own.gather(1, classes)
        if self.scores == "softmax":
            confidences = _up_to_one(logits.softmax(dim=1).gather(1, classes).masked_fill(excluded, 0.0))
        else:
            confidences = logits.gather(1, classes)  # their distance to the price of 2 decides, so their scale stays
        confidences = confidences.masked_fill(excluded, lowest)
        classes = classes.masked_fill(excluded, num_old)
        return solve(confidences, classes, num_old, valid.sum() / num_old), classes, valid


TARGETS: dict[str, TargetRule] = {
    "most-confident": most_confident,
    "least-confident": least_confident,
    "random": random_class,
    "own-label": own_label,
}


def target_rule(name: str) -> TargetRule:
    """The rule of that name; balanced-K and balanced-K-logits for any K >= 1."""
    if balanced := re.fullmatch(r"balanced-([1-9][0-9]*)(-logits)?", name):
        return Balanced(int(balanced[1]), "logits" if balanced[2] else "softmax")
    if name not in TARGETS:
        raise unknown("target rule", name, [*TARGETS, "balanced-K", "balanced-K-logits"])
    return TARGETS[name]


def own_classes(labels: Tensor, num_old: int) -> Tensor:
    """Mask (N, old) of the old classes that a row carries as a label."""
    return (labels[:, :, None] == torch.arange(num_old, device=labels.device)).any(dim=1)


def _up_to_one(confidences: Tensor) -> Tensor:
    """Confidences divided by the largest: if the own class is certain, all others are below the solver's error.

    The optimal S stays the same while no confidence is worth an unbalanced class, before and after.
    """
    return confidences / confidences.amax().clamp(min=torch.finfo(confidences.dtype).tiny)


def _best(scores: Tensor, labels: Tensor, count: int) -> Targets:
    own = own_classes(labels, scores.shape[1])
    # Minus infinity, not the paper's 0: logits that are never positive would let a 0 win.
    classes = scores.masked_fill(own, float("-inf")).argmax(dim=1)
    return Targets(classes.expand(count, -1), (~own.all(dim=1)).expand(count, -1))
