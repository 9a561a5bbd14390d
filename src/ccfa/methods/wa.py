"""Distillation of logits: WA, which also rescales the new classes' weights, and LwF, which keeps no exemplars.

Zhao, Xiao, Gan, Zhang and Xia, "Maintaining Discrimination and Fairness in Class Incremental Learning", CVPR 2020.
Li and Hoiem, "Learning without Forgetting", ECCV 2016.
"""

from functools import partial

import torch

from ccfa.losses import cross_entropy, softened_cross_entropy
from ccfa.methods.method import Budget, LearnerView, Method, Recipe, always_one, register_method
from ccfa.methods.parts import (
    OldLogitDistillation,
    SeparateLinearHead,
    first_and_later,
    herd,
    new_share,
    old_share,
)
from ccfa.models import Head, LinearHead


@register_method("wa", Recipe("resnet32-pycil", epochs=200))
def wa(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (60 / 200, 120 / 200, 170 / 200),
    later_share: float = 170 / 200,
    later_milestones: tuple[float, ...] = (60 / 170, 100 / 170, 140 / 170),
    later_weight_decay: float = 2e-4,
    temperature: float = 2.0,
    align: bool = True,
    nonnegative: bool = False,
    memory: int = 20,
) -> Method:
    """WA: distillation, then new weights scaled to the old norm.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        later_share: Stages after the first train for this many times `epochs`.
        later_milestones: The milestones of stages after the first.
        later_weight_decay: The weight decay of stages after the first.
        temperature: The temperature of the distillation.
        align: Scale the new classes' weights down to the norm of the old ones after each stage.
        nonnegative: Clamp the head's weights at 0 after each step and leave out its bias, as the paper says.
        memory: Exemplars kept per class.
    """
    distillation = AlignedDistillation if align else OldLogitDistillation
    return Method(
        name="wa",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(NonnegativeLinearHead, bias=False) if nonnegative else LinearHead,
        criterion=cross_entropy,
        phases=first_and_later(recipe, milestones, later_share, later_milestones, later_weight_decay),
        terms=(partial(distillation, temperature, softened_cross_entropy, old_share),),
        classification_weight=new_share,
        memory=Budget(per_class=memory),
        select_exemplars=herd,
    )


@register_method("lwf", Recipe("resnet32-pycil", epochs=200))
def lwf(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (60 / 200, 120 / 200, 160 / 200),
    later_share: float = 250 / 200,
    later_milestones: tuple[float, ...] = (60 / 250, 120 / 250, 180 / 250, 220 / 250),
    later_weight_decay: float = 2e-4,
    temperature: float = 2.0,
    lambda_distillation: float = 3.0,
) -> Method:
    """LwF: distillation of the old logits, without exemplars.

    The cross-entropy is that of the new classes among themselves.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        later_share: Stages after the first train for this many times `epochs`.
        later_milestones: The milestones of stages after the first.
        later_weight_decay: The weight decay of stages after the first.
        temperature: The temperature of the distillation.
        lambda_distillation: The weight of the distillation.
    """
    return Method(
        name="lwf",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=SeparateLinearHead,
        criterion=cross_entropy,
        phases=first_and_later(recipe, milestones, later_share, later_milestones, later_weight_decay),
        terms=(partial(OldLogitDistillation, temperature, softened_cross_entropy, always_one, lambda_distillation),),
    )


class NonnegativeLinearHead(LinearHead):
    """A linear head whose parameters are not negative once it has trained."""

    @torch.no_grad()
    def constrain(self) -> None:
        self.old.clamp_(min=0)
        self.new.clamp_(min=0)


class AlignedDistillation(OldLogitDistillation):
    """The same, and the weights are aligned after the stage: the next stage's teacher has them so."""

    def conclude(self, learner: LearnerView) -> None:
        if learner.stage.index > 0:
            align_weights(learner.network.head)


@torch.no_grad()
def align_weights(head: Head) -> None:
    """Multiply the new classes' weights by gamma = mean norm of old weights / mean norm of new ones; biases stay.

    gamma is at most 1: it takes a preference for new classes away and never adds one.
    """
    old, new = head.old[:, : head.dim].norm(dim=1).mean(), head.new[:, : head.dim].norm(dim=1).mean()
    head.new[:, : head.dim] *= torch.where(new > old, old / new, 1.0)
