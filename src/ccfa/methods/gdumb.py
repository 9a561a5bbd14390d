"""GDumb: Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our Progress", ECCV 2020."""

import math
from dataclasses import replace
from functools import partial

from ccfa.augmentation import CutMix
from ccfa.data import CIFAR100_UNJITTERED, Transforms
from ccfa.losses.classification import cross_entropy
from ccfa.methods.method import Budget, LearnerView, Method, Phase
from ccfa.methods.parts import Phases, all_parameters, balanced_exemplars, new_and_exemplars, sgd, start_afresh
from ccfa.methods.selection import pick_first
from ccfa.models import NormalisedLinearHead
from ccfa.models.resnet import backbone_named


def gdumb(
    *,
    backbone: str = "resnet32-gdumb",
    transforms: Transforms = CIFAR100_UNJITTERED,
    epochs: int = 256,
    memory_epochs: int = 32,
    batch_size: int = 16,
    lr: float = 0.05,
    weight_decay: float = 1e-6,
    memory: int = 20,
    pretrain: bool = True,
) -> Method:
    """GDumb: at each stage trained anew on a balanced memory alone, from the backbone of the first stage.

    That start is the setting whose results are comparable (`formulation B3`); without `pretrain` every stage, the first
    too, starts from scratch with the memory alone, for `epochs` passes.
    """
    on_everything = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=new_and_exemplars,
        parameters=all_parameters,
        optimiser=sgd,
        schedule=warm_restarts,
        batch_size=batch_size,
        weight_decay=weight_decay,
        clip_norm=10.0,
    )
    on_memory = replace(on_everything, rows=balanced_exemplars, epochs=memory_epochs if pretrain else epochs)
    return Method(
        name="gdumb",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=partial(NormalisedLinearHead, relu=True),
        criterion=cross_entropy,
        phases=Phases(first=(on_everything if pretrain else on_memory,), later=(on_memory,)),
        prepare=start_from_first_stage if pretrain else start_afresh,
        image_augmentation=CutMix(alpha=1.0, probability=0.5, phases=("main",)),
        memory=Budget(per_class=memory),
        needs_memory=1,
        select_exemplars=pick_first,
        no_old_head="it learns from its memory alone at every stage and keeps no old classifier",
    )


def start_from_first_stage(learner: LearnerView) -> None:
    """The backbone as the first stage left it, and a fresh head over all seen classes."""
    learner.reset_network()
    if learner.initial:
        learner.network.backbone.load_state_dict(learner.initial.backbone.state_dict())


def warm_restarts(epoch: int, epochs: int) -> float:
    """A tenth of the rate first, then cosine cycles of 1, 2, 4, ... epochs from the rate towards its hundredth."""
    if epoch == 0:
        return 0.1
    cycle = 2 ** (epoch.bit_length() - 1)  # it begins at this epoch and is as long
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (epoch - cycle) / cycle)) / 2
