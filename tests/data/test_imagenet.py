"""ImageNet: its lists of classes, the layout, the published settings, and a run from photos to a report."""

import json
import re
from pathlib import Path

import pytest

from ccfa.data import IMAGENET, Stage, class_list, class_order, data_set, described_list, find_photos, load
from ccfa.errors import DataError, UsageError
from ccfa.experiments.experiment import build_method, experiment_method
from ccfa.models import BACKBONES
from ccfa.settings import Experiment
from imagenet_folder import SIZE, WNIDS, write_photos

LATER = Stage(1, 50, 60)


@pytest.fixture
def photos(tmp_path):
    """A folder of photos, and the name of its data set."""
    return tmp_path / "photos", f"imagenet:{write_photos(tmp_path / 'photos')}"


def test_lists_are_named_and_hashed():
    hundred, thousand = class_list("imagenet100"), class_list("imagenet1000")
    assert (hundred.wnids[0], hundred.wnids[-1], len(thousand.wnids)) == ("n01440764", "n01855672", 1000)
    assert thousand.wnids[:100] == hundred.wnids
    assert list(thousand.wnids) == sorted(thousand.wnids)
    assert hundred.sha256 == "e685f52fed1378fd4f7c3edbc80cf62403ad8fef69c03faef471d8a42c5289df"
    moved = described_list("anything", hundred.wnids[::-1])
    assert moved == {"name": "anything", "sha256": hundred.sha256}
    assert described_list("anything", hundred.wnids)["name"] == "imagenet100"
    assert described_list("digits", ["0", "1"]) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tench\n", "'tench'"),
        ("n01440764\nn01440764\n", "each once"),
        ("# nothing\n\n", "at least one"),
        (None, "cannot"),
    ],
)
def test_wrong_lists_are_refused(tmp_path, text, named):
    path = tmp_path / "list.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=named):
        class_list(f"imagenet:{path}")


def test_photos_are_found_by_the_list(photos):
    folder, data = photos
    source = find_photos(data, folder)
    assert source.class_names == WNIDS
    assert source.files["train"][6] == f"train/{WNIDS[1]}/{WNIDS[1]}_0.JPEG"
    assert source.labels["test"] == [label for label in range(10) for _ in range(2)]
    with pytest.raises(DataError, match=r"train/n01530575.*and 80 more"):
        find_photos("imagenet100", folder)
    for photo in (folder / "val" / WNIDS[3]).iterdir():
        photo.unlink()
    with pytest.raises(DataError, match=f"val/{WNIDS[3]}"):
        find_photos(data, folder)


def test_missing_data_say_what_to_do(photos, monkeypatch):
    folder, data = photos
    monkeypatch.delenv("CCFA_DATA", raising=False)
    for name in (data, "imagenet100"):
        assert data_set(name).find(folder) is None
        with pytest.raises(DataError, match=f"ccfa prepare {name}"):
            load(name, folder)
    with pytest.raises(UsageError, match="--data-dir"):
        find_photos(data)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("podnet", (64, 0.05, 5e-4, 0.01)),
        ("aanet", (64, 0.05, 5e-4, 0.01)),
        ("afc", (128, 0.1, 1e-4, 0.02)),
        ("ucir", (128, 0.1, 1e-4, None)),
    ],
)
def test_settings_are_the_published_ones(method, expected):
    built = build_method(method, "imagenet100")
    main, *balanced = built.phases(LATER)
    found = main.batch_size, main.lr, main.weight_decay, balanced[0].lr if balanced else None
    assert (found, main.epochs) == (expected, 90)
    assert built.backbone == BACKBONES["resnet18-ucir" if method == "ucir" else "resnet18-podnet"]
    assert built.transforms.brightness == (0 if method == "ucir" else IMAGENET.brightness)
    large = build_method(method, "imagenet1000").phases(LATER)
    assert large[0].weight_decay == 1e-4
    assert len(large) == 2, "UCIR has a balanced phase on ImageNet-1000 only"


def test_the_options_of_the_papers_text_are_accepted(call, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/imagenet.md").read_text()
    (options,) = re.findall("as the paper's text has it, add `(--set .*)`", page)
    asked = []
    monkeypatch.setattr("ccfa.reporting.showing.run", lambda experiment, *others, **named: asked.append(experiment))
    code, _, errors = call("run", "podnet", "--ccfa", "--data", "imagenet100", *options.split())
    assert code == 0, errors
    main, balanced = experiment_method(asked[0]).phases(LATER)
    assert (main.batch_size, main.lr, balanced.batch_size, balanced.lr) == (128, 0.1, 128, 0.02)


def test_ccfa_makes_one_feature_per_image():
    method = experiment_method(Experiment("podnet", ccfa=True, data="imagenet1000"))
    (plug_in,) = method.feature_augmentations
    assert plug_in.count == 1
    assert plug_in.step_size_for(512) == pytest.approx((2 / 2040, 5 / 2040))


def test_from_photos_to_a_report(photos, call, tmp_path):
    folder, data = photos
    code, output, _ = call("prepare", data, "--data-dir", folder, "--image-size", SIZE, "--dry-run")
    assert (code, (folder / "prepared-ten").exists()) == (0, False)
    assert "60 train images" in output
    assert "80 train images" not in output
    for words in ([], ["--verify"]):
        code, output, errors = call("prepare", data, "--data-dir", folder, "--image-size", SIZE, *words)
        assert code == 0, errors
    assert "0 were damaged" in output
    options = ["--set", "epochs=1", "balanced_epochs=1", "batch_size=8", "memory=2", "backbone=small"]
    words = ["run", "podnet", "--ccfa", "--data", data, "--scenario", "6,4", "--device", "cpu", *options]
    code, _, errors = call(*words, "--data-dir", folder, "--out", "run")
    assert code == 0, errors
    config = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]
    assert config["class_list"] == described_list(data, WNIDS)
    assert config["class_order"] == list(class_order("seed-1993", 10, data))
    assert (config["num_training_images"], config["num_test_images"]) == (60, 20)
    # The prepared folder itself can be named, and the experiment is the same.
    code, _, errors = call(*words, "--data-dir", folder / "prepared-ten", "--out", "run", "--reuse")
    assert code == 0, errors
    code, _, errors = call("run", "podnet", "--data", "imagenet100", "--data-dir", folder / "prepared-ten")
    assert code == 3
    assert "other classes" in errors
