"""The part of L_cls that backward need not wait for: that of augmented samples through which no gradient flows.

The backbone's gradients depend on such samples by their weights alone, because L_cls is a weighted mean. So they are
made and classified beside backward, and the gradients that they add, which are those of the head, come at the end.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ccfa.augmentation import LateAugmentation, Samples, classification_loss
from ccfa.methods import Phase

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner


class LatePart(NamedTuple):
    """What late samples add to L_cls and to the gradients."""

    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]


def late_augmentation(learner: "Learner", phase: Phase, labels: Tensor) -> LateAugmentation | None:
    """The feature augmentation whose samples may be late, or None if there is none.

    It must be the only one, since the next would see its samples. Without branches nothing is gained.
    """
    acting = [one for one in learner.method.feature_augmentations if phase.name in one.phases]
    if not learner.acceleration.has_branches(learner.device) or learner.previous is None or len(acting) != 1:
        return None
    (only,) = acting
    return only if isinstance(only, LateAugmentation) and only.may_be_late(labels) else None


def late_part(
    learner: "Learner",
    augmentation: LateAugmentation,
    samples: Samples,
    num_own: int,
    weights: Callable[[], Tensor],
    factor: float,
    generator: Generator,
) -> LatePart:
    """Make late samples, and compute what they add.

    Args:
        learner: Has the heads and the criterion.
        augmentation: Makes them.
        samples: All others.
        num_own: How many of these, the first ones, are the batch's own images.
        weights: Returns those of the late samples.
        factor: The weight of L_cls in the loss.
        generator: Draws what the augmentation draws.
    """
    head, criterion = learner.network.head, learner.method.criterion
    assert learner.previous
    own, _ = samples.parted(num_own)
    features, labels, _ = augmentation.added(own, head, learner.previous.head, criterion, generator)
    late = Samples(features, labels[:, None], weights()[:, None])
    loss = factor * classification_loss(late, head, criterion, samples.weights)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.numel()]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
    found = zip(trained, gradients, strict=False)
    return LatePart(loss.detach(), {parameter: gradient for parameter, gradient in found if gradient is not None})
