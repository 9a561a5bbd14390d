"""Transforms: pixel for pixel what Pillow does with the same draws, and the draws spread as they should."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from ccfa.data import CIFAR100_PODNET, FOLDER, Transforms
from ccfa.errors import UsageError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.randint(0, 256, (40, 3, 6, 5), dtype=torch.uint8, generator=seeded(7))


def test_training_images_are_pillows(images):
    draws = CIFAR100_PODNET.draw(len(images), seeded(5))
    for found, image, (top, left), mirrored, factor in zip(
        CIFAR100_PODNET.train(images, seeded(5)), images, *map(torch.Tensor.tolist, draws), strict=True
    ):
        picture = ImageOps.expand(Image.fromarray(image.permute(1, 2, 0).numpy()), border=4, fill=0)
        picture = picture.crop((left, top, left + 5, top + 6))
        picture = ImageOps.mirror(picture) if mirrored else picture
        pixels = np.asarray(ImageEnhance.Brightness(picture).enhance(factor))
        expected = (pixels / 255 - CIFAR100_PODNET.mean) / CIFAR100_PODNET.std
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_draws_are_uniform():
    offsets, flips, factors = Transforms((0.5,), (0.5,), padding=1, flip=True, brightness=0.2).draw(9000, seeded())
    counts = torch.bincount(3 * offsets[:, 0] + offsets[:, 1], minlength=9)
    assert torch.all((counts - 1000).abs() < 150)  # five standard deviations
    assert abs(flips.sum() - 4500) < 240
    assert 0.8 <= factors.min() < 0.801
    assert 1.199 < factors.max() <= 1.2
    assert abs(factors.mean() - 1) < 0.006


def test_test_images_are_normalised_only(images):
    before = images.clone()
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    expected = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    found = Transforms(mean, std, padding=3, flip=True).test(images)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert torch.equal(Transforms(mean, std).train(images, seeded()), found)
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    "options",
    [
        {"mean": (0.5,)},
        {"std": (0.5, 0.0, 0.5)},
        {"mean": (0.5, float("nan"), 0.5)},
        {"padding": -1},
        {"brightness": 1.5},
    ],
)
def test_impossible_transforms_are_refused(options):
    with pytest.raises(UsageError):
        Transforms(**({"mean": (0.5,) * 3, "std": (0.5,) * 3} | options))


def test_wrong_number_of_channels_is_refused(images):
    with pytest.raises(UsageError, match="1 channels"):
        FOLDER.test(images[:, :1])
