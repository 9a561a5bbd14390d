"""BiC: Wu, Chen, Wang, Ye, Liu, Guo and Fu, "Large Scale Incremental Learning", CVPR 2019."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn, optim

from ccfa.data import CIFAR100_UNJITTERED, Stage
from ccfa.errors import choose
from ccfa.losses import cross_entropy, softened_cross_entropy, softened_sigmoids
from ccfa.methods.method import (
    Budget,
    ExemplarSelector,
    LearnerView,
    Method,
    Recipe,
    RowSelector,
    always_one,
    register_method,
    sgd,
)
from ccfa.methods.parts import OldLogitDistillation, Phases, Steps, herd, new_share, old_share
from ccfa.models import LinearHead, Network


@register_method("bic", Recipe(transforms=CIFAR100_UNJITTERED, epochs=250, weight_decay=2e-4))
def bic(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (0.4, 0.6, 0.8),
    temperature: float = 2.0,
    correction_epochs: int = 500,
    correction_lr: float = 0.1,
    correction_decay: float | None = None,
    memory: int = 20,
    loss: Literal["authors", "inclearn"] = "authors",
) -> Method:
    """BiC: distillation, then a correction of the new logits.

    The correction is fitted on held-out exemplars.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        temperature: The temperature of the distillation.
        correction_epochs: Epochs in which the correction is fitted.
        correction_lr: The learning rate of the correction.
        correction_decay: The weight decay of the correction's bias; if none, 0.1 with the authors' loss and 0 with
            inclearn's.
        memory: Exemplars kept per class.
        loss: As in the authors' code, or as in PODNet's code base (inclearn), which made the paper's row.
    """
    variant = choose("BiC loss", loss, VARIANTS)
    main = recipe.phase(Steps(milestones), rows=variant.training_rows, parameters=all_but_correction)
    correction = replace(
        main,
        name="correction",
        epochs=correction_epochs,
        lr=correction_lr,
        rows=held_out_exemplars,
        parameters=correction_alone,
        optimiser=sgd_decaying_the_last,
        # The authors' penalty, correction_decay * gamma^2 / 2.
        weight_decay=variant.correction_decay if correction_decay is None else correction_decay,
        train_batch_norm=False,
        use_terms=False,
    )
    return Method(
        name="bic",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(CorrectedLinearHead, bias=False, relu=True),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main, correction)),
        terms=(partial(OldLogitDistillation, temperature, variant.distillation, variant.distillation_weight),),
        classification_weight=variant.classification_weight,
        memory=Budget(per_class=memory),
        needs_memory=2,
        select_exemplars=variant.select_exemplars,
    )


class CorrectedLinearHead(LinearHead):
    """BiC's head: the new classes' logits o become beta * o + gamma, two numbers fitted after each stage.

    They act on the new block alone, and a head that grows drops them: only the latest correction counts, and a frozen
    copy of the head carries its own.
    """

    def __init__(self, dim: int, bias: bool = True, relu: bool = False) -> None:
        super().__init__(dim, bias, relu=relu)
        self.beta = nn.Parameter(torch.ones(()))
        self.gamma = nn.Parameter(torch.zeros(()))

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        super().grow(num_new, generator)
        with torch.no_grad():
            self.beta.fill_(1)
            self.gamma.zero_()

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        old, new = super().forward(features, labels).split([len(self.old), len(self.new)], dim=1)
        return torch.cat([old, self.beta * new + self.gamma], dim=1)


CORRECTION = ("head.beta", "head.gamma")


def correction_alone(network: Network) -> list[nn.Parameter]:
    return [parameter for name, parameter in network.named_parameters() if name in CORRECTION]


def all_but_correction(network: Network) -> list[nn.Parameter]:
    return [parameter for name, parameter in network.named_parameters() if name not in CORRECTION]


def sgd_decaying_the_last(parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> optim.Optimizer:
    """SGD whose weight decay acts on the last parameter alone, which is gamma."""
    optimiser = sgd(parameters[:-1], lr, 0.0)
    optimiser.add_param_group({"params": parameters[-1:], "weight_decay": weight_decay})
    return optimiser


# Held-out exemplars are never trained on: of every ten of a class, the second. One rule, `parted`, divides a class in
# storage order before it is learned and its exemplars in order of preference after that, so that a memory which shrinks
# to its first rows keeps both kinds. Of a new class, as many images are held out as will be stored (the authors), or a
# tenth of all (inclearn).
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
    return torch.cat(rows + _of_old_classes(learner, lambda rows: _quota(learner)))


def not_a_tenth(learner: LearnerView) -> Tensor:
    """D'_k without a tenth of the images of every class."""
    rows = [parted(rows, len(rows))[0] for rows in learner.new_classes()]
    return torch.cat(rows + _of_old_classes(learner, len))


