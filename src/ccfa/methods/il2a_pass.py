"""IL2A and PASS, which keep no exemplars: they remember the mean and the spread of each old class's features.

Zhu, Cheng, Zhang and Liu, "Class-Incremental Learning via Dual Augmentation", NeurIPS 2021.
Zhu, Zhang, Wang, Yin and Liu, "Prototype Augmentation and Self-Supervision for Incremental Learning", CVPR 2021.
"""

from abc import abstractmethod
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ccfa.augmentation.mixing import ClassMixing, Rotations
from ccfa.losses import cross_entropy, frobenius_distance, semantic_augmentation
from ccfa.methods.method import LearnerView, Method, Recipe, Step, Term, register_method
from ccfa.methods.parts import Phases, Steps, adam
from ccfa.models import LinearHead

PUBLISHED = Recipe("resnet18-il2a", epochs=101, batch_size=64, lr=1e-3, weight_decay=2e-4)


@register_method("il2a", PUBLISHED)
def il2a(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (45 / 101, 90 / 101),
    temperature: float = 0.1,
    mixing_rounds: int = 4,
    lambda_distance: float = 10.0,
    lambda_semantic: float = 10.0,
    semantic_strength: float = 2.5,
    published_covariances: bool = False,
) -> Method:
    """IL2A: mixed classes, and Gaussians of old classes.

    This is how its published code runs, without exemplars.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        temperature: Logits are divided by it.
        mixing_rounds: How many mixtures with another image each image of a batch adds.
        lambda_distance: The weight of the distance to the previous features.
        lambda_semantic: The weight of the loss on old classes' Gaussians.
        semantic_strength: How much of their covariances that loss counts.
        published_covariances: Keep a mistake of the published code: from stage 2 on, old classes use the
            covariances of others.
    """
    mixing = ClassMixing(rounds=mixing_rounds)
    semantic = lambda_semantic, recipe.batch_size, semantic_strength, published_covariances
    main = recipe.phase(Steps(milestones), optimiser=adam)
    return Method(
        name="il2a",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(LinearHead, temperature=temperature, uniform=True),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
        terms=(partial(FeatureDistance, lambda_distance), partial(SemanticAugmentation, *semantic)),
        auxiliary_classes=mixing.num_classes,
        image_augmentation=mixing,
    )


@register_method("pass", PUBLISHED)
def pass_(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (44 / 101, 89 / 101),
    temperature: float = 0.1,
    lambda_distance: float = 10.0,
    lambda_prototype: float = 10.0,
) -> Method:
    """PASS: rotations as classes, noisy prototypes of old ones.

    This is how its published code runs, without exemplars.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        temperature: Logits are divided by it.
        lambda_distance: The weight of the distance to the previous features.
        lambda_prototype: The weight of the loss on noisy prototypes.
    """
    rotations = Rotations()
    main = recipe.phase(Steps(milestones), optimiser=adam)
    return Method(
        name="pass",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(KeepingLinearHead, temperature=temperature),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
        terms=(
            partial(FeatureDistance, lambda_distance),
            partial(PrototypeAugmentation, lambda_prototype, recipe.batch_size),
        ),
        auxiliary_classes=rotations.num_classes,
        image_augmentation=rotations,
    )


class KeepingLinearHead(LinearHead):
    """PASS's head: auxiliary outputs leave the head with their stage and are its last outputs again in the next."""

    kept: Tensor  # (auxiliary outputs, dim + 1), those of the newest classes first

    def __init__(self, dim: int, temperature: float = 1.0) -> None:
        super().__init__(dim, temperature=temperature, uniform=True)
        self.register_buffer("kept", torch.empty(0, dim + 1))

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        super().grow(num_new, generator)
        with torch.no_grad():
            self.new[num_new - len(self.kept) :] = self.kept

    def drop_auxiliary(self) -> None:
        self.kept = self.new.detach()[len(self.new) - self.num_auxiliary :].clone()
        super().drop_auxiliary()


