"""Image augmentations: Mixup, CutMix and Manifold Mixup, IL2A's mixtures of two classes, and PASS's rotations.

The last two make images of classes that exist for training only. They leave a batch's own images in front and give
those that follow the labels of auxiliary outputs, which come after the seen classes in the head while a stage trains.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ccfa.augmentation.samples import MixedImages
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.models.backbone import MapMixing
from ccfa.options import checked, schema

Mix = tuple[Tensor, Tensor, MapMixing | None]
"""The images for the backbone, the share of their first label, and what the backbone mixes inside."""


@dataclass(frozen=True)
class PairMixing(ABC):
    """Mixes each image with another of its batch; it keeps a share lambda ~ Beta(alpha, alpha), one per batch.

    Args:
        alpha: The parameter of the Beta distribution of shares.
        probability: The probability that a batch is mixed at all.
        phases: The names of the phases it acts in.
        in_first_stage: Mix in the first stage, too.
    """

    alpha: float = 1.0
    probability: float = 1.0
    phases: tuple[str, ...] = ("main", "balanced")
    in_first_stage: bool = True

    def __post_init__(self) -> None:
        checked(vars(self), schema(type(self)), type(self).__name__)
        if self.alpha <= 0 or not 0 <= self.probability <= 1:
            raise UsageError(
                f"{type(self).__name__} needs alpha > 0 and a probability from 0 to 1; "
                f"got alpha={self.alpha}, probability={self.probability}."
            )

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages:
        """The images, each mixed with its partner, labelled by both in proportion to their shares."""
        partners = random_partners(len(images), generator)
        share = beta(self.alpha, (), generator)
        unmixed = torch.rand((), generator=generator, device=images.device) >= self.probability
        share = torch.where(unmixed, torch.ones_like(share), share).to(images.dtype)
        images, share, mixing = self.mix(images, partners, share, generator)
        weights = torch.stack([share, 1 - share]).expand(len(images), 2)
        return MixedImages(images, torch.stack([labels, labels[partners]], dim=1), weights, mixing)

    @abstractmethod
    def mix(self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator) -> Mix: ...


@dataclass(frozen=True)
class Mixup(PairMixing):
    """Zhang et al., ICLR 2018: lambda x_i + (1 - lambda) x_j; alpha 1 is the published value for CIFAR."""

    def mix(self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator) -> Mix:
        return share * images + (1 - share) * images[partners], share, None


@dataclass(frozen=True)
class CutMix(PairMixing):
    """Yun et al., ICCV 2019: a rectangle of area 1 - lambda is taken from the partner."""

    probability: float = 0.5

    def mix(self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator) -> Mix:
        # The share is the area left after the rectangle was cut at the border.
        inside = rectangle(images.shape[2], images.shape[3], share, generator)
        return torch.where(inside, images[partners], images), 1 - inside.to(images.dtype).mean(), None


@dataclass(frozen=True)
class ManifoldMixup(PairMixing):
    """Verma et al., ICML 2019: Mixup of the images or, as often, of the maps after one of the first levels.

    Args:
        num_places: Mix before one of this many levels: the images, the maps of the first level, those of the second.
    """

    alpha: float = 2.0
    num_places: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_places <= 3:  # every backbone here has at least three levels
            raise UsageError(f"Manifold Mixup mixes at 1 to 3 places, got num_places={self.num_places}.")

    def mix(self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator) -> Mix:
        level = torch.randint(self.num_places, (), generator=generator, device=images.device)
        return images, share, MapMixing(level, partners, share)


MIXES: dict[str, type[PairMixing]] = {"mixup": Mixup, "cutmix": CutMix, "manifold-mixup": ManifoldMixup}


@dataclass(frozen=True)
class ClassMixing:
    """IL2A's classAug: each unordered pair of new classes is a class, whose images are mixtures of the two."""

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
            # Pairs of one class are left out in published code; here they stay, with a weight of 0.
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
        """Three per seen class, those of the new classes first."""
        return 3 * stage.num_seen

    def __call__(self, images: Tensor, labels: Tensor, stage: Stage, generator: Generator) -> MixedImages:
        """The images, followed by those turned once, twice and three times."""
        if images.shape[2] != images.shape[3]:
            raise UsageError(f"Only square images can be turned, got {tuple(images.shape[2:])} pixels.")
        turned = [torch.rot90(images, turns, (2, 3)) for turns in range(4)]
        auxiliary = [stage.num_seen + 3 * (labels - stage.num_old) + turns - 1 for turns in (1, 2, 3)]
        return MixedImages.of(torch.cat(turned), torch.cat([labels, *auxiliary]))


def random_partners(num_images: int, generator: Generator) -> Tensor:
    """A random permutation of the batch."""
    return torch.rand(num_images, generator=generator, device=generator.device).argsort()


def beta(alpha: float, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draws from Beta(alpha, alpha)."""
    # What torch.distributions.Beta calls; that interface takes no generator.
    concentration = torch.full((*shape, 2), alpha, device=generator.device)
    return torch._sample_dirichlet(concentration, generator=generator)[..., 0]


def rectangle(height: int, width: int, share: Tensor, generator: Generator) -> Tensor:
    """Mask (height, width) of a box of relative area 1 - share around a random pixel, cut at the border."""
    side = (1 - share).sqrt()
    centre = torch.rand(2, generator=generator, device=generator.device)
    inside = []
    for length, position in ((height, centre[0]), (width, centre[1])):
        middle = (position * length).floor()
        reach = ((side * length).floor() / 2).floor()  # whole pixels, as published: the box has an even side
        pixels = torch.arange(length, device=generator.device)
        inside.append((pixels >= middle - reach) & (pixels < middle + reach))
    return inside[0][:, None] & inside[1]
