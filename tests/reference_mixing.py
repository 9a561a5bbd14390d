"""Slow NumPy versions of image mixing and of the losses on remembered Gaussians, image by image and class by class."""

from itertools import combinations

import numpy as np

from reference import Array, Labels, cross_entropy


def mixup(images: Array, partners: Labels, share: float) -> Array:
    """lambda x_i + (1 - lambda) x_j."""
    return np.stack([share * images[i] + (1 - share) * images[j] for i, j in enumerate(partners)])


def cut_box(height: int, width: int, row: int, column: int, share: float) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of the published rectangle: whole half-sides around a pixel, cut at the border."""
    half_height = int(height * np.sqrt(1 - share)) // 2
    half_width = int(width * np.sqrt(1 - share)) // 2
    top, bottom = np.clip([row - half_height, row + half_height], 0, height)
    left, right = np.clip([column - half_width, column + half_width], 0, width)
    return int(top), int(bottom), int(left), int(right)


def pair_labels(new_classes: list[int], num_seen: int) -> dict[frozenset[int], int]:
    """The auxiliary label of each unordered pair, counted through in order."""
    return {frozenset(pair): num_seen + i for i, pair in enumerate(combinations(new_classes, 2))}


def semantic_augmentation(
    prototypes: Array,
    covariances: Array,
    labels: Labels,
    weights: Array,
    biases: Array,
    strength: float,
    scale: float,
) -> float:
    """IL2A's L_seman, entry by entry."""
    losses = []
    for prototype, covariance, label in zip(prototypes, covariances, labels, strict=True):
        logits = np.zeros((1, len(weights)))
        for c, weight in enumerate(weights):
            difference = weight - weights[label]
            logits[0, c] = weight @ prototype + biases[c] + strength / 2 * difference @ covariance @ difference
        losses.append(cross_entropy(scale * logits, np.array([label]))[0])
    return float(np.mean(losses))


def frobenius_distance(previous: Array, current: Array, weights: Array) -> float:
    """The root of all squared differences of the rows that count."""
    total = 0.0
    for old, new, weight in zip(previous, current, weights, strict=True):
        total += float(np.sum((weight * (new - old)) ** 2))
    return float(np.sqrt(total))