class FeatureDistance(Term):
    """weight * || F_k - F_{k-1} ||_F over all images that count."""

    def __init__(self, weight: float) -> None:
        super().__init__("feature-distance")
        self.weight = weight

    def forward(self, step: Step) -> Tensor:
        counted = (step.samples.weights.sum(dim=1) > 0).to(step.features.embedding.dtype)
        distance = frobenius_distance(step.previous_features.embedding, step.features.embedding, counted)
        return self.weight * distance


class PrototypeTerm(Term):
    """A loss on `num_drawn` old classes, drawn uniformly for each batch and represented by their prototypes."""

    prototypes: Tensor  # (old classes, dim): the mean feature of each, as it was after the class's own stage

    def __init__(self, name: str, weight: float, num_drawn: int) -> None:
        super().__init__(name)
        self.weight = weight
        self.num_drawn = num_drawn
        self.register_buffer("prototypes", torch.empty(0))

    def forward(self, step: Step) -> Tensor:
        num_old, device = len(self.prototypes), self.prototypes.device
        classes = torch.randint(num_old, (self.num_drawn,), generator=step.generator, device=device)
        return self.weight * self.loss(classes, step)

    @abstractmethod
    def loss(self, classes: Tensor, step: Step) -> Tensor:
        """The loss of old classes (B,)."""

    @torch.no_grad()
    def conclude(self, learner: LearnerView) -> None:
        """Remember the new classes' Gaussians, in evaluation mode under the training transform."""
        learner.network.eval()
        batches = learner.training_batches(64, "prototypes")
        features, labels = zip(
            *((learner.network.backbone(images).embedding, own) for images, own in batches), strict=True
        )
        embeddings, owners = torch.cat(features), torch.cat(labels)
        classes = [embeddings[owners == label] for label in range(learner.stage.num_old, learner.stage.num_seen)]
        means = torch.stack([rows.mean(dim=0) for rows in classes])
        centred = [rows - mean for rows, mean in zip(classes, means, strict=True)]
        self.prototypes = torch.cat([self.prototypes, means])
        self.remember(torch.stack([rows.T @ rows / max(len(rows) - 1, 1) for rows in centred]))

    @abstractmethod
    def remember(self, covariances: Tensor) -> None:
        """Keep what is needed of the new classes' covariances (new classes, dim, dim)."""


class SemanticAugmentation(PrototypeTerm):
    """weight * L_seman: the current head on old classes' Gaussians, in closed form."""

    covariances: Tensor  # (old classes, dim, dim)

    def __init__(self, weight: float, num_drawn: int, strength: float, newest_first: bool) -> None:
        super().__init__("semantic", weight, num_drawn)
        self.strength = strength
        self.newest_first = newest_first
        self.register_buffer("covariances", torch.empty(0))

    def loss(self, classes: Tensor, step: Step) -> Tensor:
        weights = step.head.weights[: step.stage.num_seen]  # auxiliary outputs take no part
        gaussians = self.prototypes[classes], self.covariances[classes]
        return semantic_augmentation(
            *gaussians, classes, weights[:, :-1], weights[:, -1], self.strength, step.head.scale
        )

    def remember(self, covariances: Tensor) -> None:
        parts = [covariances, self.covariances] if self.newest_first else [self.covariances, covariances]
        self.covariances = torch.cat(parts)


class PrototypeAugmentation(PrototypeTerm):
    """weight * L_proto: cross-entropy over all outputs of prototypes with Gaussian noise of one radius."""

    radius: Tensor  # (): sqrt(mean over first-stage classes of trace(covariance) / dim), fixed from then on

    def __init__(self, weight: float, num_drawn: int) -> None:
        super().__init__("prototype", weight, num_drawn)
        self.register_buffer("radius", torch.zeros(()))

    def loss(self, classes: Tensor, step: Step) -> Tensor:
        rows = self.prototypes[classes]
        noise = torch.randn(rows.shape, generator=step.generator, device=rows.device, dtype=rows.dtype)
        return F.cross_entropy(step.head(rows + self.radius * noise), classes)

    def remember(self, covariances: Tensor) -> None:
        if self.radius == 0:
            traces = covariances.diagonal(dim1=1, dim2=2).sum(dim=1)
            self.radius = (traces.mean() / covariances.shape[1]).sqrt()
