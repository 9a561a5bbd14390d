"""Image transforms as batched functions of uint8 [B, C, H, W] tensors; shapes never depend on data."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ccfa.data.policies import POLICIES, cut_out, draw_operations, operated
from ccfa.errors import UsageError, choose

Fused = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Turns a function of tensors into a faster one."""


ATTEMPTS = 10  # of torchvision to find a window that fits


class Draws(NamedTuple):
    """The random numbers for a batch; None where a transform is off."""

    offsets: Tensor | None = None  # [B, 2]: of the crop's window, every one equally likely; [B, 4] of a resized window
    flips: Tensor | None = None  # [B], uniform from 0 to 1: below 1/2 an image is mirrored
    brightness: Tensor | None = None  # [B], uniform from 0 to 1, for factors from 1 - strength to 1 + strength
    operations: Tensor | None = None  # [B, operations]: numbers of a policy's operations
    magnitudes: Tensor | None = None  # [B, operations]
    centres: Tensor | None = None  # [B, 2]: of the squares that are cut out, row and column


def crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Windows of the zero-padded images, image i from row offsets[i, 0] and column offsets[i, 1]."""
    (num, channels, height, width), device = images.shape, images.device
    padded = F.pad(images, (padding,) * 4)
    image = torch.arange(num, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    row = (offsets[:, 0, None] + torch.arange(height, device=device))[:, None, :, None]
    column = (offsets[:, 1, None] + torch.arange(width, device=device))[:, None, None, :]
    return padded[image, channel, row, column]


def draw_boxes(num: int, side: int, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Random windows of square images as torchvision's RandomResizedCrop draws them: top, left, height, width [B, 4].

    A window's share of the area is uniform in `scale`, the logarithm of width / height is uniform between those of 3/4
    and 4/3, and every place is equally likely. The first of ten attempts that fits is taken, or else the whole image.
    """
    share, log_ratio, row, column = torch.rand(4, ATTEMPTS, num, generator=generator, device=generator.device)
    area = side * side * (scale[0] + (scale[1] - scale[0]) * share)
    ratio = torch.exp(math.log(3 / 4) + math.log(16 / 9) * log_ratio)
    height, width = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (height >= 1) & (height <= side) & (width >= 1) & (width <= side)
    # A draw of 1 - 2^-24 times a large number of places may be rounded up to that number.
    top = torch.minimum((row * (side - height + 1)).floor(), side - height)
    left = torch.minimum((column * (side - width + 1)).floor(), side - width)
    attempts = torch.stack([top, left, height, width], dim=-1)  # [ATTEMPTS, B, 4]
    first = fits.int().argmax(dim=0)[None, :, None].expand(1, num, 4)
    whole = torch.cat([torch.zeros(2, device=area.device), torch.full((2,), float(side), device=area.device)])
    return torch.where(fits.any(dim=0)[:, None], attempts.gather(0, first)[0], whole).long()


