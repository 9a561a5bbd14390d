"""The part of L_cls that backward need not wait for: that of augmented samples through which no gradient flows.

The backbone's gradients depend on such samples by their weights alone, because L_cls is a weighted mean. So they are
made and classified beside backward, and the gradients that they add, which are those of the head, come at the end.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ccfa.augmentation import LateAugmentation, Samples, classification_loss, weighing_labels
from ccfa.kernels.graphs import Aside
from ccfa.methods import Phase

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner


class LatePart(NamedTuple):
    """What late samples add to L_cls and to the gradients."""

    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]


class Ahead(NamedTuple):
    """What is known of a step's late samples before there are features."""

    augmentation: LateAugmentation
    weights: Aside[Tensor]


def known_ahead(learner: "Learner", phase: Phase, labels: Tensor, weights: Tensor) -> Ahead | None:
    """The augmentation, and the weights of what it will add to samples with these labels (N, L), if that may be late.

    It must be the only one, since the next would see its samples. Without branches nothing is gained.
    """
    acting = [one for one in learner.method.feature_augmentations if phase.name in one.phases]
    if not learner.acceleration.has_branches(learner.device) or learner.previous is None or len(acting) != 1:
        return None
    (only,) = acting
    if not isinstance(only, LateAugmentation) or not only.may_be_late():
        return None
    old_head = learner.previous.head

    def compute() -> Tensor:
        return only.weights_ahead(weighing_labels(labels, weights), old_head)

    return Ahead(only, learner.acceleration.aside("samples", learner.device, compute))


def late_part(
    learner: "Learner", ahead: Ahead | None, samples: Samples, num_own: int, factor: float, generator: Generator
) -> Aside[LatePart] | None:
    """Begin to make late samples, and to compute what they add.

    Args:
        learner: Has both heads and the criterion.
        ahead: What `known_ahead` found.
        samples: All others.
        num_own: How many of these, the first ones, are the batch's own images.
        factor: The weight of L_cls in the loss.
        generator: Draws what the augmentation draws.

    Returns:
        The part, or None if no samples may be late: features wider than the old head's have other weights.
    """
    if ahead is None or learner.previous is None or samples.features.shape[1] != learner.previous.head.dim:
        return None
    head, old_head, criterion = learner.network.head, learner.previous.head, learner.method.criterion

    def compute() -> LatePart:
        own, _ = samples.parted(num_own)
        features, labels, _ = ahead.augmentation.added(own, head, old_head, criterion, generator)
        late = Samples(features, labels[:, None], ahead.weights()[:, None])
        loss = classification_loss(late, head, criterion, samples.weights)
        loss = loss if factor == 1 else factor * loss
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.numel()]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
        found = zip(trained, gradients, strict=False)
        return LatePart(loss.detach(), {parameter: gradient for parameter, gradient in found if gradient is not None})

    return learner.acceleration.aside("samples", learner.device, compute)
