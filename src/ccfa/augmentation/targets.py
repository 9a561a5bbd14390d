"""Which old class each feature is pushed towards (Y_target): the rules, and the solver of the balanced one (eq. 2)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ccfa.errors import UsageError, unknown
from ccfa.kernels import balanced_assignment


class Targets(NamedTuple):
    """A target class for each copy of each row, and whether the row has one at all."""

    classes: Tensor  # (count, N)
    valid: Tensor  # (count, N) boolean


TargetRule = Callable[[Tensor, Tensor, int, int, Generator | None], Targets]
"""(logits of the current head, old classes first (N, outputs), labels (N, L), num_old, count, generator) -> Targets.

Every label is an own class of its row: labels of weight 0 are replaced before (`weighing_labels`).
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
            raise UsageError(f"Balanced targets need k of 1 or more and scores softmax or logits, got {self}.")

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
            confidences = logits.softmax(dim=1).gather(1, classes).masked_fill(excluded, 0.0)
            # Divided by the largest: if the own class is certain, all others are below the solver's error. The optimal
            # S stays the same while no confidence is worth an unbalanced class, before and after.
            confidences = confidences / confidences.amax().clamp(min=torch.finfo(confidences.dtype).tiny)
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


def finds_any_other(rule: TargetRule) -> bool:
    """Whether the rule has a target for exactly those rows that have an old class which is not their own."""
    return isinstance(rule, Balanced) or rule in (most_confident, least_confident, random_class)


def own_classes(labels: Tensor, num_old: int) -> Tensor:
    """Mask (N, old) of the old classes that a row carries as a label."""
    classes = torch.arange(num_old, device=labels.device)
    return labels == classes if labels.shape[1] == 1 else (labels[:, :, None] == classes).any(dim=1)


def _best(scores: Tensor, labels: Tensor, count: int) -> Targets:
    own = own_classes(labels, scores.shape[1])
    # Minus infinity, not the paper's 0: logits that are never positive would let a 0 win.
    classes = scores.masked_fill(own, float("-inf")).argmax(dim=1)
    return Targets(classes.expand(count, -1), (~own.all(dim=1)).expand(count, -1))


# The solver. For confidences W, and S whose rows are on the simplex over K classes, the problem is
# max <W, S> - sum_j |n_j - u| with n_j = sum_i S_ij. With prices in [-1, 1] it is a saddle point, min over prices of
# max over S of <W - prices, S> + u sum prices. It is solved by the primal-dual hybrid gradient method with reflection,
# Halpern's averaging towards an anchor and restarts: a fixed sequence of operators, so nothing waits for the host.
# On a GPU they are one kernel (kernels/balanced.cu).
RESTART = 50  # iterations after which the anchor moves to where the iteration has come
PRICE_WEIGHT = 3.0  # how much longer the steps of the prices are than those of S; measured, as RESTART
ITERATIONS = 150


def solve(confidences: Tensor, classes: Tensor, num_old: int, share: Tensor) -> Tensor:
    """Assign each row to its candidate classes so that the classes are used evenly.

    Args:
        confidences: W (N, K) of the candidates.
        classes: The candidates (N, K). A place without a class has the index `num_old` and a very low confidence.
        num_old: The number of old classes.
        share: u, the number of rows meant for each class, a scalar.

    Returns:
        The relaxed assignment S (N, K). Its rows sum to 1.
    """
    found = balanced_assignment(confidences, classes, num_old, share, ITERATIONS, RESTART, PRICE_WEIGHT)
    if found is not None:
        return found
    num_rows, num_places = confidences.shape
    flat = classes.flatten()
    gain = (confidences - confidences.amax(dim=1, keepdim=True)) / PRICE_WEIGHT
    choices = gain.new_zeros(num_old + 1).index_add(0, flat, gain.new_ones(num_rows * num_places))
    price_step = PRICE_WEIGHT / choices.clamp(min=1)  # a class that many rows may choose moves with care
    ranks = torch.arange(1, num_places + 1, device=gain.device, dtype=gain.dtype)
    lacking = gain.new_zeros(num_old + 1) - share

    assigned = torch.full_like(gain, 1 / num_places)
    excess = lacking.index_add(0, flat, assigned.flatten())  # n - u
    prices = torch.zeros_like(excess)
    anchors = assigned, excess, prices
    for iteration in range(ITERATIONS):
        since_restart = iteration % RESTART
        wanted = torch.add(assigned + gain, prices[classes], alpha=-1 / PRICE_WEIGHT)
        next_assigned = onto_simplex(wanted, ranks)
        next_excess = lacking.index_add(0, flat, next_assigned.flatten())
        reflected = torch.lerp(excess, next_excess, 2.0)
        next_prices = torch.addcmul(prices, price_step, reflected).clamp(-1, 1)
        if since_restart == RESTART - 1 or iteration == ITERATIONS - 1:
            anchors = assigned, excess, prices = next_assigned, next_excess, next_prices
            continue
        inward = (since_restart + 1) / (since_restart + 2)
        assigned = torch.lerp(anchors[0], torch.lerp(assigned, next_assigned, 2.0), inward)
        excess = torch.lerp(anchors[1], reflected, inward)
        prices = torch.lerp(anchors[2], torch.lerp(prices, next_prices, 2.0), inward)
    return assigned


def onto_simplex(rows: Tensor, ranks: Tensor) -> Tensor:
    """The nearest points with entries >= 0 that sum to 1; `ranks` are 1, ..., K."""
    highest_first = rows.sort(dim=1, descending=True).values
    threshold = ((highest_first.cumsum(dim=1) - 1) / ranks).amax(dim=1, keepdim=True)
    return (rows - threshold).clamp(min=0)


def draw_places(assigned: Tensor, count: int, generator: Generator | None) -> Tensor:
    """Places (count, N), one drawn from each row of S for each copy; a place with S = 0 is never drawn."""
    shape = (count, *assigned.shape)
    uniform = torch.rand(shape, generator=generator, device=assigned.device, dtype=assigned.dtype)
    return (assigned / -uniform.log()).argmax(dim=2)  # the first of exponential clocks that run at the speeds S
