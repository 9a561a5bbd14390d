"""What methods without exemplars remember of old classes: where their features lay, and how they spread."""

from abc import abstractmethod

import torch
from torch import Tensor

from ccfa.losses.prototypes import frobenius_distance
from ccfa.methods.method import LearnerView, Step, Term


class FeatureDistance(Term):
    """weight * || F_k - F_{k-1} ||_F over all images that count."""

    def __init__(self, weight: float) -> None:
        super().__init__("feature-distance")
        self.weight = weight

    def forward(self, step: Step) -> Tensor:
        """The penalty on the embedding."""
        counted = (step.samples.weights.sum(dim=1) > 0).to(step.features.embedding.dtype)
        distance = frobenius_distance(step.previous_features.embedding, step.features.embedding, counted)
        return self.weight * distance


class PrototypeTerm(Term):
    """A loss on `num_drawn` old classes, drawn uniformly for each batch and seen through their prototypes."""

    prototypes: Tensor  # (old classes, dim): the mean feature of each, as it was after the class's own stage

    def __init__(self, name: str, weight: float, num_drawn: int) -> None:
        super().__init__(name)
        self.weight = weight
        self.num_drawn = num_drawn
        self.register_buffer("prototypes", torch.empty(0))

    def forward(self, step: Step) -> Tensor:
        """The penalty of the classes drawn."""
        shape, device = (self.num_drawn,), self.prototypes.device
        return self.weight * self.loss(
            torch.randint(len(self.prototypes), shape, generator=step.generator, device=device), step
        )

    @abstractmethod
    def loss(self, classes: Tensor, step: Step) -> Tensor:
        """The loss of old classes (B,)."""

    def conclude(self, learner: LearnerView) -> None:
        """Add the stage's new classes."""
        means, covariances = class_gaussians(learner)
        self.prototypes = followed_by(self.prototypes, means)
        self.remember(covariances)

    @abstractmethod
    def remember(self, covariances: Tensor) -> None:
        """Keep what is needed of the new classes' covariances (new classes, dim, dim)."""


def followed_by(first: Tensor, second: Tensor) -> Tensor:
    """Both joined, where either may be a buffer that holds nothing yet."""
    return torch.cat([part for part in (first, second) if len(part)])


@torch.no_grad()
def class_gaussians(learner: LearnerView) -> tuple[Tensor, Tensor]:
    """Mean and covariance of each new class's features, in evaluation mode under the training transform."""
    learner.network.eval()
    features, labels = [], []
    for images, names in learner.training_batches(64, "prototypes"):
        features.append(learner.network.backbone(images).embedding)
        labels.append(names)
    embeddings, owners = torch.cat(features), torch.cat(labels)
    means, covariances = [], []
    for label in range(learner.stage.num_old, learner.stage.num_seen):
        own = embeddings[owners == label]
        means.append(own.mean(dim=0))
        centred = own - means[-1]
        covariances.append(centred.T @ centred / max(len(own) - 1, 1))
    return torch.stack(means), torch.stack(covariances)
