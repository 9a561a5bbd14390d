"""The drawn glyphs: complete, the same each time, different in training and test, and not without FreeType."""

import doctest

import numpy as np
import pytest
import torch
from PIL import features

from ccfa.data import glyphs as module
from ccfa.data import load
from ccfa.data.glyphs import CHARACTERS, GLYPHS, load_glyphs
from ccfa.errors import ResourceError


@pytest.fixture(scope="module")
def glyphs():
    return load_glyphs()


def test_every_class_is_complete(glyphs):
    train, test = glyphs
    assert train.class_names == test.class_names == tuple(CHARACTERS)
    assert train.shape == test.shape == (1, 12, 12)
    assert torch.bincount(train.labels).unique().tolist() == [60]
    assert torch.bincount(test.labels).unique().tolist() == [50]


def test_drawing_again_gives_equal_images(glyphs):
    again = load_glyphs.__wrapped__()
    for first, second in zip(glyphs, again, strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)


def test_drawn_once_per_process(glyphs):
    assert load("glyphs")[0] is glyphs[0]


def test_no_image_occurs_twice(glyphs):
    images = torch.cat([part.images for part in glyphs]).flatten(1)
    assert len(images.unique(dim=0)) == len(images)


def test_class_means_recognise_test_images(glyphs):
    train, test = (part.images.flatten(1).float() for part in glyphs)
    means = torch.stack([train[glyphs[0].labels == label].mean(0) for label in range(len(CHARACTERS))])
    right = torch.cdist(test, means).argmin(1) == glyphs[1].labels
    assert right.float().mean() > 5 / len(CHARACTERS)  # chance is 1 in 36; seen 0.24


def test_transforms_have_training_statistics(glyphs):
    pixels = glyphs[0].images.numpy() / 255
    np.testing.assert_allclose(GLYPHS.mean, [pixels.mean()], atol=0.01)
    np.testing.assert_allclose(GLYPHS.std, [pixels.std()], atol=0.01)


def test_without_freetype_is_refused(monkeypatch):
    monkeypatch.setattr(features, "check", lambda name: name != "freetype2")
    with pytest.raises(ResourceError, match="FreeType"):
        load_glyphs.__wrapped__()


def test_docstring_examples_hold():
    assert doctest.testmod(module) == (0, 2)
