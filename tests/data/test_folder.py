"""Image folders: both layouts, every kind of file, and the ways in which people's folders differ from them."""

import os
import shutil
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch

from ccfa.data.decoding import Framing, decode_image
from ccfa.data.folder import find_images, load_folder, read_photos
from ccfa.errors import DataError, Notice, UsageError
from ccfa.experiments import Experiment, resolve
from toy_runs import toy_run
from zoo import write_class, write_noise


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


def test_sets_know_the_files_of_their_images(photos):
    train, test, _ = load(photos)
    assert {*train.files, *test.files} == {str(path.relative_to(photos)) for path in photos.glob("*/*")}
    held = test.reorder([2, 0, 1]).to("cpu")
    for image, label, file in zip(held.images.numpy(), held.labels, held.files, strict=True):
        assert file.startswith(f"{held.class_names[label]}/")
        assert (decode_image(photos / file, Framing(8)) == image).all()


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


def test_text_files_are_left_out_with_a_note(photos):
    write_class(photos / "ant", {"notes.txt": b"blurred", "LABELS.CSV": b"1,2", ".DS_Store": b"x"})
    train, test, (notice,) = load(photos)
    assert len(train) + len(test) == 15
    assert "ant/notes.txt" in notice
    assert "LABELS.CSV" in notice
    assert "DS_Store" not in notice
    assert {path.name for path in read_photos(photos).ignored} == {"notes.txt", "LABELS.CSV", ".DS_Store"}


def test_folders_inside_classes_are_read_when_asked(photos):
    inner = write_noise(photos / "ant" / "summer" / "beach", 2, seed=9)
    write_class(inner, {"notes.txt": b"x", "bad.png": b"x"})
    (photos / "ant" / "__MACOSX").mkdir()
    with pytest.raises(DataError, match=r"(?s)ant/summer .*--recursive"):
        load(photos)
    with pytest.raises(DataError, match=r"beach/bad.png"):
        load(photos, recursive=True)
    found = read_photos(photos, Framing(8), recursive=True)
    assert found.images.labels.bincount().tolist() == [7, 5, 5]
    assert found.paths[5:7] == (inner / "0.png", inner / "1.png")
    for row, path in enumerate(found.paths):
        assert found.images.images[row].numpy().tobytes() == decode_image(path, Framing(8)).tobytes()
    train, test, _ = load(photos, recursive=True, skip_bad=True)
    assert len(train) + len(test) == 17


def test_a_class_of_folders_only_says_what_to_do(photos):
    write_noise(photos / "dog" / "inner", 2, seed=9)
    with pytest.raises(DataError, match=r"(?s)'dog'.*dog/inner is a folder.*--recursive"):
        load(photos, skip_bad=True)
    assert len(load(photos, recursive=True)[0]) == 13


def test_a_root_too_high_names_those_that_may_be_meant(tmp_path):
    for seed, (part, name) in enumerate(product(("first", "second"), ("ant", "bee", "cat"))):
        write_noise(tmp_path / part / name, 2, seed)
    (tmp_path / "notes").mkdir()
    (tmp_path / "first" / "unreadable.db").touch()
    with pytest.raises(DataError, match=f"{tmp_path} is one level too high") as caught:
        load(tmp_path, skip_bad=True)
    told = str(caught.value)
    assert f"{tmp_path / 'first'}, {tmp_path / 'second'}." in told
    assert (told.count("--recursive"), "notes" in told, "ant" in told) == (1, False, False)
    shutil.rmtree(tmp_path / "notes")
    assert load(tmp_path, recursive=True, skip_bad=True)[0].class_names == ("first", "second")
    assert load(tmp_path / "second")[0].class_names == ("ant", "bee", "cat")


def test_links_in_circles_end(tmp_path):
    deep = tmp_path / "photos" / "ant" / "/".join("a" * 100)
    write_noise(deep, 1, seed=0)
    for name in ("up", "up-again"):
        (deep.parent / name).symlink_to(tmp_path / "photos" / "ant", target_is_directory=True)
    (deep / "here").symlink_to(".", target_is_directory=True)
    assert read_photos(tmp_path / "photos", recursive=True).paths == (deep / "0.png",)


@pytest.mark.parametrize("parts", [["train"], ["train", "valid"]])
def test_train_part_alone_is_split(parts, tmp_path):
    for seed, (part, name) in enumerate(product(parts, ("ant", "bee"))):
        write_noise(tmp_path / part / name, 5, seed)
    train, test, notices = load(tmp_path)
    assert (train.class_names, notices) == (("ant", "bee"), [])
    assert (len(train), len(test)) == ((8, 2) if len(parts) == 1 else (10, 10))


def test_imbalance_is_noticed(photos):
    write_noise(photos / "cat", 26, seed=8)
    *_, (notice,) = load(photos)
    assert "'cat' has 26 images" in notice
    (photos / "cat" / "25.png").unlink()
    assert load(photos)[2] == []


