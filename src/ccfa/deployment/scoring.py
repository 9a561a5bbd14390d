"""From images to classes: scores, calibrated confidences, and whether an image is like anything learned."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ccfa.data import Transforms
from ccfa.models import Network

NUM_BINS = 10  # of the expected calibration error
UNFAMILIAR_SHARE = 0.05  # of the held-out images of known classes, which are flagged too
_TEMPERATURES = np.logspace(-3, 3, 241)

Floats = NDArray[np.float64]


class Classifier(nn.Module):
    """What `predict`, `export` and `serve` run: from pixels to one score and one probability per class.

    Args:
        network: The network, on any device.
        transforms: What is done to the pixels of test images.
        temperature: Scores are divided by it before the softmax.
        directions: The mean direction of each class's embeddings (classes, dim), if it is known.
        nearest_mean: Predict by the nearest of these directions instead of the network's logits.
    """

    def __init__(
        self,
        network: Network,
        transforms: Transforms,
        temperature: float = 1.0,
        directions: Tensor | None = None,
        nearest_mean: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.transforms = transforms
        self.temperature = temperature
        self.directions = None if directions is None else nn.Buffer(directions)
        self.nearest_mean = nearest_mean
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and probabilities (N, classes) and familiarity (N,) of uint8 images (N, channels, height, width)."""
        scores, familiarity = self.read(self.embed(images))
        return scores, (scores / self.temperature).softmax(dim=1), familiarity

    def embed(self, images: Tensor) -> Tensor:
        """The backbone's embeddings (N, dim) of uint8 images."""
        return self.network.backbone(self.transforms.test(images)).embedding

    def read(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The scores (N, classes) and the familiarity (N,) of embeddings.

        Scores are logits or, by the nearest mean, minus the squared distance of the embedding's direction to that of
        each class. The familiarity is the cosine to the nearest class; without directions it is the largest score.
        """
        if self.directions is None:
            scores: Tensor = self.network.head(self.network.head.embed(embedding))
            return scores, scores.amax(dim=1)
        cosines = F.normalize(embedding) @ self.directions.T
        if self.nearest_mean:
            return 2 * cosines - self.directions.square().sum(dim=1) - 1, cosines.amax(dim=1)
        return self.network.head(self.network.head.embed(embedding)), cosines.amax(dim=1)


class Calibration(NamedTuple):
    """How scores become confidences, and how well that fits images that were never trained on.

    Args:
        temperature: Scores are divided by it before the softmax.
        unfamiliar_below: An image whose familiarity is lower is flagged. 5 % of the images measured on are.
        images: How many images it was measured on. With 0 the confidences are not calibrated.
        error: The expected calibration error: how far confidence and accuracy are apart on average, from 0 to 1. Each
            half of the images is measured with the temperature of the other half.
        error_before: The same without a temperature.
    """

    temperature: float = 1.0
    unfamiliar_below: float | None = None
    images: int = 0
    error: float | None = None
    error_before: float | None = None


def calibrate(scores: Floats, familiarity: Floats, labels: NDArray[np.int64]) -> Calibration:
    """Fit the temperature to images that were not trained on, and measure what it does. Every class counts the same.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(0, 3, 300)
    >>> scores = 8.0 * (np.eye(3)[labels] + rng.normal(0, 0.6, (300, 3)))  # far too sure of themselves
    >>> found = calibrate(scores, scores.max(axis=1), labels)
    >>> found.error < found.error_before
    True
    """
    if not len(labels):
        return Calibration()
    halves, weights = np.arange(len(labels)) % 2 == 0, class_weights(labels)
    error = before = None
    if len(labels) >= 2 * NUM_BINS:
        confidences = np.empty(len(labels))
        for half in (halves, ~halves):
            confidences[half] = probabilities(scores[half], best_temperature(scores[~half], labels[~half])).max(axis=1)
        is_right = scores.argmax(axis=1) == labels
        error = calibration_error(confidences, is_right, weights)
        before = calibration_error(probabilities(scores, 1.0).max(axis=1), is_right, weights)
    threshold = float(np.quantile(familiarity, UNFAMILIAR_SHARE, weights=weights, method="inverted_cdf"))
    return Calibration(best_temperature(scores, labels), threshold, len(labels), error, before)


def class_weights(labels: NDArray[np.int64]) -> Floats:
    """Weights of images, 1 on average, with which every class counts the same, however many images it has.

    >>> class_weights(np.array([0, 0, 0, 1])).round(2).tolist()
    [0.67, 0.67, 0.67, 2.0]
    """
    counts = np.bincount(labels)
    weights: Floats = len(labels) / np.count_nonzero(counts) / counts[labels]
    return weights


def best_temperature(scores: Floats, labels: NDArray[np.int64]) -> float:
    """The temperature with the least cross-entropy to smoothed targets, averaged over classes.

    As in Platt (1999), n right answers count as a probability of (n + 1) / (n + 2): without this, a few images that
    are all recognised would make the model certain of everything.
    """
    num, classes = scores.shape
    if classes < 2:
        return 1.0
    right = (num + 1) / (num + 2)
    targets = np.full(scores.shape, (1 - right) / (classes - 1))
    targets[np.arange(num), labels] = right
    targets *= class_weights(labels)[:, None]
    scale = max(float(np.mean(scores.max(axis=1) - scores.mean(axis=1))), 1e-12)  # scores have any unit
    losses = [-(targets * _log_probabilities(scores, scale * factor)).sum() for factor in _TEMPERATURES]
    return float(scale * _TEMPERATURES[int(np.argmin(losses))])


def probabilities(scores: Floats, temperature: float) -> Floats:
    return np.exp(_log_probabilities(scores, temperature))


def _log_probabilities(scores: Floats, temperature: float) -> Floats:
    scaled = scores / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    logarithms: Floats = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return logarithms


def calibration_error(confidences: Floats, is_right: NDArray[np.bool_], weights: Floats) -> float:
    """The expected calibration error with ten bins of equal width, of images that count by their weights.

    >>> calibration_error(np.array([0.95, 0.95]), np.array([True, False]), np.ones(2))
    0.45
    """
    bins = np.minimum((confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, weights * (confidences - is_right))
    return round(float(np.abs(gaps).sum() / weights.sum()), 12)


def score(classifier: Classifier, images: Tensor, batch_size: int = 128) -> tuple[Floats, Floats]:
    """The scores (N, classes) and the familiarity (N,) of uint8 images, batch by batch."""
    return read(classifier, embed(classifier, images, batch_size))


@torch.no_grad()
def embed(classifier: Classifier, images: Tensor, batch_size: int = 128) -> Tensor:
    """The embeddings (N, dim) of uint8 images, batch by batch, on the CPU."""
    device = next(classifier.parameters()).device
    parts = [classifier.embed(part.to(device)).float().cpu() for part in images.split(batch_size)]
    return torch.cat([torch.empty(0, classifier.network.backbone.dim), *parts])


@torch.no_grad()
def read(classifier: Classifier, embeddings: Tensor) -> tuple[Floats, Floats]:
    """The scores (N, classes) and the familiarity (N,) of embeddings."""
    device = next(classifier.parameters()).device
    scores, familiarity = classifier.read(embeddings.to(device))
    return scores.double().cpu().numpy(), familiarity.double().cpu().numpy()
