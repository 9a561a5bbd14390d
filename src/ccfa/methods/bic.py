"""BiC: Wu, Chen, Wang, Ye, Liu, Guo and Fu, "Large Scale Incremental Learning", CVPR 2019."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from ccfa.data import CIFAR100_UNJITTERED, Stage, Transforms
from ccfa.errors import choose
from ccfa.losses.classification import cross_entropy
from ccfa.losses.distillation import softened_cross_entropy, softened_sigmoids
from ccfa.methods.correction import all_but_correction, correction_alone, sgd_decaying_the_last
from ccfa.methods.holding_out import (
    held_out,
    held_out_exemplars,
    herd_apart,
    herd_beside_held_out,
    not_a_tenth,
    not_held_out,
)
from ccfa.methods.method import Budget, ExemplarSelector, Method, Phase, RowSelector, Step, Term, always_one
from ccfa.methods.parts import Phases, Steps, nothing_to_prepare, sgd
from ccfa.models import CorrectedLinearHead
from ccfa.models.resnet import backbone_named


def bic(
    *,
    backbone: str = "resnet32-podnet",
    transforms: Transforms = CIFAR100_UNJITTERED,
    epochs: int = 250,
    batch_size: int = 128,
    lr: float = 0.1,
    weight_decay: float = 2e-4,
    milestones: tuple[float, ...] = (0.4, 0.6, 0.8),
    temperature: float = 2.0,
    correction_epochs: int = 500,
    correction_lr: float = 0.1,
    correction_decay: float | None = None,
    memory: int = 20,
    loss: Literal["authors", "inclearn"] = "authors",
) -> Method:
    """BiC: distillation and cross-entropy, then a correction fitted on held-out exemplars.

    `loss` follows its authors' code or that of PODNet's code base, which made the paper's row. `correction_decay` is
    0.1 in the former and 0 in the latter unless given.
    """
    variant = choose("BiC loss", loss, VARIANTS)
    main = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=variant.training_rows,
        parameters=all_but_correction,
        optimiser=sgd,
        schedule=Steps(milestones),
        batch_size=batch_size,
        weight_decay=weight_decay,
    )
    correction = replace(
        main,
        name="correction",
        epochs=correction_epochs,
        lr=correction_lr,
        rows=variant.correction_rows,
        parameters=correction_alone,
        optimiser=sgd_decaying_the_last,
        # The authors' penalty, correction_decay * gamma^2 / 2.
        weight_decay=variant.correction_decay if correction_decay is None else correction_decay,
        train_batch_norm=False,
        use_terms=False,
    )
    return Method(
        name="bic",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=partial(CorrectedLinearHead, bias=False, relu=True),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main, correction)),
        prepare=nothing_to_prepare,
        terms=(partial(variant.distillation, temperature),),
        classification_weight=variant.classification_weight,
        memory=Budget(per_class=memory),
        needs_memory=2,
        select_exemplars=variant.select_exemplars,
    )


def new_share(stage: Stage) -> float:
    """1 - lambda = new / seen."""
    return stage.num_new / stage.num_seen


class OldLogitDistillation(Term):
    """lambda * distillation of the previous network's logits, corrected as it predicts; lambda = old / seen."""

    def __init__(self, temperature: float) -> None:
        super().__init__("distillation")
        self.temperature = temperature

    def forward(self, step: Step) -> Tensor:
        """The penalty on the old classes' logits."""
        logits = step.head(step.samples.features)[:, : step.stage.num_old]
        previous = step.previous_head(step.previous_head.embed(step.previous_features.embedding))
        return self.penalty(previous, logits, step.stage)

    def penalty(self, previous: Tensor, logits: Tensor, stage: Stage) -> Tensor:
        """By softmax cross-entropy."""
        return (1 - new_share(stage)) * softened_cross_entropy(previous, logits, self.temperature)


class OldSigmoidDistillation(OldLogitDistillation):
    """The same by sigmoids, with a weight of 1."""

    def penalty(self, previous: Tensor, logits: Tensor, stage: Stage) -> Tensor:
        """By binary cross-entropy."""
        return softened_sigmoids(previous, logits, self.temperature)


class Variant(NamedTuple):
    """The parts in which the two published codes differ."""

    distillation: Callable[[float], Term]
    classification_weight: Callable[[Stage], float]
    training_rows: RowSelector
    correction_rows: RowSelector
    select_exemplars: ExemplarSelector
    correction_decay: float


VARIANTS = {
    "authors": Variant(OldLogitDistillation, new_share, not_held_out, held_out, herd_beside_held_out, 0.1),
    "inclearn": Variant(OldSigmoidDistillation, always_one, not_a_tenth, held_out_exemplars, herd_apart, 0.0),
}