def test_single_images_are_learned_with_a_note(tmp_path):
    for part, name, seed in (("train", "ant", 0), ("train", "bee", 1), ("test", "ant", 2), ("test", "bee", 3)):
        write_noise(tmp_path / part / name, 1 + (name == "bee"), seed)
    *_, (notice,) = load(tmp_path)
    assert "'ant'" in notice
    assert "'bee'" not in notice


def test_findings_name_everything(photos):
    write_class(photos / "ant", {"bad.png": b"<html>", "notes.txt": b"x"})
    shutil.copy(photos / "ant" / "0.png", photos / "ant" / "again.png")
    shutil.copy(photos / "ant" / "0.png", photos / "bee" / "copy.png")
    write_noise(photos / "dog", 1, seed=9)
    found = read_photos(photos)
    assert found.unreadable[0][0].name == "bad.png"
    assert [(a.name, b.name) for a, b in found.duplicates] == [("0.png", "again.png")]
    assert [(a.name, b.name) for a, b in found.conflicts] == [("0.png", "copy.png")]
    lines = found.findings()
    wanted = ["4 classes, 18 images: ant 6, bee 6, dog 1", "bad.png is not an image", "again.png", "copy.png"]
    for text in [*wanted, "one image only: 'dog'", "'ant' has 6 images and 'dog' has 1", "notes.txt"]:
        assert len([line for line in lines if text in line]) == 1
    assert len(lines) == 7


def test_copies_are_said_to_be_used_as_they_are(photos):
    """By a run, both; tests/deployment/test_updating.py has `ccfa learn`, which uses one."""
    shutil.copy(photos / "ant" / "0.png", photos / "ant" / "again.png")
    (said,) = [line for line in read_photos(photos).findings() if "again.png" in line]
    assert "`ccfa learn` uses one copy, `ccfa run` both" in said
    train, test, _ = load(photos)
    assert (train.labels.bincount() + test.labels.bincount()).tolist() == [6, 5, 5]


def test_images_are_found_in_all_folders(photos):
    write_class(photos / "ant", {"notes.txt": b"x", ".hidden": b"x", "b.JPG": b"x"})
    (photos / "top.png").touch()
    names = [str(path.relative_to(photos)) for path in find_images(photos)]
    ant, bee, train = ([f"{name}/{number}.png" for number in range(5)] for name in ("ant", "bee", "train"))
    assert names == [*ant, "ant/b.JPG", *bee, "top.png", *train]
    (photos / "empty").mkdir()
    for path in (photos / "nowhere", photos / "empty"):
        with pytest.raises(DataError, match=path.name):
            find_images(path)


def test_classes_need_usable_images(photos):
    write_class(photos / "dog", {"bad.png": b"bad"})
    with pytest.raises(DataError, match="'dog'"):
        load(photos, skip_bad=True)
    write_noise(photos / "dog", 1, seed=9)
    train, test, notices = load(photos, skip_bad=True)
    assert (train.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([4, 4, 1, 4], [1] * 4)
    assert [notice for notice in notices if "'dog'" in notice]


def test_wrong_layouts_say_what_was_found(photos, tmp_path):
    write_class(tmp_path / "notes", {"notes.txt": b"x"})
    (tmp_path / "empty").mkdir()
    for part in ("train", "test"):
        write_noise(tmp_path / "parts" / part, 2, seed=0)
    found = {
        tmp_path / "nowhere": "does not exist",
        photos / "ant" / "0.png": "Not a directory",
        photos / "ant": r"no class folders, only 5 loose photos: 0\.png",
        tmp_path / "empty": "empty is empty.*empty/cat",
        tmp_path / "notes": "no class folders",
        tmp_path / "parts": "2 loose photos.*parts/train/cat",
    }
    for root, told in found.items():
        with pytest.raises(DataError, match=told):
            load(root)


def test_an_empty_class_folder_is_named(photos):
    (photos / "dog").mkdir()
    with pytest.raises(DataError, match=r"no photos in the class folder 'dog'.*remove it\.$"):
        load(photos, skip_bad=True)


def test_photos_of_one_part_are_asked_for(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "set" / "train")
    with pytest.raises(DataError, match=r"Give one of them: .*train"):
        read_photos(tmp_path / "set", recursive=True)


def test_a_class_may_be_called_train(tmp_path):
    write_noise(tmp_path / "train", 5, seed=0)
    (tmp_path / "train" / ".thumbnails").mkdir()
    assert read_photos(tmp_path).images.class_names == load(tmp_path)[0].class_names == ("train",)


def test_loose_photos_are_listed_or_skipped(photos):
    shutil.copy(photos / "ant" / "0.png", photos / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png is outside"):
        load(photos)
    assert "loose.png" in load(photos, skip_bad=True)[2][0]
    assert any("loose.png" in line for line in read_photos(photos).findings())


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
