"""The losses and heads of iCaRL, BiC and GDumb once more, in plain NumPy and plain loops."""

import numpy as np
from numpy.typing import NDArray

from reference import Array, Labels


def sigmoid(value: Array | float) -> Array:
    """1 / (1 + exp(-value))."""
    return 1.0 / (1.0 + np.exp(-np.asarray(value)))


def icarl_loss(logits: Array, labels: Labels, previous_logits: Array | None) -> float:
    """As published: one BCE with logits, mean over rows and seen classes; old columns have the old net's sigmoids."""
    num_rows, num_seen = logits.shape
    total = 0.0
    for i in range(num_rows):
        for c in range(num_seen):
            target = 1.0 if labels[i] == c else 0.0
            if previous_logits is not None and c < previous_logits.shape[1]:
                target = float(sigmoid(previous_logits[i, c]))
            probability = float(sigmoid(logits[i, c]))
            total -= target * np.log(probability) + (1 - target) * np.log(1 - probability)
    return total / (num_rows * num_seen)


def binary_cross_entropy(logits: Array, labels: Labels) -> Array:
    """The same without a previous network, one value a row."""
    return np.array([icarl_loss(logits[i : i + 1], labels[i : i + 1], None) for i in range(len(logits))])


def softened_cross_entropy(previous_logits: Array, logits: Array, temperature: float) -> float:
    """BiC's distillation: cross-entropy between softmaxes at a temperature, mean over rows."""
    losses = []
    for old, new in zip(previous_logits / temperature, logits / temperature, strict=True):
        targets = np.exp(old) / np.sum(np.exp(old))
        losses.append(-np.sum(targets * np.log(np.exp(new) / np.sum(np.exp(new)))))
    return float(np.mean(losses))


def softened_sigmoids(previous_logits: Array, logits: Array, temperature: float) -> float:
    """The distillation of PODNet's code base for BiC: one BCE for each row and old class, mean over all."""
    losses = []
    for old, new in zip(previous_logits.flatten(), logits.flatten(), strict=True):
        target, probability = float(sigmoid(old / temperature)), float(sigmoid(new / temperature))
        losses.append(-target * np.log(probability) - (1 - target) * np.log(1 - probability))
    return float(np.mean(losses))


def normalised_scores(scores: Array, eps: float = 1e-6) -> NDArray[np.float64]:
    """Each column less its mean, divided by its deviation over the rows: a batch norm that has just begun."""
    return (scores - scores.mean(axis=0)) / np.sqrt(scores.var(axis=0) + eps)
