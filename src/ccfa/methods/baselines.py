"""What every method is compared with: no measure against forgetting, replay alone, and all data at once."""

from dataclasses import replace
from typing import TypedDict, Unpack

from ccfa.data import CIFAR100_PODNET, Transforms
from ccfa.losses.classification import cross_entropy
from ccfa.methods.method import EVERYTHING, Budget, Method, Phase
from ccfa.methods.parts import (
    Phases,
    all_parameters,
    cosine,
    new_and_exemplars,
    nothing_to_prepare,
    sgd,
    start_afresh,
)
from ccfa.methods.selection import herd, pick_at_random
from ccfa.models import LinearHead
from ccfa.models.resnet import backbone_named


def finetune(
    *,
    backbone: str = "resnet32-podnet",
    transforms: Transforms = CIFAR100_PODNET,
    epochs: int = 160,
    batch_size: int = 128,
    lr: float = 0.1,
    weight_decay: float = 5e-4,
) -> Method:
    """Train on each stage's new classes and nothing else: the lower bound."""
    main = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=new_and_exemplars,
        parameters=all_parameters,
        optimiser=sgd,
        schedule=cosine,
        batch_size=batch_size,
        weight_decay=weight_decay,
    )
    return Method(
        name="finetune",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=LinearHead,
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
        prepare=nothing_to_prepare,
    )


class Training(TypedDict, total=False):
    """The options of `finetune`, for methods that only add to it."""

    backbone: str
    transforms: Transforms
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float


def replay(*, memory: int = 20, **training: Unpack[Training]) -> Method:
    """Fine-tuning on the new classes and the exemplars."""
    return replace(finetune(**training), name="replay", memory=Budget(per_class=memory), select_exemplars=herd)


def joint(**training: Unpack[Training]) -> Method:
    """Train from scratch on all data so far, at every stage: the upper bound."""
    return replace(
        finetune(**training),
        name="joint",
        prepare=start_afresh,
        memory=EVERYTHING,
        select_exemplars=pick_at_random,
        no_old_head="it starts afresh at every stage with all data",
    )
