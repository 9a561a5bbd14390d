"""The embedded digits: complete, scaled, split once and for all."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from ccfa.data.digits import DIGITS, load_digits_images


def test_every_digit_is_in_exactly_one_part():
    train, test = load_digits_images()
    source = load_digits()
    expected = sorted(
        (int(label), tuple(int(value * 255 / 16 + 0.5) for value in image.flatten()))
        for image, label in zip(source.images, source.target, strict=True)
    )
    found = sorted(
        (label, tuple(image.flatten().tolist()))
        for part in (train, test)
        for image, label in zip(part.images, part.labels.tolist(), strict=True)
    )
    assert found == expected
    assert train.shape == (1, 8, 8)


def test_split_is_stratified_and_always_the_same():
    train, test = load_digits_images()
    counts = torch.bincount(train.labels) + torch.bincount(test.labels)
    assert torch.all((torch.bincount(test.labels) / counts - 0.25).abs() < 0.01)
    again = load_digits_images()
    assert torch.equal(train.images, again[0].images)
    assert torch.equal(test.labels, again[1].labels)


def test_transforms_have_the_training_statistics():
    pixels = load_digits_images()[0].images.numpy() / 255
    np.testing.assert_allclose(DIGITS.mean, [pixels.mean()], atol=5e-5)
    np.testing.assert_allclose(DIGITS.std, [pixels.std()], atol=5e-5)
