"""Image transforms as batched functions of uint8 [B, C, H, W] tensors; shapes never depend on data."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ccfa.errors import UsageError

Fused = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Turns a function of tensors into a faster one."""


class Draws(NamedTuple):
    """The random numbers for a batch; None where a transform is off."""

    offsets: Tensor | None = None  # [B, 2]: of the crop's window, every one equally likely
    flips: Tensor | None = None  # bool [B]: with probability 1/2
    factors: Tensor | None = None  # [B]: of brightness, uniform in [1 - strength, 1 + strength]


def crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Windows of the zero-padded images, image i from row offsets[i, 0] and column offsets[i, 1]."""
    (num, channels, height, width), device = images.shape, images.device
    padded = F.pad(images, (padding,) * 4)
    image = torch.arange(num, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    row = (offsets[:, 0, None] + torch.arange(height, device=device))[:, None, :, None]
    column = (offsets[:, 1, None] + torch.arange(width, device=device))[:, None, None, :]
    return padded[image, channel, row, column]


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the chosen images (bool [B]) left to right."""
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def brighten(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply image i by factors[i], rounded down and cut at 255, as Pillow does."""
    return (images * factors[:, None, None, None]).clamp_(0, 255).to(torch.uint8)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x / 255 - mean) / std per channel, float32."""
    if images.shape[1] != len(mean):
        raise UsageError(
            f"The images have {images.shape[1]} channels, but the transforms are for {len(mean)}. "
            "Choose transforms made for these images."
        )
    return (images.float() / 255 - _per_channel(mean, images)).div_(_per_channel(std, images))


def _per_channel(values: tuple[float, ...], images: Tensor) -> Tensor:
    # Filled on the device: a copy from the host would not be allowed while a CUDA graph is captured.
    return torch.cat([torch.full((1, 1, 1), value, device=images.device) for value in values])


@dataclass(frozen=True)
class Transforms:
    """Turns uint8 images into the backbone's input. Training also crops, flips and changes brightness at random.

    Args:
        mean: Of each channel, for pixel values from 0 to 1.
        std: The standard deviation of each channel.
        padding: Pixels of black around an image, from which a window of the image's size is cropped.
        flip: Whether half of the images are mirrored left to right.
        brightness: The strength s of the jitter: an image is multiplied by a number from 1 - s to 1 + s.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    flip: bool = False
    brightness: float = 0.0

    def __post_init__(self) -> None:
        sound = all(math.isfinite(mean) for mean in self.mean) and all(0 < std < math.inf for std in self.std)
        if not sound or len(self.mean) != len(self.std) or not self.mean:
            raise UsageError(f"Expected as many finite means as stds above 0, got {self.mean} and {self.std}.")
        if self.padding < 0:
            raise UsageError(f"The padding must be 0 pixels or more, got {self.padding}.")
        if not 0 <= self.brightness <= 1:
            raise UsageError(f"The brightness strength must be from 0 to 1, got {self.brightness}.")

    def draw(self, num: int, generator: torch.Generator) -> Draws:
        offsets = flips = factors = None
        if self.padding:
            offsets = torch.randint(2 * self.padding + 1, (num, 2), generator=generator, device=generator.device)
        if self.flip:
            flips = torch.rand(num, generator=generator, device=generator.device) < 0.5
        if self.brightness:
            uniform = torch.rand(num, generator=generator, device=generator.device)
            factors = 1 + self.brightness * (2 * uniform - 1)
        return Draws(offsets, flips, factors)

    def drawn(self, images: Tensor, draws: Draws) -> Tensor:
        """Crop, flip and brighten the images by the numbers drawn, then normalise."""
        if draws.offsets is not None:
            images = crop(images, self.padding, draws.offsets)
        if draws.flips is not None:
            images = flip(images, draws.flips)
        if draws.factors is not None:
            images = brighten(images, draws.factors)
        return normalise(images, self.mean, self.std)

    def train(self, images: Tensor, generator: torch.Generator, fused: Fused = lambda function: function) -> Tensor:
        """Return images to learn from; `fused` may turn the work after the draws into few kernels."""
        return fused(self.drawn)(images, self.draw(len(images), generator))

    def test(self, images: Tensor) -> Tensor:
        """Return images to predict: normalised only."""
        return normalise(images, self.mean, self.std)
