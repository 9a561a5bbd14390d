"""One step, the paper's figure 1: from rows of the training set to L_cls and L_dist."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ccfa.augmentation import Criterion, MixedImages, Samples, classification_loss
from ccfa.kernels.graphs import Aside
from ccfa.learning.late import LatePart, known_ahead, late_part
from ccfa.learning.shared_batch_norm import shared_batch_norm
from ccfa.methods import Phase, Step
from ccfa.models import Features, Head, Network

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner

UNREAD = Features((), torch.empty(0))  # in place of the previous network's, where no term reads them


@dataclass(frozen=True)
class Parts:
    """The parts of a step's loss: L_cls and the penalties, each on its branch if the step has branches."""

    losses: dict[str, Aside[Tensor]]
    late: Aside[LatePart] | None = None
    kept: tuple[object, ...] = ()  # what branches read: freed, it could be overwritten before they have read it

    def roots(self) -> list[Tensor]:
        """Where backward begins: each part's gradients on its branch, so that none waits for another part."""
        values = [part.value for part in self.losses.values()]
        return [value for value in values if value.requires_grad] or values  # of which torch says what is wrong

    def read(self) -> dict[str, Tensor]:
        """The value of each part and, as `loss`, their sum."""
        losses = {name: part() for name, part in self.losses.items()}
        if self.late:
            losses["classification"] = losses["classification"] + self.late().loss
        return {**losses, "loss": torch.stack(list(losses.values())).sum()}


def step_losses(
    learner: "Learner", rows: Tensor, phase: Phase, generator: Generator, images: Tensor | None = None
) -> Parts:
    """One step's losses: L_cls on real and augmented samples, and L_dist on real features.

    `images` are those of the rows if the training set is streamed: a captured step cannot read a file.
    """
    method, head, processes = learner.method, learner.network.head, learner.processes
    aside = partial(learner.acceleration.aside, device=learner.device)
    weight = phase.classification_weight * (method.classification_weight(learner.stage) if phase.use_terms else 1.0)
    previous = learner.previous if learner.terms and phase.use_terms else None
    images = learner.train.images[rows] if images is None else images
    mixed = mixed_images(learner, images, learner.train.labels[rows], phase, generator)
    part, num_images = processes.part(mixed), len(mixed.images)
    ahead, before = known_ahead(learner, phase, mixed.labels[: len(rows)], mixed.weights[: len(rows)]), None
    if previous and any(term.reads_previous for term in learner.terms):
        before = aside("previous", compute=partial(frozen_features, learner, previous, part))
    with shared_batch_norm(processes, num_images):
        own = learner.acceleration.features(learner.network.backbone, part.images, part.mixing)
    features = processes.whole_features(own, num_images)
    real = Samples(head.embed(features.embedding), mixed.labels, mixed.weights)
    late, samples = late_part(learner, ahead, real, len(rows), weight, generator), Aside(real)
    late_weights = ahead.weights if ahead and late else None
    if late is None:
        samples = aside("samples", compute=partial(augmented, learner, real, len(rows), phase, generator))

    penalties, step = {}, None
    if previous:
        own_old = before() if before else UNREAD
        old = previous, processes.whole_features(own_old, num_images) if before else UNREAD
        total_weight = partial(weight_of, samples, late_weights)
        step = Step(learner.stage, mixed.labels[:, 0], learner.network, features, *old, generator, real, total_weight)
        for number, term in enumerate(learner.terms):
            penalty = partial(processes.penalty, term, step, own, own_old)
            penalties[term.name] = aside(f"term {number}", compute=penalty)
    classification = aside("loss", compute=partial(loss_of, samples, late_weights, head, method.criterion, weight))
    return Parts({"classification": classification, **penalties}, late, (mixed, own, real, samples, late_weights, step))


def head_losses(learner: "Learner", real: Samples, phase: Phase, generator: Generator) -> Parts:
    """The losses of a step without images: L_cls on the samples given and on augmented ones."""
    samples = augmented(learner, real, len(real.labels), phase, generator)
    loss = phase.classification_weight * classification_loss(samples, learner.network.head, learner.method.criterion)
    return Parts({"classification": Aside(loss)})


def mixed_images(learner: "Learner", images: Tensor, labels: Tensor, phase: Phase, generator: Generator) -> MixedImages:
    """The batch's images under the training transform, mixed if the method mixes images."""
    method, mix = learner.method, learner.method.image_augmentation
    images = method.transforms.train(images, generator, learner.acceleration.fused)
    if mix and phase.name in mix.phases and (mix.in_first_stage or learner.previous):
        return mix(images, labels, learner.stage, generator)
    return MixedImages.of(images, labels)


def loss_of(
    samples: Aside[Samples], late_weights: Aside[Tensor] | None, head: Head, criterion: Criterion, weight: float
) -> Tensor:
    """The weighted L_cls of samples that are not late."""
    loss = classification_loss(samples(), head, criterion, late_weights() if late_weights else None)
    return loss if weight == 1 else weight * loss


def weight_of(samples: Aside[Samples], late_weights: Aside[Tensor] | None) -> Tensor:
    """The sum of the weights in L_cls."""
    total = samples().weights.sum()
    return total if late_weights is None else total + late_weights().sum()


@torch.no_grad()
def frozen_features(learner: "Learner", network: Network, mixed: MixedImages) -> Features:
    return learner.acceleration.features(network.backbone, mixed.images, mixed.mixing)


def augmented(learner: "Learner", real: Samples, num_rows: int, phase: Phase, generator: Generator) -> Samples:
    """The samples of L_cls: `real` with augmented ones made from its first rows, which are the batch's own images."""
    samples, additional = real.parted(num_rows)
    method, old_head = learner.method, learner.previous.head if learner.previous else None
    for augmentation in method.feature_augmentations:
        if phase.name in augmentation.phases:
            samples = augmentation(samples, learner.network.head, old_head, method.criterion, generator)
    return samples.joined(additional)
