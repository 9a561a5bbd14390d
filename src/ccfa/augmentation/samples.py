"""Samples: the labelled features that L_cls is computed on, and the only thing feature augmentations see."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from ccfa.data import Stage
from ccfa.models import Head
from ccfa.models.backbone import MapMixing

Criterion = Callable[[Tensor, Tensor], Tensor]
"""l_cls: (logits, labels) -> one value a row."""


class Samples(NamedTuple):
    """Features with one or more weighted labels each (several where images were mixed)."""

    features: Tensor  # (N, dim), in the head's space
    labels: Tensor  # (N, L)
    weights: Tensor  # (N, L)

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> "Samples":
        """Features with one label of weight 1 each."""
        return cls(features, labels[:, None], torch.ones_like(labels[:, None], dtype=features.dtype))

    @property
    def weighing_labels(self) -> Tensor:
        """The labels (N, L), with the heaviest label of the row in place of those that weigh nothing."""
        heaviest = self.labels.gather(1, self.weights.argmax(dim=1, keepdim=True))
        return torch.where(self.weights > 0, self.labels, heaviest)

    def parted(self, num_rows: int) -> tuple["Samples", "Samples"]:
        """The first rows and the others."""
        return Samples(*(part[:num_rows] for part in self)), Samples(*(part[num_rows:] for part in self))

    def joined(self, others: "Samples") -> "Samples":
        """These samples followed by others with as many labels each."""
        return Samples(*(torch.cat(parts) for parts in zip(self, others, strict=True)))

    def and_also(self, features: Tensor, labels: Tensor, weights: Tensor) -> "Samples":
        """These samples followed by others that have a single label each."""
        extra = self.labels.shape[1] - 1
        return Samples(
            torch.cat([self.features, features]),
            torch.cat([self.labels, labels[:, None].expand(-1, extra + 1)]),
            torch.cat([self.weights, torch.nn.functional.pad(weights[:, None], (0, extra))]),
        )


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
    """Makes mixed images out of images: Mixup, CutMix, class mixing, rotations."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases it acts in."""
        ...

    @property
    def in_first_stage(self) -> bool:
        """Whether it acts in stage 0 too."""
        ...

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages:
        """The images to train on; `labels` (N,) are those of the images given."""
        ...


class FeatureAugmentation(Protocol):
    """Makes more samples out of samples, with the head and the previous stage's head."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases it acts in."""
        ...

    @property
    def needs_old_head(self) -> bool:
        """Whether it means nothing to a method that keeps no old head."""
        ...

    def __call__(
        self,
        samples: Samples,
        head: Head,
        old_head: Head | None,
        criterion: Criterion,
        generator: Generator,
    ) -> Samples:
        """The samples to train on; `old_head` is None in the first stage."""
        ...


def classification_loss(samples: Samples, head: Head, criterion: Criterion) -> Tensor:
    """L_cls: the criterion's weighted mean over all labels of all samples."""
    losses = torch.stack(
        [criterion(head(samples.features, labels), labels) for labels in samples.labels.unbind(dim=1)], dim=1
    )
    return (samples.weights * losses).sum() / samples.weights.sum()
