"""Samples: the labelled features that L_cls is computed on, and the only thing feature augmentations see."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ccfa.data import Stage
from ccfa.kernels import can_run, head_loss
from ccfa.losses import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, Head, LocalSimilarityHead
from ccfa.models.backbone import MapMixing

Criterion = Callable[[Tensor, Tensor], Tensor]
"""l_cls: (logits, labels) -> one value per row."""


class Samples(NamedTuple):
    """Features with one or more weighted labels each; several where images were mixed.

    Args:
        features: (N, dim), as they enter the head.
        labels: (N, L).
        weights: (N, L), the weight of each label in L_cls. A weight of 0 removes a row without changing a shape.

    Example:
        >>> samples = Samples.of(torch.zeros(2, 8), torch.tensor([0, 3]))
        >>> more = samples.and_also(torch.ones(1, 8), torch.tensor([1]), torch.tensor([0.5]))
        >>> more.labels.tolist(), more.weights.tolist()
        ([[0], [3], [1]], [[1.0], [1.0], [0.5]])
    """

    features: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> "Samples":
        """Features (N, dim) with one label of weight 1 each; `labels` are (N,)."""
        return cls(features, labels[:, None], torch.ones_like(labels[:, None], dtype=features.dtype))

    def picked(self, rows: Tensor) -> "Samples":
        """These rows (M,) of the samples."""
        return Samples(*(part[rows] for part in self))

    def parted(self, num_rows: int) -> tuple["Samples", "Samples"]:
        """The first rows and the others."""
        return Samples(*(part[:num_rows] for part in self)), Samples(*(part[num_rows:] for part in self))

    def joined(self, others: "Samples") -> "Samples":
        """These samples followed by others with as many labels each."""
        if not len(others.labels):
            return self
        return Samples(*(torch.cat(parts) for parts in zip(self, others, strict=True)))

    def and_also(self, features: Tensor, labels: Tensor, weights: Tensor) -> "Samples":
        """These samples followed by others that have a single label each; `labels` and `weights` are (M,)."""
        extra = self.labels.shape[1] - 1
        others = Samples(features, labels[:, None].expand(-1, extra + 1), F.pad(weights[:, None], (0, extra)))
        return self.joined(others)


def weighing_labels(labels: Tensor, weights: Tensor) -> Tensor:
    """The labels (N, L), with the heaviest label of the row in place of those of weight 0."""
    if labels.shape[1] == 1:
        return labels
    heaviest = labels.gather(1, weights.argmax(dim=1, keepdim=True))
    return torch.where(weights > 0, labels, heaviest)


class MixedImages(NamedTuple):
    """Images, normalised, with one or more weighted labels each; images in addition to a batch's own come last."""

    images: Tensor  # (N, C, H, W)
    labels: Tensor  # (N, L)
    weights: Tensor  # (N, L)
    mixing: MapMixing | None = None  # what the backbone mixes inside

    @classmethod
    def of(cls, images: Tensor, labels: Tensor) -> "MixedImages":
        """Images with one label of weight 1 each."""
        return cls(images, labels[:, None], torch.ones_like(labels[:, None], dtype=images.dtype))


class ImageAugmentation(Protocol):
    """Makes mixed images out of images with labels (N,): Mixup, CutMix, class mixing, rotations."""

    @property
    def phases(self) -> tuple[str, ...]: ...  # the names of the phases it acts in

    @property
    def in_first_stage(self) -> bool: ...  # whether it acts in stage 0 too

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages: ...


class FeatureAugmentation(Protocol):
    """What `with_augmentation` takes: any object with `phases`, `needs_old_head` and this call.

    The call takes the samples of a batch, the current head, the head of the previous stage (None in the first stage),
    the criterion l_cls and a generator. It returns the samples to train on, which must have the same shape in every
    step.

    Example:
        >>> class Twice:
        ...     phases, needs_old_head = ("main",), False
        ...     def __call__(self, samples, head, old_head, criterion, generator):
        ...         return samples.joined(samples)
        >>> augmentation: FeatureAugmentation = Twice()
        >>> len(augmentation(Samples.of(torch.zeros(2, 8), torch.tensor([0, 3])), None, None, None, None).labels)
        4
    """

    @property
    def phases(self) -> tuple[str, ...]: ...  # the names of the phases it acts in

    @property
    def needs_old_head(self) -> bool: ...  # whether it has no meaning for a method that keeps no old head

    def __call__(
        self, samples: Samples, head: Head, old_head: Head | None, criterion: Criterion, generator: Generator
    ) -> Samples: ...


@runtime_checkable
class LateAugmentation(FeatureAugmentation, Protocol):
    """A feature augmentation that adds constants, which can be made while the backbone's gradients are computed.

    These depend on such samples by their weights alone, because L_cls is a weighted mean. See `CCFA`.
    """

    def may_be_late(self) -> bool: ...

    def weights_ahead(self, labels: Tensor, old_head: Head) -> Tensor: ...

    def added(
        self, samples: Samples, head: Head, old_head: Head, criterion: Criterion, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def classification_loss(
    samples: Samples, head: Head, criterion: Criterion, other_weights: Tensor | None = None
) -> Tensor:
    """L_cls: the criterion's weighted mean over all labels of all samples.

    Args:
        samples: The samples.
        head: The current head.
        criterion: l_cls.
        other_weights: Those of samples that count in the mean but are not among these. The two parts of the mean add up
            to that of all samples.
    """
    problem = compared_directions(head, criterion) if can_run(samples.features.device) else None
    loss = None
    if problem:
        loss = head_loss(samples.features, samples.labels, samples.weights, *problem, other_weights=other_weights)
    if loss is not None:
        return loss
    losses = torch.stack(
        [criterion(head(samples.features, labels), labels) for labels in samples.labels.unbind(dim=1)], dim=1
    )
    total = samples.weights.sum()
    return (samples.weights * losses).sum() / (total if other_weights is None else total + other_weights.sum())


def compared_directions(head: object, criterion: Criterion) -> tuple[Tensor, Tensor, str, str] | None:
    """Proxies, scale, similarity and criterion of a head that compares directions, as the kernels for it take them.

    None where they do not know the head or the criterion.
    """
    if criterion not in (cross_entropy, nca, nca_exclusive):
        return None
    if type(head) is CosineHead:
        return head.weights[:, None], head.scale, "cosine", criterion.__name__
    if type(head) is LocalSimilarityHead and head.margin == 0:
        return head.weights, head.scale, "distance", criterion.__name__
    return None
