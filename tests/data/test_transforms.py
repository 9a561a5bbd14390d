"""Transforms: pixel for pixel what Pillow does with the same draws, and the draws spread as they should."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from ccfa.data import CIFAR100_PODNET, FOLDER, Transforms, transforms
from ccfa.errors import UsageError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def only(**options):
    """One transform alone, of grey images."""
    return Transforms((0.0,), (1.0,), **options)


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


def test_brightness_of_every_value_is_pillows():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(100, 1, 16, 16)
    factors = torch.cat([torch.tensor([0.0, 1.0, 2.0]), 2 * torch.rand(97, generator=seeded())])
    for image, factor, found in zip(every, factors, transforms.brighten(every, factors), strict=True):
        expected = ImageEnhance.Brightness(Image.fromarray(image[0].numpy())).enhance(float(factor))
        np.testing.assert_array_equal(found[0].numpy(), np.asarray(expected))


def test_crops_draw_every_offset_equally():
    marked = torch.zeros(9000, 1, 3, 3, dtype=torch.uint8)
    marked[:, :, 1, 1] = 255
    counts = torch.bincount(only(padding=1).train(marked, seeded()).flatten(1).argmax(1), minlength=9)
    assert torch.all((counts - 1000).abs() < 150)  # five standard deviations


def test_half_of_the_images_are_flipped():
    wide = torch.tensor([0, 255], dtype=torch.uint8).expand(4000, 1, 1, 2)
    assert 1840 < (only(flip=True).train(wide, seeded())[:, 0, 0, 0] == 1).sum() < 2160


def test_brightness_fills_its_range():
    grey = torch.full((4000, 1, 1, 1), 200, dtype=torch.uint8)
    values = 255 * only(brightness=0.2).train(grey, seeded()).flatten()
    assert 160 <= values.min() < 162
    assert 237 < values.max() <= 240
    assert abs(values.mean() - 199.5) < 2


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
        {"mean": (), "std": ()},
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
