"""Images of classes that exist for training only: IL2A's mixtures of two classes, PASS's rotations.

Both leave a batch's own images in front and give those that follow the labels of auxiliary outputs, which come after
the seen classes in the head while a stage trains.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ccfa.augmentation.mixing import beta, random_partners
from ccfa.augmentation.samples import MixedImages
from ccfa.data import Stage
from ccfa.errors import UsageError


@dataclass(frozen=True)
class ClassMixing:
    """IL2A's classAug: each unordered pair of new classes is a class, whose images are mixtures of theirs."""

    rounds: int = 4
    alpha: float = 20.0
    span: tuple[float, float] = (0.4, 0.6)  # a share outside becomes 1/2
    phases: tuple[str, ...] = ("main",)
    in_first_stage: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.alpha <= 0:
            raise UsageError(f"Class mixing needs rounds >= 0 and alpha > 0, got {self.rounds} and {self.alpha}.")

    def num_classes(self, stage: Stage) -> int:
        """n (n - 1) / 2 pairs of the stage's new classes."""
        return stage.num_new * (stage.num_new - 1) // 2

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages:
        """The images, followed by a mixture of each with a partner, for each round."""
        batches, names, weights = [images], [labels], [torch.ones_like(labels, dtype=images.dtype)]
        for _ in range(self.rounds):
            partners = random_partners(len(images), generator)
            share = beta(self.alpha, (len(images), 1, 1, 1), generator)
            is_even = (share < self.span[0]) | (share > self.span[1])
            share = share.masked_fill(is_even, 0.5).to(images.dtype)
            batches.append(share * images + (1 - share) * images[partners])
            # Pairs of one class are left out in published code; here they stay in their places and weigh nothing.
            is_mixture = labels != labels[partners]
            names.append(torch.where(is_mixture, pair_label(labels, labels[partners], stage), labels))
            weights.append(is_mixture.to(images.dtype))
        return MixedImages(torch.cat(batches), torch.cat(names)[:, None], torch.cat(weights)[:, None])


def pair_label(first: Tensor, second: Tensor, stage: Stage) -> Tensor:
    """The auxiliary label of two different new classes, in either order."""
    low = torch.minimum(first, second) - stage.num_old
    high = torch.maximum(first, second) - stage.num_old
    return stage.num_seen + low * (2 * stage.num_new - low - 1) // 2 + high - low - 1


@dataclass(frozen=True)
class Rotations:
    """PASS's label augmentation: each new class turned by 90, 180 and 270 degrees is three more classes."""

    phases: tuple[str, ...] = ("main",)
    in_first_stage: bool = True

    def num_classes(self, stage: Stage) -> int:
        """Three a seen class, those of the new classes first."""
        return 3 * stage.num_seen

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages:
        """The images, followed by those turned once, twice and three times."""
        if images.shape[2] != images.shape[3]:
            raise UsageError(f"Only square images can be turned, got {tuple(images.shape[2:])} pixels.")
        turned = [torch.rot90(images, turns, (2, 3)) for turns in range(4)]
        auxiliary = [stage.num_seen + 3 * (labels - stage.num_old) + turns - 1 for turns in (1, 2, 3)]
        return MixedImages.of(torch.cat(turned), torch.cat([labels, *auxiliary]))
