"""Parts that methods share: selectors of rows, parameters and exemplars, schedules, imprinting, distillation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ccfa.data import Stage
from ccfa.methods.method import LearnerView, Method, Phase, Recipe, Step, Term
from ccfa.models import Features, LinearHead, LocalSimilarityHead, Network


def balanced_exemplars(learner: LearnerView) -> Tensor:
    """Equally many exemplars of every seen class."""
    return learner.balanced_rows()


def all_but_old_classes(network: Network) -> list[nn.Parameter]:
    """Everything trains but the old classes' block of the head."""
    return [parameter for parameter in network.parameters() if parameter is not network.head.old]


def trainable(network: Network) -> list[nn.Parameter]:
    """All parameters but those of frozen branches."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def class_blocks(network: Network) -> list[nn.Parameter]:
    """The head's old and new classes, without its scale."""
    return [network.head.old, network.head.new]


def adam(parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> optim.Optimizer:
    """Adam, with the weight decay as part of the gradient."""
    rate = torch.tensor(lr, device=parameters[0].device, dtype=torch.float32)
    return optim.Adam(parameters, rate, weight_decay=weight_decay, fused=True)


def cosine(epoch: int, epochs: int) -> float:
    """Cosine annealing to 0 as the published code steps it: the first two epochs share the base rate."""
    return (1 + math.cos(math.pi * max(epoch - 1, 0) / epochs)) / 2


@dataclass(frozen=True)
class Steps:
    """The rate is multiplied by `gamma` at each of these fractions of the epochs, but never before the second epoch."""

    at: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def __call__(self, epoch: int, epochs: int) -> float:
        return float(self.gamma ** sum(epoch >= max(1, round(fraction * epochs)) for fraction in self.at))


def imprint(learner: LearnerView) -> None:
    """Start each new class from its training images: k-means centres for proxies, else their mean direction.

    Both are scaled to the mean norm of the old classes' weights. In the first stage nothing is changed.
    """
    head = learner.network.head
    if not len(head.old):
        return
    directions = [F.normalize(learner.embeddings(rows)) for rows in learner.new_classes()]
    if isinstance(head, LocalSimilarityHead):
        centres = _proxies(directions, head.num_proxies, learner.generator("imprint"))
    else:
        centres = torch.stack([F.normalize(rows.mean(dim=0), dim=0) for rows in directions])
    with torch.no_grad():
        head.new.copy_(centres * head.old.norm(dim=-1).mean())


def _proxies(directions: Sequence[Tensor], num_proxies: int, generator: Generator) -> Tensor:
    """k-means centres of each class; classes of the same size, mostly all of them, are clustered together."""
    centres = directions[0].new_empty(len(directions), num_proxies, directions[0].shape[1])
    for size in sorted({len(rows) for rows in directions}):
        alike = [label for label, rows in enumerate(directions) if len(rows) == size]
        centres[alike] = kmeans(torch.stack([directions[label] for label in alike]), num_proxies, generator)
    return centres


RESTARTS, MAX_ITERATIONS = 10, 300  # of k-means, as scikit-learn's


def kmeans(points: Tensor, num_clusters: int, generator: Generator) -> Tensor:
    """The best centres (..., k, d) of several k-means++ starts for points (..., n, d); too few points repeat.

    All restarts of all classes run at once, on the device.
    """
    *batch, num_points, dim = points.shape
    if num_points < num_clusters:
        points = points[..., torch.arange(num_clusters, device=points.device) % num_points, :]
    points = points.reshape(-1, 1, *points.shape[-2:]).expand(-1, RESTARTS, -1, -1).flatten(0, 1)  # (B * R, n, d)
    centres = _plus_plus(points, num_clusters, generator)
    for _ in range(MAX_ITERATIONS):
        member = F.one_hot(torch.cdist(points, centres).argmin(dim=2), num_clusters).to(points)  # (B * R, n, k)
        sizes = member.sum(dim=1).unsqueeze(2)
        means = member.transpose(1, 2) @ points / sizes.clamp(min=1)
        updated = torch.where(sizes > 0, means, centres)  # an empty cluster stays where it is
        if torch.equal(updated, centres):
            break
        centres = updated
    inertia = torch.cdist(points, centres).amin(dim=2).square().sum(dim=1).view(-1, RESTARTS)
    best = inertia.argmin(dim=1) + RESTARTS * torch.arange(len(inertia), device=inertia.device)
    return centres[best].reshape(*batch, num_clusters, dim)


def _plus_plus(points: Tensor, num_clusters: int, generator: Generator) -> Tensor:
    """k-means++ seeding: each further centre is drawn with probability proportional to its squared distance."""
    weights = torch.ones(points.shape[:2], device=points.device, dtype=points.dtype)
    centres = points.new_empty(len(points), 0, points.shape[2])
    for _ in range(num_clusters):
        chosen = torch.multinomial(weights, 1, generator=generator)  # (B * R, 1)
        drawn = points.gather(1, chosen.unsqueeze(2).expand(-1, -1, points.shape[2]))
        centres = torch.cat([centres, drawn], dim=1)
        # If all points coincide with centres, any choice is as good.
        weights = torch.cdist(points, centres).amin(dim=2).square() + torch.finfo(points.dtype).tiny
    return centres


def start_afresh(learner: LearnerView) -> None:
    """Forget everything: a newly initialised backbone and head over all seen classes."""
    learner.reset_network()


def seen_to_new(stage: Stage) -> float:
    """sqrt(seen / new): the factor PODNet and AFC put on their distillation weights."""
    return math.sqrt(stage.num_seen / stage.num_new)


def old_to_new(stage: Stage) -> float:
    """sqrt(old / new): the factor UCIR puts on its less-forget weight."""
    return math.sqrt(stage.num_old / stage.num_new)


def new_share(stage: Stage) -> float:
    """new / seen: the weight of L_cls in BiC and WA."""
    return stage.num_new / stage.num_seen


def old_share(stage: Stage) -> float:
    """old / seen: the weight of the distillation beside it."""
    return 1 - new_share(stage)


@dataclass(frozen=True)
class Phases:
    """The phases of the first stage and those of every later one."""

    first: tuple[Phase, ...]
    later: tuple[Phase, ...]

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        return self.first if stage.index == 0 else self.later


def first_and_later(
    recipe: Recipe,
    milestones: tuple[float, ...],
    later_share: float,
    later_milestones: tuple[float, ...],
    later_weight_decay: float,
) -> Phases:
    """One phase per stage: the recipe's in the first one, then `later_share` as many epochs with other numbers."""
    first = recipe.phase(Steps(milestones))
    epochs, schedule = round(later_share * recipe.epochs), Steps(later_milestones)
    later = replace(first, epochs=epochs, schedule=schedule, weight_decay=later_weight_decay)
    return Phases(first=(first,), later=(later,))


class SeparateLinearHead(LinearHead):
    """A linear head whose new classes, and whose old ones, compete with each other alone while it trains.

    In L_cls, a sample of a new class has minus infinity at all old classes, and one of an old class at all new ones.
    """

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(features, labels)
        if labels is None or not self.training:
            return logits
        is_old = torch.arange(self.num_classes, device=labels.device) < len(self.old)
        return logits.masked_fill(is_old != (labels[:, None] < len(self.old)), float("-inf"))


def is_frozen(method: Method, stage: Stage) -> bool:
    """Whether the method leaves the backbone alone in the stages after this one, so that embeddings never change."""
    later = method.phases(Stage(stage.index + 1, stage.num_seen, stage.num_seen + 1))
    return not any(phase.epochs and phase.samples is None for phase in later)  # images move batch norm's statistics


def learns_one_class(method: Method) -> bool:
    """Whether the method learns from a later stage of one class: not if that class would compete with no other."""
    return not isinstance(method.head(1), SeparateLinearHead)


class OldLogitDistillation(Term):
    """weight * factor(stage) * loss(the previous network's logits, old logits, temperature)."""

    def __init__(
        self,
        temperature: float,
        loss: Callable[[Tensor, Tensor, float], Tensor],
        factor: Callable[[Stage], float],
        weight: float = 1.0,
    ) -> None:
        super().__init__("distillation")
        self.temperature = temperature
        self.loss = loss
        self.factor = factor
        self.weight = weight

    def forward(self, step: Step) -> Tensor:
        logits = step.head(step.samples.features)[:, : step.stage.num_old]
        distance = self.loss(step.previous_logits, logits, self.temperature)
        return self.weight * self.factor(step.stage) * distance


class EmbeddingDistillation(Term):
    """weight * factor(stage) * loss(Z_{k-1}, Z_k), where the loss is a mean over rows."""

    is_row_mean = True

    def __init__(self, name: str, weight: float, factor: Callable[[Stage], float], loss: Callable[..., Tensor]) -> None:
        super().__init__(name)
        self.weight = weight
        self.factor = factor
        self.loss = loss

    def fuse(self, fused: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        self.loss = fused(self.loss)  # it makes dozens of small kernels, for maps as many per level

    def forward(self, step: Step) -> Tensor:
        return self.weight * self.factor(step.stage) * self.distance(step.previous_features, step.features)

    def distance(self, previous: Features, current: Features) -> Tensor:
        return self.loss(previous.embedding, current.embedding)


class MapDistillation(EmbeddingDistillation):
    """weight * factor(stage) * loss(maps of f_{k-1}, maps of f_k)."""

    def distance(self, previous: Features, current: Features) -> Tensor:
        return self.loss(previous.maps, current.maps)


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
