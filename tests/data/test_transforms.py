"""Transforms: pixel for pixel what Pillow does with the same draws, and the draws spread as they should."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from ccfa.data import CIFAR100_PODNET, FOLDER, IMAGENET, Transforms
from ccfa.data.transforms import draw_boxes, resized_crop
from ccfa.errors import UsageError
from timm_models import torchvision_or_skip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.randint(0, 256, (40, 3, 6, 5), dtype=torch.uint8, generator=seeded(7))


def test_training_images_are_pillows(images):
    draws, strength = CIFAR100_PODNET.draw(len(images), seeded(5)), CIFAR100_PODNET.brightness
    for found, image, (top, left), flip, brightness in zip(
        CIFAR100_PODNET.train(images, seeded(5)), images, *map(torch.Tensor.tolist, draws[:3]), strict=True
    ):
        picture = ImageOps.expand(Image.fromarray(image.permute(1, 2, 0).numpy()), border=4, fill=0)
        picture = picture.crop((left, top, left + 5, top + 6))
        picture = ImageOps.mirror(picture) if flip < 0.5 else picture
        pixels = np.asarray(ImageEnhance.Brightness(picture).enhance(1 + strength * (2 * brightness - 1)))
        expected = (pixels / 255 - CIFAR100_PODNET.mean) / CIFAR100_PODNET.std
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_draws_are_uniform():
    transforms = Transforms((0.5,), (0.5,), padding=1, flip=True, brightness=0.2, cutout=2)
    offsets, *uniform, _, _, centres = transforms.draw(9000, seeded(), 3, 5)
    counts = torch.bincount(3 * offsets[:, 0] + offsets[:, 1], minlength=9)
    assert torch.all((counts - 1000).abs() < 150)  # five standard deviations
    for drawn in uniform:  # flips and brightness
        assert 0 <= drawn.min() < 0.003
        assert 0.997 < drawn.max() < 1
        assert abs(drawn.mean() - 0.5) < 0.015
        assert abs((drawn < 0.5).sum() - 4500) < 240
    counts = torch.bincount(5 * centres[:, 0] + centres[:, 1], minlength=15)
    assert torch.all((counts - 600).abs() < 120)


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
        {"scale": (0.0, 1.0)},
        {"scale": (0.5, 0.4)},
        {"scale": (0.5, 1.0), "padding": 1},
        {"scale": (0.5, 1.0), "centre": 0.0},
        {"centre": 0.5},
        {"policy": "autoaugmnt"},
        {"cutout": -1},
    ],
)
def test_impossible_transforms_are_refused(options):
    with pytest.raises(UsageError):
        Transforms(**({"mean": (0.5,) * 3, "std": (0.5,) * 3} | options))


@pytest.mark.parametrize(("options", "largest"), [({}, 5), ({"scale": (0.5, 1.0), "centre": 0.5}, 3)])
def test_a_square_must_leave_something_of_images(options, largest):
    def transforms(side):
        return Transforms((0.5,), (0.5,), cutout=side, **options)

    transforms(largest).require_room(8 if options else 6, 8)
    for side in (largest + 1, 100):
        with pytest.raises(UsageError, match=f"below {largest + 1}"):
            transforms(side).require_room(8 if options else 6, 8)


def test_wrong_number_of_channels_is_refused(images):
    with pytest.raises(UsageError, match="1 channels"):
        FOLDER.test(images[:, :1])


def torchvision_boxes(num, height, width, scale):
    """Boxes that torchvision draws: top, left, height, width."""
    crop = torchvision_or_skip().transforms.RandomResizedCrop
    image, ratio = torch.empty(1, height, width), (3 / 4, 4 / 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return np.array([crop.get_params(image, list(scale), list(ratio)) for _ in range(num)])


@pytest.mark.parametrize(("side", "scale"), [(256, (0.08, 1.0)), (24, (0.9, 1.0))])
def test_boxes_are_torchvisions(side, scale):
    """Every quantile of every edge, and the share of whole images, to five standard deviations."""
    num = 8000
    ours = draw_boxes(num, side, scale, seeded(3)).numpy()
    theirs = torchvision_boxes(num, side, side, scale)
    top, left, height, width = ours.T
    assert min(top.min(), left.min(), height.min() - 1, width.min() - 1) >= 0
    assert max((top + height).max(), (left + width).max()) <= side
    derived = [np.c_[boxes, boxes[:, 0] + boxes[:, 2], boxes[:, 2] * boxes[:, 3]] for boxes in (ours, theirs)]
    for one, other in zip(*(table.T for table in derived), strict=True):
        below = [np.searchsorted(np.sort(values), np.unique(other), "right") / num for values in (one, other)]
        assert np.abs(below[0] - below[1]).max() < 5 * np.sqrt(0.5 / num)
    whole = [(boxes[:, 2:] == side).all(axis=1).mean() for boxes in (ours, theirs)]
    assert abs(whole[0] - whole[1]) < 5 * np.sqrt(0.5 / num)


def test_resized_windows_are_pillows():
    noise = torch.randint(0, 256, (30, 3, 40, 40), dtype=torch.uint8, generator=seeded(7))
    boxes = draw_boxes(30, 40, (0.08, 1.0), seeded(8))
    found = resized_crop(noise, boxes, 35).permute(0, 2, 3, 1).numpy().astype(int)
    for one, image, (top, left, height, width) in zip(found, noise, boxes.tolist(), strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        expected = np.asarray(picture.resize((35, 35), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(one - expected).max() <= 1  # Pillow rounds twice
        assert np.abs(one - expected).mean() < 0.25
    whole = torch.tensor([[0, 0, 40, 40]]).expand(30, 4)
    assert torch.equal(resized_crop(noise, whole, 40), noise)


def test_photos_are_trained_on_windows_and_tested_on_centres():
    photos = torch.randint(0, 256, (5, 3, 256, 256), dtype=torch.uint8, generator=seeded(7))
    assert IMAGENET.train(photos, seeded()).shape == (5, 3, 224, 224)
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (IMAGENET.mean, IMAGENET.std))
    expected = (photos.numpy()[:, :, 16:240, 16:240] / 255 - mean) / std
    np.testing.assert_allclose(IMAGENET.test(photos).numpy(), expected, atol=1e-5)


def test_share_of_windows_that_square_photos_change():
    """What docs/imagenet.md says of a photo of 500 x 375 pixels, of which the centre square is kept."""
    boxes = torchvision_boxes(8000, 375, 500, (0.08, 1.0))
    left, right = boxes[:, 1], boxes[:, 1] + boxes[:, 3]
    inside = (left >= 62) & (right <= 438)
    covered = (np.minimum(right, 438) - np.maximum(left, 62)).clip(0) / (right - left)
    assert inside.mean() == pytest.approx(0.38, abs=0.03)
    assert covered.mean() == pytest.approx(0.924, abs=0.01)
