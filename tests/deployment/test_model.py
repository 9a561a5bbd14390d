"""Predictions and measurements of a model, and models of finished runs."""

import shutil

import numpy as np
import pytest
import torch

import ccfa
import imagenet_folder
from ccfa.data import Framing
from ccfa.data.imagenet import find_photos
from ccfa.data.prepared import Preparation
from ccfa.deployment.runs import model_of_run
from ccfa.errors import DataError, ModelError, UsageError
from ccfa.settings import Running
from pictures import QUICK, SIZE, draw


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    ccfa.learn(place / "model", draw(place / "photos", "abc", count=20), QUICK)
    return place


@pytest.fixture
def model(place):
    return ccfa.load_model(place / "model", "cpu")


def test_photos_are_recognised(model, place):
    found = model.evaluate(place / "photos")
    assert found.accuracy > 0.9
    assert found.by_class()["a"][0] == 20
    assert found.confusion.sum() == 60


def test_predictions_name_their_files(model, place):
    found = model.predict(place / "photos", top=2)
    assert [one.path.parent.name for one in found[:2]] == ["a", "a"]
    assert all(len(one.top) == 2 and one.top[0] == (one.name, one.confidence) for one in found)
    assert all(0 <= one.confidence <= 1 for one in found)


def test_unreadable_file_does_not_stop_the_rest(model, place, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    good = place / "photos" / "a" / "00.png"
    found = model.predict([bad, good, tmp_path / "missing.png"])
    assert [bool(one.error) for one in found] == [True, False, True]
    assert (found[0].name, found[1].path) == ("", good)


def test_pixels_and_files_agree(model, place):
    path = place / "photos" / "b" / "03.png"
    pixels = ccfa.data.decode_image(path, model.framing)[None]
    assert model.predict(pixels)[0].top == model.predict(path)[0].top
    assert model.predict(torch.from_numpy(pixels))[0].top == model.predict(path)[0].top


@pytest.mark.parametrize("pixels", [np.zeros((1, 3, 9, 9), np.uint8), np.zeros((1, 3, SIZE, SIZE), np.float32)])
def test_wrong_pixels_are_refused(model, pixels):
    with pytest.raises(UsageError, match="uint8"):
        model.predict(pixels)


def test_few_known_photos_are_flagged(model, place):
    assert np.mean([one.unfamiliar for one in model.predict(place / "photos")]) <= 0.2


def test_unknown_classes_are_counted_apart(model, place, tmp_path):
    shutil.copytree(place / "photos", tmp_path / "more")
    draw(tmp_path / "more", "z", count=4)
    found = model.evaluate(tmp_path / "more")
    assert (found.images, len(found.unknown)) == (60, 4)
    with pytest.raises(DataError, match="known to the model"):
        model.evaluate(draw(tmp_path / "other", "yz"))


def test_wrong_photos_are_listed(model, place, tmp_path):
    folder = shutil.copytree(place / "photos", tmp_path / "wrong")
    shutil.move(folder / "a" / "00.png", folder / "b" / "moved.png")
    found = model.evaluate(folder)
    assert ("b", folder / "b" / "moved.png") in [(truth, one.path) for truth, one in found.wrong]


def test_forged_config_is_refused(place, tmp_path):
    path = shutil.copytree(place / "model", tmp_path / "model")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"a"', '"x"', 1))
    with pytest.raises(ModelError, match="digest"):
        ccfa.load_model(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    experiment = ccfa.Experiment("icarl", scenario="6,4", options={"epochs": 3})
    return ccfa.run(experiment, place / "run", Running(device="cpu"))


def test_run_becomes_a_model(run, tmp_path):
    model = model_of_run(run.path, tmp_path / "model")
    report = run.report()
    assert model.class_names == tuple(map(str, range(10)))
    assert model.config["updates"][-1]["accuracy"] == report.rules["nearest_mean"].overall[-1]
    test = ccfa.load("digits")[1]
    predicted = [int(one.name) for one in model.predict(test.images)]
    assert np.mean(np.array(predicted) == test.labels.numpy()) == report.rules["nearest_mean"].overall[-1]
    with pytest.raises(UsageError, match="already"):
        model_of_run(run.path, tmp_path / "model")


def test_run_on_listed_classes_becomes_a_model_with_its_transforms(tmp_path):
    data, running = f"imagenet:{imagenet_folder.write_photos(tmp_path)}", Running(device="cpu", data_dir=tmp_path)
    Preparation(find_photos(data, tmp_path), tmp_path / "prepared-ten", imagenet_folder.SIZE).run()
    experiment = ccfa.Experiment("finetune", data=data, scenario="10", options={"epochs": 0, "backbone": "small"})
    model = model_of_run(ccfa.run(experiment, tmp_path / "run", running).path, tmp_path / "model", running)
    assert model.framing == Framing(imagenet_folder.SIZE)
    assert model.method.transforms.centre == model.classifier.transforms.centre == 224 / 256
    assert str(tmp_path) not in str(model.config)


def test_run_becomes_a_model_that_learns_more(run, tmp_path):
    path = model_of_run(run.path, tmp_path / "model").path
    draw(tmp_path / "photos", "xy", count=6)
    model = ccfa.learn(path, tmp_path / "photos")
    assert model.class_names[-2:] == ("x", "y")
    assert model.channels == 1
    assert model.predict(tmp_path / "photos" / "x")[0].path.name == "00.png"
