"""Policies of image augmentation, as batched functions of uint8 [B, C, H, W] tensors: AutoAugment and TrivialAugment.

A policy draws, for each image, one or two operations with their magnitudes. The definitions are those of torchvision on
Pillow images: nearest pixels, and black where an operation moves the image away. Shapes never depend on data: every
operation is computed for all images, and each image takes the results of its own.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ccfa.errors import choose

# Cubuk et al., "AutoAugment", CVPR 2019, the policy found on CIFAR-10: two operations, each with probability and level.
_AUTOAUGMENT = """
    invert 0.1 0, contrast 0.2 6
    rotate 0.7 2, translate-x 0.3 9
    sharpness 0.8 1, sharpness 0.9 3
    shear-y 0.5 8, translate-y 0.7 9
    auto-contrast 0.5 0, equalize 0.9 0
    shear-y 0.2 7, posterize 0.3 7
    color 0.4 3, brightness 0.6 7
    sharpness 0.3 9, brightness 0.7 9
    equalize 0.6 0, equalize 0.5 0
    contrast 0.6 7, sharpness 0.6 5
    color 0.7 7, translate-x 0.5 8
    equalize 0.3 0, auto-contrast 0.4 0
    translate-y 0.4 3, sharpness 0.2 6
    brightness 0.9 6, color 0.2 8
    solarize 0.5 2, invert 0 0
    equalize 0.2 0, auto-contrast 0.6 0
    equalize 0.2 0, equalize 0.6 0
    color 0.9 9, equalize 0.6 0
    auto-contrast 0.8 0, solarize 0.2 8
    brightness 0.1 3, color 0.7 0
    solarize 0.4 5, auto-contrast 0.9 0
    translate-y 0.9 9, translate-y 0.7 9
    auto-contrast 0.9 0, solarize 0.8 3
    equalize 0.8 0, invert 0.1 0
    translate-y 0.7 9, auto-contrast 0.9 0
"""
_LEVELS, _WIDE_LEVELS = 10, 31  # of magnitudes: AutoAugment's, TrivialAugment's


def identity(images: Tensor, magnitudes: Tensor) -> Tensor:
    """The images as they are."""
    return images


def shear_x(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Take row y from so many pixels to the right as the magnitude times y."""
    one, zero = torch.ones_like(magnitudes), torch.zeros_like(magnitudes)
    return _moved(images, one, magnitudes, zero, zero, one, zero)


