"""AFC: Kang, Park and Han, "Knowledge Distillation with Adaptive Feature Consolidation", CVPR 2022."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from ccfa.data import Stage
from ccfa.errors import choose
from ccfa.losses.distillation import weighted_discrepancy, weighted_discrepancy_paper
from ccfa.methods.method import LearnerView, Method, Step, Term
from ccfa.methods.options import PodnetTraining
from ccfa.methods.parts import seen_to_new
from ccfa.methods.podnet import podnet

DiscrepancyLoss = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]


def afc(
    *, lambda_disc: float = 4.0, discrepancy: Literal["code", "paper"] = "code", **training: Unpack[PodnetTraining]
) -> Method:
    """PODNet's head and training with AFC's distillation; `discrepancy` chooses the paper's formula instead."""
    formulas = {"code": weighted_discrepancy, "paper": weighted_discrepancy_paper}
    loss = choose("discrepancy formula", discrepancy, formulas)
    term = partial(WeightedDiscrepancy, "discrepancy", lambda_disc, seen_to_new, loss)
    return replace(podnet(**training), name="afc", terms=(term,))


class WeightedDiscrepancy(Term):
    """weight * factor(stage) * loss(maps of f_{k-1}, maps of f_k, importance I of their channels)."""

    def __init__(self, name: str, weight: float, factor: Callable[[Stage], float], loss: DiscrepancyLoss) -> None:
        super().__init__(name)
        self.weight = weight
        self.factor = factor
        self.loss = loss
        self.importance: Tensor = nn.Buffer(torch.empty(0))  # of all levels, one after the other

    def fuse(self, fused: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Fuse the loss: it makes dozens of small kernels a level."""
        self.loss = fused(self.loss)

    def forward(self, step: Step) -> Tensor:
        """The penalty on the maps of all levels."""
        maps = step.features.maps
        importance = self.importance.split([level.shape[1] for level in maps])
        return self.weight * self.factor(step.stage) * self.loss(step.previous_features.maps, maps, importance)

    def conclude(self, learner: LearnerView) -> None:
        """Estimate the importance anew, in one pass over D'_k."""
        network, method = learner.network, learner.method
        network.train()  # as published: the running statistics of batch norm move during this pass too
        batch_size = method.phases(learner.stage)[0].batch_size
        sums: list[Tensor] = []
        for images, labels in learner.training_batches(batch_size, self.name):
            features = network.backbone(images)
            logits = network.head(network.head.embed(features.embedding), labels)
            values = squared_gradients(method.criterion(logits, labels).mean(), features.maps)
            sums = [total + value for total, value in zip(sums, values, strict=True)] if sums else values
        self.importance = torch.cat([divided_by_mean(total) for total in sums])


def squared_gradients(loss: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """Of each level, the mean over rows of || dL / dZ_c ||_F^2: one value a channel."""
    return [gradient.square().sum(dim=(2, 3)).mean(dim=0) for gradient in torch.autograd.grad(loss, maps)]


def divided_by_mean(values: Tensor) -> Tensor:
    """The values with mean 1; ones where all are 0, which the published code turns into NaN."""
    mean = values.mean()
    return torch.where(mean > 0, values / mean, 1.0)
