"""DER without pruning: Yan, Xie and He, "DER: Dynamically Expandable Representation", CVPR 2021."""

import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.augmentation.samples import classification_loss
from ccfa.losses import cross_entropy
from ccfa.methods.method import Budget, LearnerView, Method, Phase, Recipe, Step, Term, register_method
from ccfa.methods.parts import Phases, Steps, balanced_exemplars, class_blocks, herd, trainable
from ccfa.models import Branches, LinearHead, Network


@register_method("der", Recipe("resnet18-cifar", epochs=200))
def der(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (60 / 200, 120 / 200, 160 / 200),
    later_share: float = 160 / 200,
    later_milestones: tuple[float, ...] = (100 / 160, 120 / 160),
    warmup_epochs: int = 10,
    warmup_first: bool = False,
    lambda_auxiliary: float = 1.0,
    balanced_epochs: int = 50,
    balanced_lr: float = 0.05,
    balanced_milestones: tuple[float, ...] = (0.3, 0.6),
    temperature: float = 5.0,
    memory: int = 20,
) -> Method:
    """DER without pruning: one more backbone per stage.

    The earlier backbones are frozen, and a head reads all of them. From stage 1 on, a warm-up comes before the main
    phase, and after it the head is trained anew, on balanced exemplars. With 0 epochs a phase is left out.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        later_share: The main phase of stages after the first has this many times `epochs`.
        later_milestones: The milestones of stages after the first.
        warmup_epochs: Epochs before the main phase in which the learning rate rises.
        warmup_first: Begin with the warm-up in the first stage, too, as published for a start from 0 classes.
        lambda_auxiliary: The weight of the newest backbone's own loss.
        balanced_epochs: Epochs of the phase `classifier`, in which the head is trained anew.
        balanced_lr: The learning rate of the phase `classifier`.
        balanced_milestones: The milestones of the phase `classifier`.
        temperature: Logits are divided by it in the phase `classifier` and afterwards.
        memory: Exemplars kept per class.
    """
    first: tuple[Phase, ...] = (recipe.phase(Steps(milestones)),)
    main = recipe.phase(Steps(later_milestones), parameters=trainable, prepare=FreshHead("main"))
    main = replace(main, epochs=round(later_share * recipe.epochs))
    warmup = replace(main, name="warm-up", epochs=warmup_epochs, schedule=rising, prepare=FreshHead("warm-up"))
    if warmup_first:
        first = (warmup, replace(first[0], prepare=FreshHead("main")))
    # Not called "balanced", so that augmentations leave it alone: samples of old classes would make it unbalanced.
    classifier = replace(
        main,
        name="classifier",
        epochs=balanced_epochs,
        lr=balanced_lr,
        rows=balanced_exemplars,
        parameters=class_blocks,
        schedule=Steps(balanced_milestones),
        train_batch_norm=False,
        use_terms=False,
        prepare=FreshHead("classifier", temperature),
    )
    return Method(
        name="der",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=WideningHead,
        criterion=cross_entropy,
        phases=Phases(*(tuple(one for one in part if one.epochs) for part in (first, (warmup, main, classifier)))),
        shape_network=add_branches,
        terms=(partial(NewestBranchLoss, lambda_auxiliary),),
        memory=Budget(per_class=memory),
        needs_memory=int(balanced_epochs > 0),
        select_exemplars=herd,
    )


def rising(epoch: int, epochs: int) -> float:
    """A linear warm-up, whose last epoch has the whole rate."""
    return (epoch + 1) / epochs


def add_branches(network: Network, stage_index: int) -> None:
    """One branch per stage: each new one starts as a copy of the last, which is frozen from then on."""
    backbone, head = network.backbone, network.head
    assert isinstance(head, WideningHead)
    branches = list(backbone.branches) if isinstance(backbone, Branches) else [backbone]
    while len(branches) <= stage_index:
        branches.append(copy.deepcopy(branches[-1]))
    if stage_index:
        network.backbone = Branches(branches)
        head.widen(network.backbone.dim)


class WideningHead(LinearHead):
    """A linear head without bias over all branches, and in training an auxiliary one over the newest branch alone.

    It reads the first `dim` columns of a feature. A frozen head therefore takes features of a later stage, and an
    attack on it leaves the columns of newer branches as they are.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, bias=False, uniform=True)
        self.auxiliary = LinearHead(dim, bias=False, uniform=True)

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """As any head. The auxiliary one has an output for each new class and one, the first, for all old classes."""
        super().grow(num_new, generator)
        if len(self.old):
            self.auxiliary.grow(1 + num_new, generator)

    def widen(self, dim: int) -> None:
        """Read features of that dimension; the new columns are zeros."""
        for name in ("old", "new"):
            setattr(self, name, nn.Parameter(F.pad(getattr(self, name).detach(), (0, dim - self.dim))))
        self.dim = dim

    @torch.no_grad()
    def restart(self, temperature: float, generator: Generator) -> None:
        """Forget all classes, and divide logits by a temperature from now on."""
        self.scale.fill_(1 / temperature)
        for head in (self, self.auxiliary):
            for block in (head.old, head.new):
                block.copy_(head.initial(len(block), generator))

    def drop_auxiliary(self) -> None:
        super().drop_auxiliary()
        self.auxiliary = LinearHead(self.auxiliary.dim, bias=False, uniform=True).to(self.new)

    def similarities(self, features: Tensor) -> Tensor:
        return super().similarities(features[:, : self.dim])


@dataclass(frozen=True)
class FreshHead:
    """Start the head anew before a phase."""

    phase: str
    temperature: float = 1.0

    def __call__(self, learner: LearnerView) -> None:
        assert isinstance(learner.network.head, WideningHead)
        learner.network.head.restart(self.temperature, learner.cpu_generator("head", self.phase))


class NewestBranchLoss(Term):
    """weight * the auxiliary loss: the newest branch tells the new classes from each other and from all old ones."""

    reads_previous = False

    def __init__(self, weight: float) -> None:
        super().__init__("auxiliary")
        self.weight = weight

    def forward(self, step: Step) -> Tensor:
        head, samples = step.head, step.samples
        assert isinstance(head, WideningHead)
        newest = samples.features[:, -head.auxiliary.dim :]
        labels = (samples.labels - step.stage.num_old + 1).clamp(min=0)
        loss = classification_loss(samples._replace(features=newest, labels=labels), head.auxiliary, cross_entropy)
        return self.weight * loss
