"""GDumb: Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our Progress", ECCV 2020."""

import math
from dataclasses import replace
from functools import partial

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.augmentation import CutMix
from ccfa.data import CIFAR100_UNJITTERED
from ccfa.losses import cross_entropy
from ccfa.methods.method import Budget, LearnerView, Method, Recipe, register_method
from ccfa.methods.parts import Phases, balanced_exemplars, pick_first, start_afresh
from ccfa.models import LinearHead

PUBLISHED = Recipe("resnet32-gdumb", CIFAR100_UNJITTERED, epochs=256, batch_size=16, lr=0.05, weight_decay=1e-6)


@register_method("gdumb", PUBLISHED)
def gdumb(recipe: Recipe, *, memory_epochs: int = 32, memory: int = 20, pretrain: bool = True) -> Method:
    """GDumb: trained anew on a balanced memory at each stage.

    It starts from the backbone of the first stage, which is the setting with comparable results (`formulation B3`).

    Args:
        epochs: Epochs of the first stage; without `pretrain`, of every stage.
        memory_epochs: Epochs on the memory in stages after the first, with `pretrain`.
        memory: Exemplars kept per class.
        pretrain: Train the first stage on all of its images; otherwise every stage starts from scratch with the memory
            alone.
    """
    on_everything = recipe.phase(warm_restarts, clip_norm=10.0)
    on_memory = replace(on_everything, rows=balanced_exemplars, epochs=memory_epochs if pretrain else recipe.epochs)
    return Method(
        name="gdumb",
        transforms=recipe.transforms,
        backbone=recipe.builder,
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


class NormalisedLinearHead(LinearHead):
    """GDumb's head: a linear map without bias and a batch norm over its logits, which starts anew as the head grows."""

    eps = 1e-6

    def __init__(self, dim: int, relu: bool = False) -> None:
        super().__init__(dim, bias=False, relu=relu, uniform=True)
        self.norm = nn.BatchNorm1d(0, self.eps)

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        super().grow(num_new, generator)
        self.norm = nn.BatchNorm1d(self.num_classes, self.eps).to(self.new)

    def similarities(self, features: Tensor) -> Tensor:
        norm, scores = self.norm, super().similarities(features)
        in_training = self.training and len(scores) > 1  # a single row has no spread
        statistics = norm.running_mean, norm.running_var
        return F.batch_norm(scores, *statistics, norm.weight, norm.bias, in_training, norm.momentum or 0.0, norm.eps)
