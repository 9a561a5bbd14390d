"""Training on streamed images is bit-identical to training on the same images in memory."""

import os
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from ccfa.data import ImageSet, Streamed, Transforms
from ccfa.learning import Learner
from ccfa.learning import acceleration as module
from ccfa.learning.acceleration import Acceleration, images_on
from toys import STAGES, Recorder, plugged, rows_of, tiny, toy_images

WINDOWS = Transforms((0.5,) * 3, (0.25,) * 3, flip=True, brightness=0.2, scale=(0.08, 1.0), centre=0.75)


@pytest.fixture
def streamed(tmp_path):
    """A set of the same images in a file."""

    def stream(images):
        path, pixels = tmp_path / f"{len(os.listdir(tmp_path))}.pixels", images.images.numpy()
        path.write_bytes(pixels.tobytes())
        source = Streamed(path, images.shape, np.array([zlib.crc32(image) for image in pixels]))
        return ImageSet(source, images.labels, images.class_names)

    return stream


# afc reads all images once more after a stage, bic holds some out, icarl predicts by class means of mirrored images.
@pytest.mark.parametrize("name", ["podnet", "afc", "icarl", "bic", "fetril"])
def test_streaming_changes_no_bit(streamed, name):
    train, test = toy_images(), toy_images(seed=1, per_class=5)
    results = []
    for change in (lambda images: images, streamed):
        recorder = Recorder()
        method = plugged(tiny(name, epochs=1), "nothing" if name in ("icarl", "bic") else "ccfa")
        learner = Learner(method, change(train), observer=recorder, device="cpu")
        accuracies = []
        for stage in STAGES[:2]:
            learner.learn(stage)
            accuracies.append(learner.evaluate(change(test)))
        results.append((recorder.batches, accuracies, rows_of(learner.memory.classes), learner.network.state_dict()))
    (losses, accuracies, memory, weights), (others, *rest, other_weights) = results
    assert others == losses
    assert rest == [accuracies, memory]
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)


def test_embedding_reads_ahead(streamed, monkeypatch):
    def waits(images, rows):
        raise AssertionError("the network waits for the file")

    monkeypatch.setattr(Streamed, "__getitem__", waits)
    rows, train = torch.tensor([5, 0, 71]), toy_images()
    found = Learner(tiny("podnet"), streamed(train), device="cpu").embeddings(rows, flip=True)
    assert torch.equal(found, Learner(tiny("podnet"), train, device="cpu").embeddings(rows, flip=True))


def test_training_sees_windows_and_evaluation_centres(streamed):
    learner = Learner(replace(tiny("podnet", epochs=1), transforms=WINDOWS), streamed(toy_images()), device="cpu")
    learner.learn(STAGES[0])
    test = toy_images(seed=1, per_class=5)
    assert torch.equal(learner.predict(test.images), learner.predict(streamed(test).images))


def test_what_fits_becomes_resident(streamed, monkeypatch):
    asked = []
    images = streamed(toy_images())
    monkeypatch.setattr(ImageSet, "to", lambda self, device, resident=False: asked.append(resident))
    for free in (2 * 72 * 192, 2 * 72 * 192 - 1):
        monkeypatch.setattr(module.torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        images_on(torch.device("cuda"), images)
    images_on(torch.device("cpu"), images)
    assert asked == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_streaming_on_a_gpu(streamed, monkeypatch, share):
    """A captured step learns from streamed images what it learns from images in the device's memory.

    In float32: training amplifies the rounding of bf16, which differs from run to run on a GPU.
    """
    monkeypatch.setattr(module, "RESIDENT_SHARE", share)
    results, test = [], toy_images(seed=1, per_class=5)
    for change in (lambda images: images, streamed):
        recorder = Recorder()
        how = {"device": "cuda", "acceleration": Acceleration(graph=True)}
        learner = Learner(tiny("podnet", epochs=2), change(toy_images()), observer=recorder, **how)
        for stage in STAGES[:2]:
            learner.learn(stage)
        results.append([losses["loss"] for _, losses in recorder.batches])
        assert isinstance(learner.train.images, Streamed) == (change is streamed and share == 0)
        assert torch.equal(learner.predict(change(test).images), learner.predict(test.images))
    np.testing.assert_allclose(results[1][:5], results[0][:5], rtol=1e-3)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-2)
