"""AFC: Kang, Park and Han, "Knowledge Distillation with Adaptive Feature Consolidation", CVPR 2022."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ccfa.data import Stage
from ccfa.errors import UsageError, choose
from ccfa.losses import weighted_discrepancy, weighted_discrepancy_paper
from ccfa.methods.method import LearnerView, Method, register_method
from ccfa.methods.parts import MapDistillation, seen_to_new
from ccfa.methods.podnet import without_distillation
from ccfa.models import Features


@register_method("afc", without_distillation)
def afc(method: Method, *, lambda_disc: float = 4.0, discrepancy: Literal["code", "paper"] = "code") -> Method:
    """AFC: PODNet's training, maps distilled by importance.

    Args:
        lambda_disc: The weight of the discrepancy of maps.
        discrepancy: The discrepancy as in the published code, or by the paper's formula.
    """
    formulas = {"code": weighted_discrepancy, "paper": weighted_discrepancy_paper}
    loss = choose("discrepancy formula", discrepancy, formulas)
    return replace(method, terms=(partial(WeightedDiscrepancy, "discrepancy", lambda_disc, seen_to_new, loss),))


class WeightedDiscrepancy(MapDistillation):
    """weight * factor(stage) * loss(maps of f_{k-1}, maps of f_k, importance I of their channels)."""

    def __init__(self, name: str, weight: float, factor: Callable[[Stage], float], loss: Callable[..., Tensor]) -> None:
        super().__init__(name, weight, factor, loss)
        self.importance: Tensor = nn.Buffer(torch.empty(0))  # of all levels, one after the other

    def distance(self, previous: Features, current: Features) -> Tensor:
        importance = self.importance.split([level.shape[1] for level in current.maps])
        return self.loss(previous.maps, current.maps, importance)

    def conclude(self, learner: LearnerView) -> None:
        """Estimate the importance anew, in one pass over D'_k."""
        network, method = learner.network, learner.method
        network.train()  # as published: the running statistics of batch norm move during this pass too
        batch_size = method.phases(learner.stage)[0].batch_size
        sums: list[Tensor] = []
        for images, labels in learner.training_batches(batch_size, self.name):
            features = network.backbone(images)
            logits = network.head(network.head.embed(features.embedding), labels)
            loss = method.criterion(logits, labels).mean()
            gradients = torch.autograd.grad(loss, features.maps, allow_unused=True)
            if any(gradient is None for gradient in gradients):
                raise UsageError(
                    f"AFC needs the gradient of each map, and the embedding of this {type(network.backbone).__name__} "
                    f"is not computed from all of its maps. Use a convolutional backbone."
                )
            # The mean over rows of || dL / dZ_c ||_F^2, one value per channel.
            values = [gradient.square().sum(dim=(2, 3)).mean(dim=0) for gradient in gradients]
            sums = [total + value for total, value in zip(sums, values, strict=True)] if sums else values
        self.importance = torch.cat([divided_by_mean(total) for total in sums])


def divided_by_mean(values: Tensor) -> Tensor:
    """The values with mean 1; ones where all are 0, which the published code turns into NaN."""
    mean = values.mean()
    return torch.where(mean > 0, values / mean, 1.0)
