"""Predictions and measurements of a model, and models of finished runs."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import ccfa
import imagenet_folder
from ccfa.data import Framing
from ccfa.data.imagenet import find_photos
from ccfa.data.prepared import Preparation
from ccfa.deployment import updating
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


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "P", "I;16"])
def test_images_of_pil_and_files_agree(model, tmp_path, mode):
    random = np.random.default_rng(0)
    shape = {"RGB": (20, 13, 3), "RGBA": (20, 13, 4), "CMYK": (20, 13, 4)}.get(mode, (20, 13))
    values = random.integers(0, 256, shape, np.uint8)
    image = Image.fromarray(values * np.uint16(257)) if mode == "I;16" else Image.fromarray(values)
    image = Image.frombytes(mode, (13, 20), values.tobytes()) if mode in ("CMYK", "P") else image
    path = tmp_path / ("photo.tif" if mode == "CMYK" else "photo.png")
    image.save(path)
    assert image.mode == mode
    assert model.predict(image)[0].top == model.predict(path)[0].top


def test_images_in_memory_are_framed_as_files(model, place, tmp_path):
    upright = Image.open(place / "photos" / "b" / "03.png").resize((24, 18))
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # turn it by 90 degrees to the right
    turned.save(tmp_path / "turned.png", exif=turned.getexif())
    upright.save(tmp_path / "upright.png")
    fixed = np.asarray(upright)
    assert not fixed.flags.writeable
    share = model.predict(tmp_path / "upright.png")[0].confidence
    found = model.predict(image for image in (turned, upright, tmp_path / "turned.png", fixed))
    assert [one.confidence for one in found] == pytest.approx([share] * 4, abs=1e-6)
    assert model.predict(fixed)[0].confidence == pytest.approx(share, abs=1e-6)
    assert model.predict(np.asarray(turned))[0].confidence != pytest.approx(share, abs=1e-6)  # it lies on its side


@pytest.mark.filterwarnings("error")
def test_read_only_pixels_are_copied(model):
    pixels = np.zeros((1, 3, SIZE, SIZE), np.uint8)
    pixels.flags.writeable = False
    assert model.predict(pixels)[0].name in "abc"


@pytest.mark.parametrize(
    "given",
    [5, [5], b"bytes", [np.zeros((9, 9), np.uint8)], np.zeros((9, 9, 3)), [np.zeros((0, 9, 3), np.uint8)], [None]],
)
def test_other_things_are_refused(model, given):
    with pytest.raises(UsageError, match=r"images of PIL"):
        model.predict(given)


def test_learning_stays_on_the_device_of_the_model(model, monkeypatch):
    asked = []
    monkeypatch.setattr(updating, "learn", lambda path, folder, learning, running: asked.append(running.device))
    model.learn("photos")
    assert asked == ["cpu"]


@pytest.mark.gpu
def test_models_on_a_gpu_predict_as_on_the_cpu(tmp_path):
    photos = draw(tmp_path / "photos", "abc", count=20)
    asked = replace(QUICK, method="ranpac", memory=None, options={**QUICK.options, "projection": 50})
    first = ccfa.learn(tmp_path / "model", photos, asked, Running(device="cuda"))
    assert first.config["updates"][-1]["device"].startswith("cuda")
    second = first.learn(draw(tmp_path / "more", "de", count=20))
    for name in "de":
        shutil.move(tmp_path / "more" / name, photos / name)
    assert second.config["updates"][-1]["device"].startswith("cuda")
    models = [ccfa.load_model(tmp_path / "model", device) for device in ("cuda", "cpu")]
    on_gpu, on_cpu = (model.predict(photos) for model in models)
    assert [one.name for one in on_gpu] == [one.name for one in on_cpu]
    assert [one.confidence for one in on_gpu] == pytest.approx([one.confidence for one in on_cpu], abs=0.01)
    assert (models[0].evaluate(photos).confusion == models[1].evaluate(photos).confusion).all()
    made = ccfa.export_model(models[0], tmp_path / "model.pt2", "torch", photos)
    assert made.compared["photo"] == len(on_gpu) == 100
    third = models[1].learn(draw(tmp_path / "third", "f"))
    assert third.config["updates"][-1]["device"] == str(third.device) == "cpu"


def test_damaged_model_names_the_way_back(place, tmp_path, call):
    path = shutil.copytree(place / "model", tmp_path / "model")
    draw(tmp_path / "more", "de")
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError) as alone:
        ccfa.load_model(path)
    assert "undo" not in str(alone.value)
    shutil.rmtree(path)
    shutil.copytree(place / "model", path)
    ccfa.learn(path, tmp_path / "more")
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    for words in (["predict", path, tmp_path], ["history", path], ["learn", path, tmp_path / "more"]):
        code, _, err = call(*words)
        assert (code, f"ccfa undo {path}" in err) == (4, True)
    assert call("undo", path)[0] == 0
    assert ccfa.load_model(path).class_names == ("a", "b", "c")


def test_a_model_of_another_format_is_not_called_damaged(place, tmp_path):
    path = shutil.copytree(place / "model", tmp_path / "model")
    ccfa.learn(path, draw(tmp_path / "more", "de"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"format": 99}))
    with pytest.raises(ModelError, match="99") as found:
        ccfa.load_model(path)
    assert "undo" not in str(found.value)
    assert "damaged" not in str(found.value)


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
    found = [update["accuracy"] for update in model.config["updates"]]
    assert found == pytest.approx(report.rules["nearest_mean"].overall, abs=0.01)  # but the mean over classes
    shown = run.read_predictions(1)
    right = shown["by_nearest_mean"] == shown["labels"]
    assert found[1] == pytest.approx(np.mean([right[shown["labels"] == one].mean() for one in range(10)]))
    assert found[1] != pytest.approx(right.mean(), abs=1e-9)
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


def test_photos_of_a_run_are_known_to_its_model(tmp_path):
    photos = draw(tmp_path / "photos", "abc")
    options = {"backbone": "small", "epochs": 1, "projection": 20}
    experiment = ccfa.Experiment("ranpac", data=str(photos), scenario="3", image_size=SIZE, options=options)
    path = model_of_run(ccfa.run(experiment, tmp_path / "run", Running(device="cpu")).path, tmp_path / "model").path
    with pytest.raises(UsageError, match="learned before"):
        ccfa.learn(path, photos, ccfa.Learning(more=True))
    draw(tmp_path / "photos", "d")
    assert ccfa.learn(path, photos).class_names == ("a", "b", "c", "d")
