"""Transforms: pixel for pixel what Pillow does with the same draws, and the draws spread as they should."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from ccfa.data import CIFAR100_PODNET, CIFAR100_UCIR, FOLDER, Transforms, transforms
from ccfa.errors import UsageError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def only(**options):
    """One transform alone, of grey images."""
    return Transforms((0.0,), (1.0,), **options)


@pytest.fixture
def images():
    return torch.randint(0, 256, (40, 3, 6, 5), dtype=torch.uint8, generator=seeded(7))


def pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_crop_is_pillows_window(images):
    offsets = torch.randint(0, 5, (40, 2), generator=seeded())
    result = transforms.crop(images, 2, offsets)
    for image, (top, left), found in zip(images, offsets.tolist(), result, strict=True):
        padded = ImageOps.expand(pillow(image), border=2, fill=0)
        assert torch.equal(found, from_pillow(padded.crop((left, top, left + 5, top + 6))))


def test_flip_is_pillows_mirror(images):
    chosen = torch.arange(40) % 3 == 0
    for image, mirrored, found in zip(images, chosen, transforms.flip(images, chosen), strict=True):
        expected = from_pillow(ImageOps.mirror(pillow(image))) if mirrored else image
        assert torch.equal(found, expected)


def test_brightness_is_pillows():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(200, 3, 16, 16)
    factors = torch.cat([torch.tensor([0.0, 1.0, 2.0]), 2 * torch.rand(197, generator=seeded())])
    for image, factor, found in zip(every, factors, transforms.brighten(every, factors), strict=True):
        expected = ImageEnhance.Brightness(pillow(image)).enhance(float(factor))
        assert torch.equal(found, from_pillow(expected))


def test_random_crop_draws_every_offset_equally():
    marked = torch.zeros(9000, 1, 3, 3, dtype=torch.uint8)
    marked[:, :, 1, 1] = 255
    place = only(padding=1).train(marked, seeded()).flatten(1).argmax(1)
    counts = torch.bincount(place, minlength=9)
    assert counts.sum() == 9000
    assert torch.all((counts - 1000).abs() < 150)  # five standard deviations


def test_random_flip_rate():
    wide = torch.tensor([0, 255], dtype=torch.uint8).expand(4000, 1, 1, 2)
    flipped = (only(flip=True).train(wide, seeded())[:, 0, 0, 0] == 1).sum()
    assert 1840 < flipped < 2160


def test_jitter_factors_fill_their_range():
    grey = torch.full((4000, 1, 1, 1), 200, dtype=torch.uint8)
    values = 255 * only(brightness=0.2).train(grey, seeded()).flatten()
    assert 160 <= values.min() < 162
    assert 237 < values.max() <= 240
    assert abs(values.mean() - 199.5) < 2


def test_images_of_a_batch_are_drawn_apart(images):
    same = images[:1].expand(40, -1, -1, -1)
    result = Transforms((0, 0, 0), (1, 1, 1), padding=2, flip=True, brightness=0.2).train(same, seeded())
    assert len(torch.unique(result, dim=0)) > 35


def test_normalise_against_numpy(images):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    expected = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    found = transforms.normalise(images, mean, std)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert torch.equal(Transforms(mean, std, padding=3, flip=True).test(images), found)


def test_train_is_the_steps_in_order(images):
    recipe = CIFAR100_PODNET
    draws = recipe.draw(len(images), seeded(5))
    expected = transforms.brighten(
        transforms.flip(transforms.crop(images, 4, draws.offsets), draws.flips), draws.factors
    )
    expected = transforms.normalise(expected, recipe.mean, recipe.std)
    assert torch.equal(recipe.train(images, seeded(5)), expected)
    plain = Transforms(recipe.mean, recipe.std)
    assert torch.equal(plain.train(images, seeded()), plain.test(images))


def test_images_are_left_as_they_were(images):
    before = images.clone()
    FOLDER.train(images, seeded())
    CIFAR100_UCIR.test(images)
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mean": (0.5,)}, "as many means as stds"),
        ({"std": (0.5, 0.0, 0.5)}, "stds above 0"),
        ({"mean": (0.5, float("nan"), 0.5)}, "finite means"),
        ({"padding": -1}, "padding"),
        ({"brightness": 1.5}, "brightness"),
    ],
)
def test_impossible_transforms_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Transforms(**({"mean": (0.5,) * 3, "std": (0.5,) * 3} | options))


def test_wrong_number_of_channels_is_refused(images):
    with pytest.raises(UsageError, match="Images have 1 channels"):
        FOLDER.test(images[:, :1])
