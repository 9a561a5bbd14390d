"""Two images made one, with both labels: Mixup, CutMix and Manifold Mixup, one mixing share a batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ccfa.augmentation.samples import MixedImages
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.models.backbone import MapMixing


@dataclass(frozen=True)
class PairMixing(ABC):
    """Each image is mixed with another of its batch and keeps a share lambda ~ Beta(alpha, alpha), one a batch."""

    alpha: float = 1.0
    probability: float = 1.0  # that a batch is mixed at all
    phases: tuple[str, ...] = ("main", "balanced")
    in_first_stage: bool = True

    def __post_init__(self) -> None:
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
    def mix(
        self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, MapMixing | None]:
        """The images to show, the share of their first label, and what is to be mixed inside the backbone."""


@dataclass(frozen=True)
class Mixup(PairMixing):
    """Zhang et al., ICLR 2018: lambda x_i + (1 - lambda) x_j; alpha 1 is the published value for CIFAR."""

    def mix(
        self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, MapMixing | None]:
        """The weighted sums."""
        return share * images + (1 - share) * images[partners], share, None


@dataclass(frozen=True)
class CutMix(PairMixing):
    """Yun et al., ICCV 2019: a rectangle of area 1 - lambda is taken from the partner."""

    probability: float = 0.5

    def mix(
        self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, MapMixing | None]:
        """The patched images; the share is the area left after the rectangle was cut at the border."""
        inside = rectangle(images.shape[2], images.shape[3], share, generator)
        return torch.where(inside, images[partners], images), 1 - inside.to(images.dtype).mean(), None


@dataclass(frozen=True)
class ManifoldMixup(PairMixing):
    """Verma et al., ICML 2019: Mixup of the images or, as often, of the maps after one of the first levels."""

    alpha: float = 2.0
    num_places: int = 3  # before this many levels: the images, the maps of the first level, those of the second

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_places <= 3:  # every backbone here has at least three levels
            raise UsageError(f"Manifold Mixup mixes at 1 to 3 places, got num_places={self.num_places}.")

    def mix(
        self, images: Tensor, partners: Tensor, share: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, MapMixing | None]:
        """The images as they are, and the mixing that the backbone is to do at a place drawn for the batch."""
        level = torch.randint(self.num_places, (), generator=generator, device=images.device)
        return images, share, MapMixing(level, partners, share)


MIXES: dict[str, type[PairMixing]] = {"mixup": Mixup, "cutmix": CutMix, "manifold-mixup": ManifoldMixup}


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
