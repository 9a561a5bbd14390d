"""EWC: Kirkpatrick et al., "Overcoming Catastrophic Forgetting in Neural Networks", PNAS 2017."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ccfa.losses import cross_entropy
from ccfa.methods.method import LearnerView, Method, Recipe, Step, Term, register_method
from ccfa.methods.parts import SeparateLinearHead, class_blocks, first_and_later, old_share
from ccfa.models import LinearHead, Network


@register_method("ewc", Recipe("resnet32-pycil", epochs=200))
def ewc(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (60 / 200, 120 / 200, 170 / 200),
    later_share: float = 180 / 200,
    later_milestones: tuple[float, ...] = (70 / 180, 120 / 180, 150 / 180),
    later_weight_decay: float = 2e-4,
    lambda_ewc: float = 1000.0,
    largest_fisher: float = 1e-4,
) -> Method:
    """EWC: weights held in place by their Fisher information.

    It keeps no exemplars. What mattered to old classes is held the more.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        later_share: Stages after the first train for this many times `epochs`.
        later_milestones: The milestones of stages after the first.
        later_weight_decay: The weight decay of stages after the first.
        lambda_ewc: The weight of the penalty.
        largest_fisher: The largest Fisher information of a weight; larger ones are clamped.
    """
    method = Method(
        name="ewc",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=SeparateLinearHead,
        criterion=cross_entropy,
        phases=first_and_later(recipe, milestones, later_share, later_milestones, later_weight_decay),
        terms=(partial(ElasticPenalty, lambda_ewc, largest_fisher),),
    )
    return replace(method, first=replace(method, head=LinearHead))  # without old classes the heads are the same


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values of the tensors, one after the other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def ordered_parameters(network: Network) -> list[nn.Parameter]:
    """The backbone's parameters, then the head's rows: the previous network's are the first of the current one's."""
    return [*network.backbone.parameters(), *class_blocks(network)]


class ElasticPenalty(Term):
    """(weight / 2) * sum_i F_i (theta_i - theta'_i)^2, where theta' are the previous network's parameters."""

    reads_previous = False  # its parameters, but nothing that it computes

    fisher: Tensor  # F of the parameters of the last stage, in order

    def __init__(self, weight: float, largest: float) -> None:
        super().__init__("elastic")
        self.weight = weight
        self.largest = largest
        self.register_buffer("fisher", torch.empty(0))

    def forward(self, step: Step) -> Tensor:
        now = flat(ordered_parameters(step.network))[: len(self.fisher)]
        moved = now - flat(ordered_parameters(step.previous))
        return self.weight / 2 * (self.fisher * moved.square()).sum()

    def conclude(self, learner: LearnerView) -> None:
        """Estimate F in one pass over D'_k, and average it with the earlier F by the numbers of classes."""
        network, method = learner.network, learner.method
        network.train()  # as published: the running statistics of batch norm move during this pass too
        parameters = ordered_parameters(network)
        squares, num_batches = torch.zeros_like(flat(parameters)), 0
        for images, labels in learner.training_batches(method.phases(learner.stage)[0].batch_size, self.name):
            loss = method.criterion(network(images), labels).mean()  # over all seen classes
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            squares += flat(gradients).square()
            num_batches += 1
        fisher = (squares / num_batches).clamp(max=self.largest)
        known, share = len(self.fisher), old_share(learner.stage)
        self.fisher = torch.cat([share * self.fisher + (1 - share) * fisher[:known], fisher[known:]])
