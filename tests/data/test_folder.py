"""Image folders: both layouts, every kind of file, and the ways in which people's folders differ from them."""

import os
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ccfa.data.decoding import Framing, decode_image
from ccfa.data.folder import load_folder
from ccfa.errors import DataError, Notice, UsageError
from ccfa.experiments import Experiment, resolve
from toy_runs import toy_run
from zoo import SIDE, bad_files, encoded, good_files, write_class, write_noise


@pytest.fixture
def photos(tmp_path):
    """A folder of three classes with five images each; one is named like a part."""
    for seed, name in enumerate(("train", "bee", "ant")):
        write_noise(tmp_path / "photos" / name, 5, seed)
    return tmp_path / "photos"


def load(root, **options):
    """The train and the test set, and the notices given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        train, test = load_folder(root, image_size=8, **options)
    return train, test, [str(warning.message) for warning in caught]


def test_without_test_part_some_are_held_out(photos):
    train, test, notices = load(photos, skip_bad=True)
    assert train.class_names == test.class_names == ("ant", "bee", "train")
    assert (train.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([4] * 3, [1] * 3)
    images, labels = torch.cat([train.images, test.images]).numpy(), [*train.labels, *test.labels]
    found = {(image.tobytes(), train.class_names[label]) for image, label in zip(images, labels, strict=True)}
    assert found == {(decode_image(path, Framing(8)).tobytes(), path.parent.name) for path in photos.glob("*/*")}
    assert notices == []


@pytest.mark.parametrize("part", ["test", "val"])
def test_test_part_is_used(part, tmp_path):
    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / "train" / name, 3, seed)
        write_noise(tmp_path / part / name, 2, seed + 10)
    train, test, _ = load(tmp_path)
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])


def test_hidden_files_and_links(photos, tmp_path):
    (photos / "README.txt").write_text("about these photos")
    (photos / ".cache").mkdir()
    (photos / "ant" / ".DS_Store").write_bytes(b"x")
    (photos / "ant" / "Thumbs.db").write_bytes(b"x")
    (photos / "ant" / "link.png").symlink_to(photos / "ant" / "0.png")
    (photos / "dog").symlink_to(write_noise(tmp_path / "elsewhere", 2, seed=9), target_is_directory=True)
    train, test, _ = load(photos)
    assert train.class_names == ("ant", "bee", "dog", "train")
    assert (train.labels.bincount() + test.labels.bincount()).tolist() == [6, 5, 2, 5]


@pytest.mark.parametrize("name", good_files())
def test_good_files_are_decoded(name, tmp_path):
    content, expected, tolerance = good_files()[name]
    write_class(tmp_path, {name: content})
    pixels = decode_image(tmp_path / name, Framing(SIDE)).transpose(1, 2, 0)
    assert np.abs(pixels.astype(int) - np.rint(expected)).max() <= tolerance


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_refused(name, tmp_path):
    content, reason = bad_files()[name]
    write_class(tmp_path, {name: content})
    with pytest.raises(DataError, match=reason):
        decode_image(tmp_path / name, Framing(SIDE))


def test_bad_files_are_listed_or_skipped(photos):
    os.mkfifo(photos / "ant" / "pipe.png")
    (photos / "ant" / "gone.png").symlink_to("nowhere")
    (photos / "ant" / "zero.png").symlink_to("/dev/zero")
    (photos / "ant" / "inner").mkdir()
    write_class(photos / "bee", {f"bad{index}.png": b"" for index in range(10)})
    with pytest.raises(DataError, match=r"^14 files(?s:.*)and 4 more") as caught:
        load(photos)
    lines = str(caught.value).splitlines()
    assert sum("/ant/" in line or "/bee/" in line for line in lines) == 10
    for name, reason in {"pipe": "regular", "gone": "No such file", "zero": "regular", "inner": "folder"}.items():
        assert [line for line in lines if f"ant/{name}" in line and reason in line]
    train, test, (notice,) = load(photos, skip_bad=True)
    assert (len(train) + len(test), "14 files" in notice) == (15, True)


@pytest.mark.parametrize(("width", "height", "target"), [(60, 20, 8), (41, 20, 32), (3, 2000, 8), (1, 1, 8)])
def test_centre_square_is_resized(width, height, target, tmp_path):
    side = min(width, height)
    noise = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    write_class(tmp_path, {"a.png": encoded(noise, "PNG")})
    box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    expected = Image.fromarray(noise).resize((target, target), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(
        decode_image(tmp_path / "a.png", Framing(target)).transpose(1, 2, 0), np.asarray(expected)
    )


def test_duplicates_are_noticed(tmp_path):
    for part in ("train", "test"):
        for seed, name in enumerate(("ant", "bee")):
            write_noise(tmp_path / part / name, 4, seed)
    write_noise(tmp_path / "test" / "ant", 5, seed=9)
    shutil.copy(tmp_path / "train" / "ant" / "0.png", tmp_path / "train" / "bee" / "copy.png")
    *_, (conflicts, shared) = load(tmp_path)
    assert "ant/0.png" in conflicts
    assert "bee/copy.png" in conflicts
    assert "4 of the 9" in shared


def test_classes_need_usable_images(photos):
    write_class(photos / "dog", {"bad.png": b"bad"})
    with pytest.raises(DataError, match="'dog'"):
        load(photos, skip_bad=True)
    write_noise(photos / "dog", 1, seed=9)
    train, test, notices = load(photos, skip_bad=True)
    assert (train.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([4, 4, 1, 4], [1] * 4)
    assert [notice for notice in notices if "'dog'" in notice]


def test_wrong_layouts_show_the_expected_one(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    write_noise(tmp_path / "half" / "train", 2, seed=0)
    for root in (tmp_path / "nowhere", photos / "ant" / "0.png", photos / "ant", tmp_path / "empty", tmp_path / "half"):
        with pytest.raises(DataError, match="FOLDER/train/<class>"):
            load(root)


def test_class_names_are_kept_or_refused(tmp_path):
    joined = ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f469\u200d\U0001f467"]
    names = ['it\'s "one"', "\U0001f41d", "a b", "Bee", "bee", "x" * 255, *joined]
    for seed, name in enumerate(names):
        write_noise(tmp_path / name, 2, seed)
    assert list(load(tmp_path)[0].class_names) == sorted(names)
    for name in (b"caf\xe9", b"two\nlines", b"\x1b[31m"):
        folder = write_noise(tmp_path / os.fsdecode(name), 2, seed=99)
        with pytest.raises(DataError, match="control characters"):
            load(tmp_path)
        shutil.rmtree(folder)


@pytest.mark.parametrize("image_size", [0, 5000])
def test_impossible_sizes_are_refused(image_size, photos):
    with pytest.raises(UsageError, match=str(image_size)):
        load_folder(photos, image_size)


def test_one_image_per_class_is_enough(tmp_path):
    for part in ("train", "test"):
        for seed, name in enumerate(("ant", "bee", "cat")):
            write_noise(tmp_path / "photos" / part / name, 1, seed + 10 * (part == "test"))
    options = {"backbone": "small", "epochs": "1", "batch_size": "4"}
    few = Experiment("icarl", data=str(tmp_path / "photos"), scenario="2,1", image_size=8, options=options)
    resolved = resolve(few)
    with pytest.raises(DataError, match="has 1"):
        resolve(replace(few, method="bic"))
    shutil.rmtree(few.data)  # a run needs its folder only until it is read
    assert toy_run(tmp_path / "run", resolved).finished
