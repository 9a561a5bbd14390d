"""Image folders: both layouts, and every way in which people's folders differ from them."""

import os
import unicodedata
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from ccfa.data.folder import load_classes, load_folder
from ccfa.errors import DataError, UsageError
from zoo import write_noise

COLOURS = {"ant": (255, 0, 0), "bee": (0, 255, 0), "cat": (0, 0, 255)}


def add_class(folder, colour, num=5):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num):
        Image.new("RGB", (12, 10), colour).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def flat(tmp_path):
    root = tmp_path / "photos"
    for name, colour in reversed(COLOURS.items()):
        add_class(root / name, colour)
    return root


def assert_coloured(images):
    for image, label in zip(images.images, images.labels.tolist(), strict=True):
        colour = torch.tensor(COLOURS[images.class_names[label]], dtype=torch.uint8)
        assert torch.equal(image, colour[:, None, None].expand_as(image))


def test_flat_layout_holds_out(flat):
    train, test = load_folder(flat, image_size=8)
    assert train.class_names == test.class_names == ("ant", "bee", "cat")
    assert train.shape == (3, 8, 8)
    assert torch.bincount(train.labels).tolist() == [4, 4, 4]
    assert torch.bincount(test.labels).tolist() == [1, 1, 1]
    assert_coloured(train)
    assert_coloured(test)


@pytest.mark.parametrize("part", ["test", "val"])
def test_split_layout(part, tmp_path):
    for name, colour in COLOURS.items():
        add_class(tmp_path / "train" / name, colour, num=3)
        add_class(tmp_path / part / name, colour, num=2)
    train, test = load_folder(tmp_path, image_size=8)
    assert torch.bincount(train.labels).tolist() == [3, 3, 3]
    assert torch.bincount(test.labels).tolist() == [2, 2, 2]
    assert_coloured(train)
    assert_coloured(test)


def test_train_may_be_a_class(tmp_path):
    add_class(tmp_path / "train", (255, 0, 0))
    add_class(tmp_path / "tram", (0, 255, 0))
    assert load_folder(tmp_path, image_size=4)[0].class_names == ("train", "tram")


def test_what_is_not_data_is_passed_over(flat):
    (flat / "README.txt").write_text("about these photos")
    (flat / ".cache").mkdir()
    (flat / "ant" / ".DS_Store").write_bytes(b"x")
    (flat / "ant" / "Thumbs.db").write_bytes(b"x")
    (flat / "ant" / ".ipynb_checkpoints").mkdir()
    os.mkfifo(flat / "ant" / "pipe.jpg")
    (flat / "ant" / "link.png").symlink_to(flat / "ant" / "0.png")
    images = load_classes(flat, image_size=4)
    assert torch.bincount(images.labels).tolist() == [6, 5, 5]


def test_linked_class_folders_are_followed(flat, tmp_path):
    elsewhere = add_class(tmp_path / "elsewhere", (1, 2, 3), num=2)
    (flat / "dog").symlink_to(elsewhere, target_is_directory=True)
    assert load_classes(flat, image_size=4).class_names == ("ant", "bee", "cat", "dog")


def test_bad_files_are_listed_together(flat):
    (flat / "ant" / "note.jpg").write_text("text")
    half = flat / "bee" / "half.png"
    noise = np.random.RandomState(0).randint(0, 256, (50, 50, 3)).astype(np.uint8)
    Image.fromarray(noise).save(half)
    half.write_bytes(half.read_bytes()[:3000])
    (flat / "cat" / "gone.png").symlink_to(flat / "nowhere.png")
    with pytest.raises(DataError) as caught:
        load_folder(flat, image_size=4)
    message = str(caught.value)
    assert message.startswith("3 files are not usable images:")
    assert "note.jpg: not an image" in message
    assert "half.png: cannot be decoded" in message
    assert "gone.png: dangling link" in message
    with pytest.warns(UserWarning, match="Skipped: 3 files"):
        images = load_classes(flat, image_size=4, skip_bad=True)
    assert_coloured(images)
    assert len(images) == 15


