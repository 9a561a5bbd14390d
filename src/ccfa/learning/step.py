"""One step, the paper's figure 1: from rows of the training set to L_cls and L_dist."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ccfa.augmentation import MixedImages, Samples, classification_loss
from ccfa.methods import Phase, Step
from ccfa.models import Features

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner


def step_losses(learner: "Learner", rows: Tensor, phase: Phase, generator: Generator) -> dict[str, Tensor]:
    """One step's losses: L_cls on real and augmented samples, L_dist on real features, and their sum."""
    method, head, previous = learner.method, learner.network.head, learner.previous
    mixed = mixed_images(learner, rows, phase, generator)
    seen_before = features_of_previous(learner, mixed, phase)
    features = learner.acceleration.features(learner.network.backbone, mixed.images, mixed.mixing)
    batch = Samples(head.embed(features.embedding), mixed.labels, mixed.weights)
    with learner.acceleration.aside("samples", learner.device) as samples_ready:
        samples = augmented(learner, batch, len(rows), phase, generator)

    def share() -> Tensor:
        samples_ready()
        return batch.weights.sum() / samples.weights.sum()

    penalties: dict[str, Tensor] = {}
    if previous and seen_before:
        previous_features, previous_ready = seen_before
        previous_ready()
        old = (previous.head, previous_features)
        step = Step(learner.stage, mixed.labels[:, 0], head, features, *old, generator, batch, share)
        penalties = {term.name: term(step) for term in learner.terms}
    samples_ready()
    weight = method.classification_weight(learner.stage) if phase.use_terms else 1.0
    losses = {"classification": weight * classification_loss(samples, head, method.criterion), **penalties}
    losses["loss"] = torch.stack(list(losses.values())).sum()
    return losses


def mixed_images(learner: "Learner", rows: Tensor, phase: Phase, generator: Generator) -> MixedImages:
    """The batch's images under the training transform, mixed where the method mixes."""
    method, mix, labels = learner.method, learner.method.image_augmentation, learner.train.labels[rows]
    images = method.transforms.train(learner.train.images[rows], generator, learner.acceleration.fused)
    if mix and phase.name in mix.phases and (mix.in_first_stage or learner.previous):
        return mix(images, labels, learner.stage, generator)
    return MixedImages.of(images, labels)


def features_of_previous(
    learner: "Learner", mixed: MixedImages, phase: Phase
) -> tuple[Features, Callable[[], None]] | None:
    """How the previous network sees the batch, where a term asks, and what to call before looking."""
    if not (learner.previous and learner.terms and phase.use_terms):
        return None
    with learner.acceleration.aside("previous", learner.device) as ready, torch.no_grad():
        return learner.acceleration.features(learner.previous.backbone, mixed.images, mixed.mixing), ready


def augmented(learner: "Learner", batch: Samples, num_rows: int, phase: Phase, generator: Generator) -> Samples:
    """The samples of L_cls; mixed classes and rotations beyond the batch's own rows are no sources of features."""
    samples, additional = batch.parted(num_rows)
    method, old_head = learner.method, learner.previous.head if learner.previous else None
    for augmentation in method.feature_augmentations:
        if phase.name in augmentation.phases:
            samples = augmentation(samples, learner.network.head, old_head, method.criterion, generator)
    return samples.joined(additional)
