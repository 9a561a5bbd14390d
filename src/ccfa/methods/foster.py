"""FOSTER: Wang, Zhou, Ye and Zhan, "FOSTER: Feature Boosting and Compression", ECCV 2022."""

import copy
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor, nn

from ccfa.augmentation.samples import classification_loss
from ccfa.errors import UsageError
from ccfa.losses import balanced_distillation, cross_entropy, effective_number_weights, softened_cross_entropy
from ccfa.methods.method import Budget, LearnerView, Method, Recipe, Step, Term, register_method
from ccfa.methods.parts import Phases, class_blocks, herd
from ccfa.models import Branches, Head, LinearHead, Network


@register_method("foster", Recipe(epochs=200))
def foster(
    recipe: Recipe,
    *,
    boosting_epochs: int = 170,
    compression_epochs: int = 130,
    beta_boosting: float = 0.94,
    beta_compression: float = 0.97,
    temperature: float = 2.0,
    lambda_distillation: float = 1.0,
    memory: int = 20,
) -> Method:
    """FOSTER: a second backbone learns, then both become one.

    From stage 1 on a second backbone learns what the first lacks, then one is distilled from both. `epochs` are those
    of the first stage. The betas balance classes by their number of images: the nearer to 1, the more a class of few
    images counts.

    Args:
        epochs: Epochs of the first stage.
        boosting_epochs: Epochs in which the second backbone learns.
        compression_epochs: Epochs in which one backbone is distilled from both.
        beta_boosting: How classes are balanced while the second backbone learns.
        beta_compression: How classes are balanced while both are distilled.
        temperature: The temperature of both distillations.
        lambda_distillation: The weight of the distillation of the old network.
        memory: Exemplars kept per class.
    """
    for beta in (beta_boosting, beta_compression):
        if not 0 <= beta < 1:
            raise UsageError(f"The betas of FOSTER must be from 0 to below 1, got {beta}.")
    first = recipe.phase(annealed)
    boosting = replace(first, epochs=boosting_epochs, parameters=boosted_parts, enter=boost)
    compression = replace(
        first,
        name="compression",
        epochs=compression_epochs,
        parameters=student_parts,
        weight_decay=0.0,
        classification_weight=0.0,
        enter=compress,
    )
    return Method(
        name="foster",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(BoostedHead, beta=beta_boosting),
        criterion=cross_entropy,
        phases=Phases(first=(first,), later=(boosting, compression)),
        prepare=count_images,
        shape_network=expand,
        reduce_network=keep_student,
        terms=(NewBranchLoss, partial(FosterDistillation, temperature, lambda_distillation, beta_compression)),
        memory=Budget(per_class=memory),
        needs_memory=1,
        select_exemplars=herd,
    )