def _of_old_classes(learner: LearnerView, limit: Callable[[Tensor], int]) -> list[Tensor]:
    """What is trained on of each old class: of its exemplars that stay with additional rows, and of the others."""
    quota, more, labels = _quota(learner), learner.additional, learner.labels(learner.additional)
    chosen = []
    for label, rows in enumerate(learner.exemplars()):
        staying = torch.cat([rows[:quota], more[labels == label]])  # in the order in which exemplars are chosen of them
        leaving = parted(rows, len(rows))[0][len(parted(rows[:quota], quota)[0]) :]
        chosen += [parted(staying, limit(staying))[0], leaving]
    return chosen


def held_out_exemplars(learner: LearnerView) -> Tensor:
    """Equally many held-out exemplars of every seen class, those of new classes selected now."""
    exemplars = learner.exemplars() + learner.select_new_exemplars()
    return torch.cat([parted(rows, _quota(learner))[1] for rows in exemplars])


def _quota(learner: LearnerView) -> int:
    return learner.method.memory.quota(learner.stage.num_seen)


def herd_beside_held_out(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """The held-out rows of each class at every tenth place, and herded ones of the rest in between."""
    kept, held = _all_parted(embeddings, [num_exemplars] * len(embeddings))
    herded = _herded(embeddings, kept, num_exemplars - num_held_out(num_exemplars), generator)
    return list(map(_in_turn, herded, held))


def herd_apart(embeddings: Sequence[Tensor], num_exemplars: int, generator: Generator) -> list[Tensor]:
    """Herded rows of the tenth of each class that is held out at every tenth place, and of the rest in between."""
    kept, held = _all_parted(embeddings, [len(rows) for rows in embeddings])
    num_held = num_held_out(num_exemplars)
    herded = _herded(embeddings, kept, num_exemplars - num_held, generator)
    return list(map(_in_turn, herded, _herded(embeddings, held, num_held, generator)))


def _all_parted(embeddings: Sequence[Tensor], limits: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    places = [torch.arange(len(rows), device=rows.device) for rows in embeddings]
    kept, held = zip(*map(parted, places, limits), strict=True)
    return list(kept), list(held)


def _herded(embeddings: Sequence[Tensor], rows: Sequence[Tensor], quota: int, generator: Generator) -> list[Tensor]:
    """Of each class the herded ones among the given rows."""
    picks = herd([own[places] for own, places in zip(embeddings, rows, strict=True)], quota, generator)
    return [places[picked] for places, picked in zip(rows, picks, strict=True)]


def _in_turn(to_train_on: Tensor, held: Tensor) -> Tensor:
    """Both kinds in one order, as `parted` takes them apart."""
    order = torch.empty(len(held) + len(to_train_on), dtype=torch.int64, device=held.device)
    places = parted(torch.arange(len(order), device=held.device), len(order))
    order[places[0]], order[places[1]] = to_train_on, held
    return order


class Variant(NamedTuple):
    """The parts in which the two published codes differ."""

    distillation: Callable[[Tensor, Tensor, float], Tensor]
    distillation_weight: Callable[[Stage], float]
    classification_weight: Callable[[Stage], float]
    training_rows: RowSelector
    select_exemplars: ExemplarSelector
    correction_decay: float


VARIANTS = {
    "authors": Variant(softened_cross_entropy, old_share, new_share, not_held_out, herd_beside_held_out, 0.1),
    "inclearn": Variant(softened_sigmoids, always_one, always_one, not_a_tenth, herd_apart, 0.0),
}
