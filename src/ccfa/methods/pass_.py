"""PASS: Zhu, Zhang, Wang, Yin and Liu, "Prototype Augmentation and Self-Supervision for Incremental Learning", 2021."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ccfa.augmentation.class_mixing import Rotations
from ccfa.data import CIFAR100_PODNET, Transforms
from ccfa.methods.il2a import il2a
from ccfa.methods.method import Method, Step
from ccfa.methods.prototypes import FeatureDistance, PrototypeTerm
from ccfa.models import KeepingLinearHead


def pass_(
    *,
    backbone: str = "resnet18-il2a",
    transforms: Transforms = CIFAR100_PODNET,
    epochs: int = 101,
    batch_size: int = 64,
    lr: float = 1e-3,
    weight_decay: float = 2e-4,
    milestones: tuple[float, ...] = (44 / 101, 89 / 101),
    temperature: float = 0.1,
    lambda_distance: float = 10.0,
    lambda_prototype: float = 10.0,
) -> Method:
    """PASS as its published code runs, without exemplars: rotations as classes, and noisy prototypes of old classes."""
    training = il2a(
        backbone=backbone,
        transforms=transforms,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        milestones=milestones,
        temperature=temperature,
    )
    rotations = Rotations()
    return replace(
        training,
        name="pass",
        terms=(
            partial(FeatureDistance, lambda_distance),
            partial(PrototypeAugmentation, lambda_prototype, batch_size),
        ),
        head=partial(KeepingLinearHead, temperature=temperature),
        auxiliary_classes=rotations.num_classes,
        image_augmentation=rotations,
    )


class PrototypeAugmentation(PrototypeTerm):
    """weight * L_proto: the method's criterion on prototypes with Gaussian noise of one radius."""

    radius: Tensor  # (): sqrt(mean over first-stage classes of trace(covariance) / dim), fixed from then on

    def __init__(self, weight: float, num_drawn: int) -> None:
        super().__init__("prototype", weight, num_drawn)
        self.register_buffer("radius", torch.zeros(()))

    def loss(self, classes: Tensor, step: Step) -> Tensor:
        """Cross-entropy over all outputs, those of turned classes included."""
        prototypes = self.prototypes[classes]
        noise = torch.randn(
            prototypes.shape, generator=step.generator, device=prototypes.device, dtype=prototypes.dtype
        )
        return torch.nn.functional.cross_entropy(step.head(prototypes + self.radius * noise), classes)

    def remember(self, covariances: Tensor) -> None:
        """Keep the first stage's radius alone."""
        if self.radius == 0:
            traces = covariances.diagonal(dim1=1, dim2=2).sum(dim=1)
            self.radius = (traces.mean() / covariances.shape[1]).sqrt()
