"""iCaRL: Rebuffi, Kolesnikov, Sperl and Lampert, "Incremental Classifier and Representation Learning", CVPR 2017."""

from functools import partial

import torch
from torch import Tensor

from ccfa.data import CIFAR100_UNJITTERED
from ccfa.losses import binary_cross_entropy, sigmoids_for_labels
from ccfa.methods.method import Budget, Method, Recipe, Step, Term, by_nearest_mean, register_method
from ccfa.methods.parts import Phases, Steps, herd
from ccfa.models import LinearHead


@register_method("icarl", Recipe(transforms=CIFAR100_UNJITTERED, epochs=70, lr=2.0, weight_decay=5e-5))
def icarl(
    recipe: Recipe,
    *,
    # Epochs 49 and 63 of 70; the published code steps its schedule after the epoch, one later.
    milestones: tuple[float, ...] = (50 / 70, 64 / 70),
    gamma: float = 0.2,
    memory: int = 20,
) -> Method:
    """iCaRL: distilled sigmoids; predicts by the nearest mean.

    This is how PODNet's authors run it: one sigmoid per class, those of old classes distilled.

    Args:
        milestones: Fractions of the epochs at which the learning rate is multiplied by `gamma`.
        gamma: The factor on the learning rate at each milestone.
        memory: Exemplars kept per class.
    """
    main = recipe.phase(Steps(milestones, gamma))
    return Method(
        name="icarl",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(LinearHead, relu=True),
        criterion=binary_cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
        terms=(SigmoidDistillation,),
        memory=Budget(per_class=memory),
        needs_memory=1,
        select_exemplars=herd,
        predict=by_nearest_mean,
    )


class SigmoidDistillation(Term):
    """Old classes learn the previous sigmoids instead of the labels: with L_cls this is the published loss."""

    def __init__(self) -> None:
        super().__init__("distillation")

    def forward(self, step: Step) -> Tensor:
        """The old classes' distillation less what L_cls has of them, averaged over batch and all classes."""
        num_old, samples = step.stage.num_old, step.samples
        logits = step.head(samples.features)[:, :num_old]
        is_label = samples.labels[:, :, None] == torch.arange(num_old, device=logits.device)
        targets = (samples.weights[:, :, None] * is_label).sum(dim=1)  # (B, old): shares where images were mixed
        losses = sigmoids_for_labels(step.previous_logits, logits, targets, step.share)
        return losses.mean() / step.head.num_classes