def resized_crop(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Windows of the images (top, left, height, width) resized to size x size by Pillow's bilinear filter.

    The filter smooths where it makes smaller. Pillow also rounds between columns and rows, so a value may differ by 1.
    """
    top, left, height, width = boxes.unbind(1)
    columns = _bilinear_weights(left, width, images.shape[3], size)  # [B, size, W]
    rows = _bilinear_weights(top, height, images.shape[2], size)
    return (rows[:, None] @ images.float() @ columns.mT[:, None]).add_(0.5).to(torch.uint8)


def _bilinear_weights(start: Tensor, length: Tensor, num: int, size: int) -> Tensor:
    """What each of `num` pixels adds to each of `size` new ones [B, size, num]: triangles around the new centres."""
    scale = (length / size)[:, None, None]
    reach = scale.clamp(min=1)
    pixel = torch.arange(num, device=start.device)[None, None, :] - start[:, None, None]  # counted from the window
    centre = (torch.arange(size, device=start.device)[None, :, None] + 0.5) * scale
    weights = (1 - (pixel + 0.5 - centre).abs() / reach).clamp_(min=0)
    weights = weights * ((pixel >= 0) & (pixel < length[:, None, None]))
    return weights / weights.sum(dim=2, keepdim=True)


def centre_crop(images: Tensor, size: int) -> Tensor:
    """The size x size pixels in the middle of the images."""
    top, left = ((side - size) // 2 for side in images.shape[2:])
    return images[:, :, top : top + size, left : left + size]


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
        scale: The range of the share of a square image that a random window covers, instead of a padded crop. The
            window is resized to the size of test images (see `draw_boxes`).
        centre: The share of the image's side that test images keep: the square in the middle.
        policy: `autoaugment` (the policy for CIFAR-10) or `trivial` (TrivialAugment, wide), after the above; see
            `ccfa.data.policies`.
        cutout: The side, in pixels, of a square of each normalised image that is set to 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    flip: bool = False
    brightness: float = 0.0
    scale: tuple[float, float] | None = None
    centre: float = 1.0
    policy: str | None = None
    cutout: int = 0

    def __post_init__(self) -> None:
        sound = all(math.isfinite(mean) for mean in self.mean) and all(0 < std < math.inf for std in self.std)
        if not sound or len(self.mean) != len(self.std) or not self.mean:
            raise UsageError(f"Expected as many finite means as stds above 0, got {self.mean} and {self.std}.")
        if self.padding < 0:
            raise UsageError(f"The padding must be 0 pixels or more, got {self.padding}.")
        if not 0 <= self.brightness <= 1:
            raise UsageError(f"The brightness strength must be from 0 to 1, got {self.brightness}.")
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"A window's share of the image must be above 0 and at most 1, got {self.scale}.")
        if self.scale and self.padding:
            raise UsageError("Images are cropped after padding or by a resized window, not both.")
        if not 0 < self.centre <= 1 or (self.centre < 1 and not self.scale):
            raise UsageError(
                f"The centre must be above 0 and at most 1, and below 1 with a scale only, got {self.centre}."
            )
        if self.policy is not None:
            choose("policy", self.policy, POLICIES)
        if self.cutout < 0:
            raise UsageError(f"The side of the square to cut out must be 0 pixels or more, got {self.cutout}.")

    def require_room(self, height: int, width: int) -> None:
        """Refuse images of a size that leaves nothing around the square to cut out."""
        side = self._size(width) if self.scale else min(height, width)
        if self.cutout >= side:
            raise UsageError(
                f"A square of {self.cutout} pixels would cut out whole images. Use a cutout below {side}, their side."
            )

    def draw(self, num: int, generator: torch.Generator, height: int = 0, width: int = 0) -> Draws:
        """Draw the random numbers for a batch; some need the size of the images."""
        offsets = flips = brightness = operations = magnitudes = centres = None
        if self.scale:
            offsets = draw_boxes(num, width, self.scale, generator)
            height = width = self._size(width)
        if self.padding:
            offsets = torch.randint(2 * self.padding + 1, (num, 2), generator=generator, device=generator.device)
        if self.flip:
            flips = torch.rand(num, generator=generator, device=generator.device)
        if self.brightness:
            brightness = torch.rand(num, generator=generator, device=generator.device)
        if self.policy:
            operations, magnitudes = draw_operations(self.policy, num, height, width, generator)
        if self.cutout:
            sides = [
                torch.randint(side, (num,), generator=generator, device=generator.device) for side in (height, width)
            ]
            centres = torch.stack(sides, dim=1)
        return Draws(offsets, flips, brightness, operations, magnitudes, centres)

    def drawn(self, images: Tensor, draws: Draws) -> Tensor:
        """Crop, flip, brighten and so on by the numbers drawn, then normalise and cut out."""
        if draws.offsets is not None:
            if self.scale:
                images = resized_crop(images, draws.offsets, self._size(images.shape[3]))
            else:
                images = crop(images, self.padding, draws.offsets)
        if draws.flips is not None:
            images = flip(images, draws.flips < 0.5)
        if draws.brightness is not None:
            images = brighten(images, 1 + self.brightness * (2 * draws.brightness - 1))
        if draws.operations is not None and draws.magnitudes is not None:
            images = operated(images, draws.operations, draws.magnitudes)
        images = normalise(images, self.mean, self.std)
        return images if draws.centres is None else cut_out(images, draws.centres, self.cutout)

    def train(self, images: Tensor, generator: torch.Generator, fused: Fused = lambda function: function) -> Tensor:
        """Return images to learn from; `fused` may turn the work after the draws into few kernels."""
        return fused(self.drawn)(images, self.draw(len(images), generator, *images.shape[2:]))

    def test(self, images: Tensor) -> Tensor:
        """Return images to predict: their centre, normalised."""
        if self.centre < 1:
            images = centre_crop(images, self._size(images.shape[3]))
        return normalise(images, self.mean, self.std)

    def _size(self, side: int) -> int:
        return max(1, round(self.centre * side))
