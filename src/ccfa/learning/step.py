"""One step, the paper's figure 1: from rows of the training set to L_cls and L_dist."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ccfa.augmentation import MixedImages, Samples, classification_loss
from ccfa.learning.shared_batch_norm import shared_batch_norm
from ccfa.methods import Phase, Step
from ccfa.models import Features, Network

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner

UNREAD = Features((), torch.empty(0))  # in place of the previous network's, where no term reads them


def step_losses(
    learner: "Learner", rows: Tensor, phase: Phase, generator: Generator, images: Tensor | None = None
) -> dict[str, Tensor]:
    """One step's losses: L_cls on real and augmented samples, L_dist on real features, and their sum.

    `images` are those of the rows if the training set is streamed: a captured step cannot read a file.
    """
    method, head, aside = learner.method, learner.network.head, learner.acceleration.aside
    processes = learner.processes
    previous = learner.previous if learner.terms and phase.use_terms else None
    images = learner.train.images[rows] if images is None else images
    mixed = mixed_images(learner, images, learner.train.labels[rows], phase, generator)
    part, num_images = processes.part(mixed), len(mixed.images)
    before = None
    if previous and any(term.reads_previous for term in learner.terms):
        before = aside("previous", learner.device, partial(frozen_features, learner, previous, part))
    with shared_batch_norm(processes, num_images):
        own = learner.acceleration.features(learner.network.backbone, part.images, part.mixing)
    features = processes.whole_features(own, num_images)
    real = Samples(head.embed(features.embedding), mixed.labels, mixed.weights)
    samples = aside("samples", learner.device, partial(augmented, learner, real, len(rows), phase, generator))

    penalties: dict[str, Tensor] = {}
    if previous:
        own_old = before() if before else UNREAD
        old = previous, processes.whole_features(own_old, num_images) if before else UNREAD
        step = Step(learner.stage, mixed.labels[:, 0], learner.network, features, *old, generator, real, samples)
        penalties = {term.name: processes.penalty(term, step, own, own_old) for term in learner.terms}
    weight = phase.classification_weight * (method.classification_weight(learner.stage) if phase.use_terms else 1.0)
    classification = classification_loss(samples(), head, method.criterion)
    losses = {"classification": classification if weight == 1 else weight * classification, **penalties}
    losses["loss"] = torch.stack(list(losses.values())).sum()
    return losses


def head_losses(learner: "Learner", real: Samples, phase: Phase, generator: Generator) -> dict[str, Tensor]:
    """The losses of a step without images: L_cls on the samples given and on augmented ones."""
    samples = augmented(learner, real, len(real.labels), phase, generator)
    loss = phase.classification_weight * classification_loss(samples, learner.network.head, learner.method.criterion)
    return {"classification": loss, "loss": loss}


def mixed_images(learner: "Learner", images: Tensor, labels: Tensor, phase: Phase, generator: Generator) -> MixedImages:
    """The batch's images under the training transform, mixed if the method mixes images."""
    method, mix = learner.method, learner.method.image_augmentation
    images = method.transforms.train(images, generator, learner.acceleration.fused)
    if mix and phase.name in mix.phases and (mix.in_first_stage or learner.previous):
        return mix(images, labels, learner.stage, generator)
    return MixedImages.of(images, labels)


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