def test_long_lists_of_bad_files_are_cut(flat):
    for index in range(14):
        (flat / "ant" / f"bad{index}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)^14 files.*and 4 more") as caught:
        load_folder(flat, image_size=4)
    assert str(caught.value).count("not an image") == 10


def test_good_folders_give_no_warning(tmp_path):
    for seed, name in enumerate(COLOURS):
        write_noise(tmp_path / name, num=5, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_folder(tmp_path, image_size=4, skip_bad=True)


def test_classes_without_usable_images(flat):
    (flat / "dog").mkdir()
    with pytest.raises(DataError, match=r"No usable images in the classes \['dog'\]"):
        load_folder(flat)
    (flat / "dog" / "bad.png").write_bytes(b"bad")
    with pytest.raises(DataError, match=r"No usable images in the classes \['dog'\]"):
        load_folder(flat, skip_bad=True)


def test_one_image_cannot_be_held_out(flat):
    add_class(flat / "dog", (1, 2, 3), num=1)
    with pytest.raises(DataError, match="'dog' has 1 image"):
        load_folder(flat, image_size=4)


def test_wrong_layouts_show_the_expected_one(flat, tmp_path):
    def refused(root, match):
        with pytest.raises(DataError, match=rf"(?s){match}.*FOLDER/train/<class>"):
            load_folder(root, image_size=4)

    refused(tmp_path / "nowhere", "does not exist")
    refused(flat / "ant" / "0.png", "is not a folder")
    refused(flat / "ant", "images outside the class folders, such as '0.png'")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no class folders")
    add_class(tmp_path / "half" / "train" / "ant", (1, 2, 3))
    refused(tmp_path / "half", "has train/ but neither test/ nor val/")
    add_class(flat / "ant" / "inner", (1, 2, 3))
    refused(flat, "inner is a folder inside a class folder")


def test_loops_of_links_end(flat):
    (flat / "ant" / "back").symlink_to(flat, target_is_directory=True)
    with pytest.raises(DataError, match="back is a folder inside a class folder"):
        load_folder(flat)


def test_train_and_test_must_have_the_same_classes(tmp_path):
    for part, names in {"train": ("ant", "bee"), "test": ("ant", "cat")}.items():
        for name in names:
            add_class(tmp_path / part / name, COLOURS[name], num=2)
    with pytest.raises(DataError, match=r"only in train: \['bee'\], only in test: \['cat'\]"):
        load_folder(tmp_path, image_size=4)


@pytest.mark.parametrize("twins", [("Bee", "bee"), ("bee", "bee "), ("caf\u00e9", "cafe\u0301")])
def test_twin_class_names_are_refused(twins, tmp_path):
    for name in twins:
        add_class(tmp_path / name, (1, 2, 3))
    if len(os.listdir(tmp_path)) < 2:
        pytest.skip("this file system sees the two names as one")
    with pytest.raises(DataError, match="differ only in case, spaces or Unicode form"):
        load_folder(tmp_path)


def test_unusual_names_stay_as_they_are(tmp_path):
    names = ['it\'s "one"', "\U0001f41d", "a b", "cafe\u0301", "x" * 255]
    for name in names:
        add_class(tmp_path / name, (1, 2, 3), num=2)
    expected = sorted(unicodedata.normalize("NFC", name) for name in names)
    assert list(load_classes(tmp_path, image_size=4).class_names) == expected


@pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines"])
def test_names_that_cannot_be_printed_are_refused(name, tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    with pytest.raises(DataError, match="cannot be printed") as caught:
        load_folder(tmp_path)
    str(caught.value).encode("utf-8")


def test_unprintable_bad_files_are_listed(flat):
    with open(os.fsencode(flat / "ant") + b"/\xff.png", "wb"):
        pass
    with pytest.raises(DataError, match="not an image") as caught:
        load_folder(flat, image_size=4)
    str(caught.value).encode("utf-8")


def test_impossible_options_are_refused(flat):
    with pytest.raises(UsageError, match="image size"):
        load_folder(flat, image_size=0)
    with pytest.raises(UsageError, match="above 0 and below 1"):
        load_folder(flat, held_out=1.0)