def annealed(epoch: int, epochs: int) -> float:
    """Cosine annealing to 0."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


OLD, BOOSTING, STUDENT = range(3)  # the branches of a stage, all of which start as the network of the stage before


def expand(network: Network, stage_index: int) -> None:
    """From stage 1 on, three copies of the backbone: the old one, one that boosts it, and the student of both."""
    if stage_index:
        old = network.backbone
        network.backbone = Branches([old, copy.deepcopy(old), copy.deepcopy(old)])


def boost(network: Network) -> None:
    """Train the boosting branch."""
    _branches(network).activate(BOOSTING)


def compress(network: Network) -> None:
    """Train the student."""
    _branches(network).activate(STUDENT)


def keep_student(network: Network) -> None:
    """The student alone is left."""
    if isinstance(network.backbone, Branches):
        network.backbone = network.backbone.branches[STUDENT]


def boosted_parts(network: Network) -> list[nn.Parameter]:
    """The boosting branch, the head over both branches, and that over the boosting branch alone."""
    head = _head(network.head)
    return [
        *_branches(network).branches[BOOSTING].parameters(),
        *head.boosted.parameters(),
        *head.auxiliary.parameters(),
    ]


def student_parts(network: Network) -> list[nn.Parameter]:
    """The student and its head."""
    return [*_branches(network).branches[STUDENT].parameters(), *class_blocks(network)]


def _branches(network: Network) -> Branches:
    assert isinstance(network.backbone, Branches)
    return network.backbone


def _head(head: Head) -> "BoostedHead":
    assert isinstance(head, BoostedHead)
    return head


class BoostedHead(LinearHead):
    """A linear head over one backbone and, during a stage, one over the old and the boosting branch.

    Features of two branches are classified by the latter. Of features of three branches, the last one is the student's.
    A frozen head of an earlier stage reads the first columns, which are the old branch's. In L_cls, the logits of a
    class are divided by its weight, which is larger for classes of few images.
    """

    def __init__(self, dim: int, beta: float) -> None:
        super().__init__(dim)
        self.beta = beta
        self.boosted, self.auxiliary = LinearHead(2 * dim), LinearHead(dim)
        self.counts: Tensor = nn.Buffer(torch.empty(0))  # the number of images of each class

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """As any head. The head over both branches begins with the old classes' weights for the old branch."""
        super().grow(num_new, generator)
        if num_old := len(self.old):
            for head in (self.boosted, self.auxiliary):
                head.grow(self.num_classes, generator)
            with torch.no_grad():
                self.boosted.new[:num_old, : self.dim] = self.old[:, :-1]
                self.boosted.new[:num_old, -1] = self.old[:, -1]

    def drop_auxiliary(self) -> None:
        super().drop_auxiliary()
        self.boosted, self.auxiliary = LinearHead(2 * self.dim).to(self.new), LinearHead(self.dim).to(self.new)
        self.counts = self.counts[:0]

    def similarities(self, features: Tensor) -> Tensor:
        if not self.boosted.num_classes:
            return super().similarities(features[:, : self.dim])
        if features.shape[1] == self.boosted.dim:
            return self.boosted.similarities(features)
        return super().similarities(features[:, -self.dim :])

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(features)
        if labels is None or not len(self.counts):
            return logits
        return logits / effective_number_weights(self.counts, self.beta)


def count_images(learner: LearnerView) -> None:
    """Tell the head how many images of each class it learns from."""
    if learner.stage.index:
        head, labels = _head(learner.network.head), learner.labels(learner.training_rows())
        head.counts = labels.bincount(minlength=learner.stage.num_seen).to(head.new)


class NewBranchLoss(Term):
    """Cross-entropy over all seen classes of a head that reads the boosting branch alone; 0 in the compression."""

    reads_previous = False

    def __init__(self) -> None:
        super().__init__("auxiliary")

    def forward(self, step: Step) -> Tensor:
        head, samples = _head(step.head), step.samples
        if samples.features.shape[1] != head.boosted.dim:
            return samples.features.new_zeros(())
        newest = samples._replace(features=samples.features[:, -head.dim :])
        return classification_loss(newest, head.auxiliary, cross_entropy)


class FosterDistillation(Term):
    """Boosting: the old classes' logits of the previous network. Compression: all logits of both branches, balanced."""

    reads_previous = False  # its backbone is the old branch

    def __init__(self, temperature: float, weight: float, beta: float) -> None:
        super().__init__("distillation")
        self.temperature = temperature
        self.weight = weight
        self.beta = beta

    def forward(self, step: Step) -> Tensor:
        head, features = _head(step.head), step.samples.features
        if features.shape[1] == head.boosted.dim:
            logits = head(features)[:, : step.stage.num_old]
            return self.weight * softened_cross_entropy(step.previous.head(features), logits, self.temperature)
        with torch.no_grad():
            teacher = head.boosted(features[:, : head.boosted.dim])
        weights = effective_number_weights(head.counts, self.beta)
        return balanced_distillation(teacher, head(features), weights, self.temperature)
