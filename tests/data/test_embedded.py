"""The data sets that need no download: complete, the same each time, with transforms of their own statistics."""

import numpy as np
import pytest
import torch
from PIL import features
from sklearn.datasets import load_digits

from ccfa.data import DIGITS, GLYPHS, load, load_digits_images, load_glyphs
from ccfa.errors import ResourceError


def test_every_digit_is_in_one_part():
    source, (train, test) = load_digits(), load_digits_images()
    expected = np.column_stack([source.target, np.rint(source.data * 255 / 16)])
    found = torch.cat([torch.column_stack([part.labels, part.images.flatten(1)]) for part in (train, test)])
    assert sorted(found.tolist()) == sorted(expected.tolist())
    assert test.labels.bincount().tolist() == [44, 46, 44, 46, 45, 46, 45, 45, 44, 45]


def test_glyphs_are_complete_and_different():
    train, test = load_glyphs()
    assert "".join(train.class_names) == "".join(test.class_names) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    assert (train.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([60] * 36, [50] * 36)
    images = torch.cat([train.images, test.images]).flatten(1).float()
    assert images.shape == (3960, 12 * 12)
    assert len(images.unique(dim=0)) == len(images)
    means = torch.stack([images[:2160][train.labels == label].mean(0) for label in range(36)])
    right = torch.cdist(images[2160:], means).argmin(1) == test.labels
    assert right.float().mean() > 5 / 36  # chance is 1 in 36; seen 0.24


def test_loading_again_gives_equal_images():
    for first, second in [(load_digits_images(), load_digits_images()), (load_glyphs(), load_glyphs.__wrapped__())]:
        assert [part.fingerprint for part in first] == [part.fingerprint for part in second]
    assert load("glyphs")[0] is load_glyphs()[0], "drawn once per process"


@pytest.mark.parametrize(("name", "transforms", "atol"), [("digits", DIGITS, 5e-5), ("glyphs", GLYPHS, 0.01)])
def test_transforms_have_training_statistics(name, transforms, atol):
    pixels = load(name)[0].images.numpy() / 255
    np.testing.assert_allclose([*transforms.mean, *transforms.std], [pixels.mean(), pixels.std()], atol=atol)


def test_glyphs_need_freetype(monkeypatch):
    monkeypatch.setattr(features, "check", lambda name: name != "freetype2")
    with pytest.raises(ResourceError, match="FreeType"):
        load_glyphs.__wrapped__()
