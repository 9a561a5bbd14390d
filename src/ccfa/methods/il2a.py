"""IL2A: Zhu, Cheng, Zhang and Liu, "Class-Incremental Learning via Dual Augmentation", NeurIPS 2021."""

from functools import partial

import torch
from torch import Tensor

from ccfa.augmentation.class_mixing import ClassMixing
from ccfa.data import CIFAR100_PODNET, Transforms
from ccfa.losses.classification import cross_entropy
from ccfa.losses.prototypes import semantic_augmentation
from ccfa.methods.method import Method, Phase, Step
from ccfa.methods.parts import Phases, Steps, adam, all_parameters, new_and_exemplars, nothing_to_prepare
from ccfa.methods.prototypes import FeatureDistance, PrototypeTerm, followed_by
from ccfa.models import LinearHead
from ccfa.models.resnet import backbone_named


def il2a(
    *,
    backbone: str = "resnet18-il2a",
    transforms: Transforms = CIFAR100_PODNET,
    epochs: int = 101,
    batch_size: int = 64,
    lr: float = 1e-3,
    weight_decay: float = 2e-4,
    milestones: tuple[float, ...] = (45 / 101, 90 / 101),
    temperature: float = 0.1,
    mixing_rounds: int = 4,
    lambda_distance: float = 10.0,
    lambda_semantic: float = 10.0,
    semantic_strength: float = 2.5,
    published_covariances: bool = False,
) -> Method:
    """IL2A as its published code runs, without exemplars: class mixing, and Gaussians of old classes.

    `published_covariances` pairs old classes with the covariances that code does: another class's from stage 2 on.
    """
    mixing = ClassMixing(rounds=mixing_rounds)
    main = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=new_and_exemplars,
        parameters=all_parameters,
        optimiser=adam,
        schedule=Steps(milestones),
        batch_size=batch_size,
        weight_decay=weight_decay,
    )
    return Method(
        name="il2a",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=partial(LinearHead, temperature=temperature, uniform=True),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
        prepare=nothing_to_prepare,
        terms=(
            partial(FeatureDistance, lambda_distance),
            partial(SemanticAugmentation, lambda_semantic, batch_size, semantic_strength, published_covariances),
        ),
        auxiliary_classes=mixing.num_classes,
        image_augmentation=mixing,
    )


class SemanticAugmentation(PrototypeTerm):
    """weight * L_seman: old classes' Gaussians seen by the current head, in closed form."""

    covariances: Tensor  # (old classes, dim, dim)

    def __init__(self, weight: float, num_drawn: int, strength: float, newest_first: bool) -> None:
        super().__init__("semantic", weight, num_drawn)
        self.strength = strength
        self.newest_first = newest_first
        self.register_buffer("covariances", torch.empty(0))

    def loss(self, classes: Tensor, step: Step) -> Tensor:
        """L_seman over the seen classes; auxiliary outputs take no part."""
        weights = step.head.weights[: step.stage.num_seen]
        gaussians = self.prototypes[classes], self.covariances[classes]
        return semantic_augmentation(
            *gaussians, classes, weights[:, :-1], weights[:, -1], self.strength, step.head.scale
        )

    def remember(self, covariances: Tensor) -> None:
        """Keep them whole, in the order of the classes or, as published, in front of the older ones."""
        parts = (covariances, self.covariances) if self.newest_first else (self.covariances, covariances)
        self.covariances = followed_by(*parts)