def shear_y(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Take column x from so many pixels below as the magnitude times x."""
    one, zero = torch.ones_like(magnitudes), torch.zeros_like(magnitudes)
    return _moved(images, one, zero, zero, magnitudes, one, zero)


def translate_x(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Move to the right by whole pixels."""
    one, zero = torch.ones_like(magnitudes), torch.zeros_like(magnitudes)
    return _moved(images, one, zero, -magnitudes.trunc(), zero, one, zero)


def translate_y(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Move down by whole pixels."""
    one, zero = torch.ones_like(magnitudes), torch.zeros_like(magnitudes)
    return _moved(images, one, zero, zero, zero, one, -magnitudes.trunc())


def rotate(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Turn around the centre, counter-clockwise by degrees."""
    angles = -torch.deg2rad(magnitudes)
    cos, sin = angles.cos(), angles.sin()
    height, width = images.shape[2:]
    x = width / 2 - cos * width / 2 - sin * height / 2
    y = height / 2 + sin * width / 2 - cos * height / 2
    return _moved(images, cos, sin, x, -sin, cos, y)


def _moved(images: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Take pixel (x, y) from (a x + b y + c, d x + e y + f), in Pillow's steps of 1 / 65536; black from outside."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device)[None, None, :]
    y = torch.arange(height, device=images.device)[None, :, None]

    def source(from_x: Tensor, from_y: Tensor, start: Tensor) -> Tensor:  # [B, H, W]
        steps = [(part * 65536 + 0.5).floor().long()[:, None, None] for part in (from_x, from_y)]
        first = ((start + (from_x + from_y) / 2) * 65536 + 0.5).floor().long()[:, None, None]  # a pixel's centre
        return (first + steps[0] * x + steps[1] * y) >> 16

    column, row = source(a, b, c), source(d, e, f)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    place = torch.where(inside, row * width + column, 0).flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, place).view(images.shape) * inside[:, None]


def brightness(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Away from black, or towards it where the magnitude is negative."""
    return _blended(torch.zeros_like(images), images, magnitudes)


def color(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Away from gray, or towards it."""
    return _blended(_gray(images).to(torch.uint8).expand_as(images), images, magnitudes)


def contrast(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Away from the mean gray of the image, or towards it."""
    gray = _gray(images).flatten(1)
    mean = (2 * gray.sum(dim=1) + gray.shape[1]) // (2 * gray.shape[1])  # rounded to the nearest
    return _blended(mean.to(torch.uint8)[:, None, None, None].expand_as(images), images, magnitudes)


def sharpness(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Away from the smoothed image, or towards it. The outermost pixels stay."""
    height, width = images.shape[2:]
    values, smooth = images.long(), images.clone()
    if min(height, width) > 2:
        rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
        around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[:, :, 1:-1, 1:-1]  # the middle counts 5
        smooth[:, :, 1:-1, 1:-1] = ((2 * around + 13) // 26).to(torch.uint8)  # of 13, rounded to the nearest
    return _blended(smooth, images, magnitudes)


def _blended(other: Tensor, images: Tensor, magnitudes: Tensor) -> Tensor:
    """other + (1 + magnitude) * (image - other), rounded down, from 0 to 255."""
    factors = (1 + magnitudes).float()[:, None, None, None]
    return (other + factors * (images.float() - other)).clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    """The luminance [B, 1, H, W] of colours by ITU-R 601-2, as Pillow rounds it."""
    values = images.long()
    if images.shape[1] != 3:
        return values[:, :1]
    red, green, blue = values[:, 0:1], values[:, 1:2], values[:, 2:3]
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def posterize(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Keep so many of the 8 bits."""
    bits = magnitudes.long().clamp(0, 8)[:, None, None, None]
    return (images.long() >> (8 - bits) << (8 - bits)).to(torch.uint8)


def solarize(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Invert the values from the magnitude on."""
    return torch.where(images < magnitudes[:, None, None, None], images, 255 - images)


def invert(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Invert every value."""
    return 255 - images


def auto_contrast(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Stretch each channel from its least and largest value to 0 and 255."""
    least, largest = (values[..., None].double() for values in (images.flatten(2).amin(2), images.flatten(2).amax(2)))
    scale = torch.full_like(least, 255) / (largest - least).clamp(min=1)  # 255 / x would be 255 * (1 / x)
    levels = torch.arange(256, device=images.device)
    stretched = (levels * scale - least * scale).trunc().clamp(0, 255)  # in this order, as Pillow rounds
    return _looked_up(images, torch.where(largest > least, stretched, levels))


def equalize(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Spread the values of each channel so that all are equally frequent, as far as possible."""
    values = images.flatten(2).long()
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts = counts.scatter_add(2, values, torch.ones_like(values))
    of_largest = counts.gather(2, values.amax(dim=2, keepdim=True))
    step = (values.shape[2] - of_largest) // 255
    below = counts.cumsum(dim=2) - counts
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _looked_up(images, torch.where(step > 0, spread, torch.arange(256, device=images.device)))


def _looked_up(images: Tensor, table: Tensor) -> Tensor:
    """Each value replaced by that of its channel's table [B, C, 256]."""
    return table.to(torch.uint8).gather(2, images.flatten(2).long()).view(images.shape)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        identity,
        shear_x,
        shear_y,
        translate_x,
        translate_y,
        rotate,
        brightness,
        color,
        contrast,
        sharpness,
        posterize,
        solarize,
        auto_contrast,
        equalize,
        invert,
    )
}
"""Operations by name: (images, one magnitude per image) -> images."""

_SIGNED = frozenset(list(OPERATIONS)[1:10])  # half of their magnitudes are negative
_NAMES = tuple(OPERATIONS)


class Operation(NamedTuple):
    """An operation that a policy may draw."""

    name: str
    probability: float
    magnitude: float


Choices = Iterator[tuple[Operation, ...]]


def autoaugment(height: int, width: int) -> Choices:
    """The 25 pairs of AutoAugment's policy for CIFAR-10, of which every image gets one."""
    levels = {
        **dict.fromkeys(("shear-x", "shear-y"), torch.linspace(0, 0.3, _LEVELS)),
        "translate-x": torch.linspace(0, 150 / 331 * width, _LEVELS),
        "translate-y": torch.linspace(0, 150 / 331 * height, _LEVELS),
        "rotate": torch.linspace(0, 30, _LEVELS),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), torch.linspace(0, 0.9, _LEVELS)),
        "posterize": 8 - (torch.arange(_LEVELS) / ((_LEVELS - 1) / 4)).round(),
        "solarize": torch.linspace(255, 0, _LEVELS),
    }
    nothing = torch.zeros(_LEVELS)
    for line in _AUTOAUGMENT.strip().splitlines():
        words = (pair.split() for pair in line.split(","))
        yield tuple(
            Operation(name, float(probability), levels.get(name, nothing).tolist()[int(level)])
            for name, probability, level in words
        )


def trivial(height: int, width: int) -> Choices:
    """TrivialAugment (Müller and Hutter, ICCV 2021), the wide space: one operation at one level, all equally likely."""
    levels = {
        "identity": torch.zeros(_WIDE_LEVELS),
        **dict.fromkeys(("shear-x", "shear-y"), torch.linspace(0, 0.99, _WIDE_LEVELS)),
        **dict.fromkeys(("translate-x", "translate-y"), torch.linspace(0, 32, _WIDE_LEVELS)),
        "rotate": torch.linspace(0, 135, _WIDE_LEVELS),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), torch.linspace(0, 0.99, _WIDE_LEVELS)),
        "posterize": 8 - (torch.arange(_WIDE_LEVELS) / ((_WIDE_LEVELS - 1) / 6)).round(),
        "solarize": torch.linspace(255, 0, _WIDE_LEVELS),
        **dict.fromkeys(("auto-contrast", "equalize"), torch.zeros(_WIDE_LEVELS)),
    }
    for name, magnitudes in levels.items():
        for magnitude in magnitudes.tolist():
            yield (Operation(name, 1.0, magnitude),)


POLICIES: dict[str, Callable[[int, int], Choices]] = {"autoaugment": autoaugment, "trivial": trivial}
"""Policies by name: height and width of the images -> what each image gets one of, all equally likely."""


@cache
def _table(policy: str, height: int, width: int, device: torch.device) -> Tensor:
    """The choices of a policy [choices, operations, 4]: number of the operation, probability, magnitude, has a sign.

    It is made once: while a CUDA graph is captured, nothing can be copied to the device.
    """
    choices = choose("policy", policy, POLICIES)(height, width)
    rows = [[(_NAMES.index(one.name), *one[1:], one.name in _SIGNED) for one in operations] for operations in choices]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def draw_operations(
    policy: str, num: int, height: int, width: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw what a policy does to a batch: numbers of operations and their magnitudes, [B, operations] each."""
    table, device = _table(policy, height, width, generator.device), generator.device
    chosen = table[torch.randint(len(table), (num,), generator=generator, device=device)]
    number, probability, magnitude, has_sign = chosen.unbind(2)
    used = torch.rand(number.shape, generator=generator, device=device) < probability
    sign = 2 * torch.randint(2, number.shape, generator=generator, device=device) - 1
    return torch.where(used, number, 0).long(), torch.where(has_sign > 0, sign * magnitude, magnitude)


def operated(images: Tensor, numbers: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply the operations drawn, one after the other."""
    for number, magnitude in zip(numbers.unbind(1), magnitudes.unbind(1), strict=True):
        result = images
        for index, operation in enumerate(OPERATIONS.values()):
            result = torch.where((number == index)[:, None, None, None], operation(images, magnitude), result)
        images = result
    return images


def cut_out(images: Tensor, centres: Tensor, side: int) -> Tensor:
    """Set a square of each image to zero (DeVries and Taylor, 2017); what is beyond the border is cut off.

    The square of image i has its lower right middle at row centres[i, 0] and column centres[i, 1].
    """
    height, width = images.shape[2:]
    row, column = (
        (torch.arange(num, device=images.device) - centres[:, i, None]) for i, num in ((0, height), (1, width))
    )
    half = side // 2
    rows, columns = ((place >= -half) & (place < half) for place in (row, column))
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)
