"""Image folders: both layouts, every kind of file, and the ways in which people's folders differ from them."""

import os
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from ccfa.data.folder import FORMATS, decode_image, load_classes, load_folder
from ccfa.errors import DataError, Notice, ResourceError, UsageError
from ccfa.experiments import Experiment, resolve
from toy_runs import toy_run
from zoo import SIDE, bad_files, encoded, good_files, gradient, write_class, write_noise

COLOURS = {"ant": (255, 0, 0), "bee": (0, 255, 0), "cat": (0, 0, 255)}
SMALL = {"backbone": "small", "epochs": "1", "batch_size": "4"}


def add_class(folder, colour, num=5):
    image = encoded(np.full((10, 12, 3), colour, np.uint8), "PNG")
    return write_class(folder, {f"{index}.png": image for index in range(num)})


@pytest.fixture
def flat(tmp_path):
    """A folder of three classes with five images each."""
    for name, colour in reversed(COLOURS.items()):
        add_class(tmp_path / "photos" / name, colour)
    return tmp_path / "photos"


def noticed(function, *arguments, **options):
    """What the function returns, and the notices it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    assert all(warning.category is Notice for warning in caught)
    return result, [str(warning.message) for warning in caught]


def assert_coloured(images, num_each):
    assert torch.bincount(images.labels).tolist() == [num_each] * 3
    for image, label in zip(images.images, images.labels.tolist(), strict=True):
        colour = torch.tensor(COLOURS[images.class_names[label]], dtype=torch.uint8)
        assert torch.equal(image, colour[:, None, None].expand(3, 8, 8))


def test_without_test_part_some_are_held_out(flat):
    train, test = load_folder(flat, image_size=8)
    assert train.class_names == test.class_names == ("ant", "bee", "cat")
    assert_coloured(train, 4)
    assert_coloured(test, 1)


@pytest.mark.parametrize("part", ["test", "val"])
def test_a_test_part_is_used(part, tmp_path):
    for name, colour in COLOURS.items():
        add_class(tmp_path / "train" / name, colour, num=3)
        add_class(tmp_path / part / name, colour, num=2)
    train, test = load_folder(tmp_path, image_size=8)
    assert_coloured(train, 3)
    assert_coloured(test, 2)


def test_train_may_be_a_class(tmp_path):
    add_class(tmp_path / "train", (255, 0, 0))
    add_class(tmp_path / "tram", (0, 255, 0))
    assert load_folder(tmp_path, image_size=4)[0].class_names == ("train", "tram")


def test_hidden_files_and_links(flat, tmp_path):
    (flat / "README.txt").write_text("about these photos")
    (flat / ".cache").mkdir()
    (flat / "ant" / ".DS_Store").write_bytes(b"x")
    (flat / "ant" / "Thumbs.db").write_bytes(b"x")
    (flat / "ant" / "link.png").symlink_to(flat / "ant" / "0.png")
    (flat / "dog").symlink_to(add_class(tmp_path / "elsewhere", (1, 2, 3), num=2), target_is_directory=True)
    images = load_classes(flat, image_size=4)
    assert images.class_names == ("ant", "bee", "cat", "dog")
    assert torch.bincount(images.labels).tolist() == [6, 5, 5, 2]


def test_good_files_are_seen_rightly(tmp_path):
    files = good_files()
    write_class(tmp_path / "zoo", {name: content for name, (content, _, _) in files.items()})
    images = load_classes(tmp_path, image_size=SIDE)
    assert len(images) == len(files)
    for image, name in zip(images.images.numpy(), sorted(files), strict=True):
        _, expected, tolerance = files[name]
        assert np.abs(image.transpose(1, 2, 0).astype(int) - np.rint(expected)).max() <= tolerance, name


def test_bad_files_are_listed_or_skipped(flat, monkeypatch):
    monkeypatch.setattr("ccfa.data.folder._NUM_SHOWN", 100)
    files = bad_files()
    write_class(flat / "ant", {name: content for name, (content, _) in files.items()})
    os.mkfifo(flat / "ant" / "pipe.png")
    (flat / "ant" / "gone.png").symlink_to("nowhere")
    (flat / "ant" / "zero.png").symlink_to("/dev/zero")
    (flat / "ant" / "loop.png").symlink_to("loop.png")
    (flat / "ant" / "inner").mkdir()
    with open(os.fsencode(flat / "ant") + b"/\xff.png", "wb"):
        pass
    reasons = {name: reason for name, (_, reason) in files.items()}
    reasons |= {"pipe.png": "not a regular", "zero.png": "not a regular", "inner": "is a folder"}
    reasons |= {"gone.png": "No such file", "loop.png": "cannot be read", r"\udcff.png'": "not an image"}
    with pytest.raises(DataError, match="skip-bad") as caught:
        load_folder(flat, image_size=8)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(reasons) + 1
    for name, reason in reasons.items():
        (line,) = [line for line in lines if f"/{name} " in line]
        assert reason in line
    images, (told,) = noticed(load_classes, flat, image_size=8, skip_bad=True)
    assert_coloured(images, 5)
    assert all(f"/{name} " in told for name in reasons)


def test_long_lists_are_cut(flat):
    write_class(flat / "ant", {f"bad{index}.png": b"" for index in range(14)})
    with pytest.raises(DataError, match=r"(?s)^14 files.*and 4 more") as caught:
        load_folder(flat)
    assert str(caught.value).count("not an image") == 10


@pytest.mark.parametrize("kind", ["ICO", "PCX", "TGA", "JPEG2000"])
def test_rare_formats_are_not_opened(kind, tmp_path):
    assert set(FORMATS) == {"JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"}
    write_class(tmp_path, {kind: encoded(gradient(), kind)})
    with pytest.raises(DataError, match="known format"):
        decode_image(tmp_path / kind, SIDE)


@pytest.mark.parametrize("size", [(60, 20), (20, 60), (41, 20), (1, 1), (3, 2000)])
@pytest.mark.parametrize("target", [8, 20, 32])
def test_the_centre_square_is_resized(size, target, tmp_path):
    (width, height), side = size, min(size)
    noise = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    write_class(tmp_path, {"a.png": encoded(noise, "PNG")})
    box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    expected = Image.fromarray(noise).resize((target, target), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", target).transpose(1, 2, 0), np.asarray(expected))


def test_shrinking_averages_pixels(tmp_path):
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    write_class(tmp_path, {"a.png": encoded(board, "PNG")})
    assert np.all(np.abs(decode_image(tmp_path / "a.png", 4).astype(int) - 127) < 8)


def test_sixteen_bits_and_floats_are_scaled(tmp_path):
    deep = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    real = np.linspace(-3, 7, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.float32)
    files = {"deep.png": deep, "deep.pgm": deep, "dark.png": np.full_like(deep, 2570), "real.tiff": real}
    kinds = {"png": "PNG", "pgm": "PPM", "tiff": "TIFF"}
    write_class(tmp_path, {name: encoded(values, kinds[name.split(".")[1]]) for name, values in files.items()})
    for name in ("deep.png", "deep.pgm"):
        np.testing.assert_array_equal(decode_image(tmp_path / name, SIDE), np.stack([np.rint(deep / 257)] * 3))
    assert np.all(decode_image(tmp_path / "dark.png", SIDE) == 10)
    np.testing.assert_allclose(decode_image(tmp_path / "real.tiff", SIDE)[0], (real + 3) * 25.5, atol=0.51)


def test_duplicates_are_told(tmp_path):
    for part in ("train", "test"):
        for seed, name in enumerate(("ant", "bee")):
            write_noise(tmp_path / part / name, 4, seed)
    write_noise(tmp_path / "test" / "ant", 5, seed=9)
    shutil.copy(tmp_path / "train" / "ant" / "0.png", tmp_path / "train" / "bee" / "copy.png")
    _, (conflicts, shared) = noticed(load_folder, tmp_path, image_size=8)
    assert "ant/0.png" in conflicts
    assert "bee/copy.png" in conflicts
    assert shared.startswith("4 of the 9 test images")


def test_good_folders_are_silent(tmp_path):
    for seed, name in enumerate(COLOURS):
        write_noise(tmp_path / name, 5, seed)
    assert noticed(load_folder, tmp_path, image_size=4, skip_bad=True)[1] == []


def test_classes_need_usable_images(flat):
    (flat / "dog").mkdir()
    for _ in range(2):
        with pytest.raises(DataError, match=r"\['dog'\]"):
            load_folder(flat, skip_bad=True)
        (flat / "dog" / "bad.png").write_bytes(b"bad")
    add_class(flat / "dog", (1, 2, 3), num=1)
    with pytest.raises(DataError, match="'dog' has 1 image"):
        load_folder(flat, image_size=4, skip_bad=True)


def test_wrong_layouts_show_the_expected_one(flat, tmp_path):
    (tmp_path / "empty").mkdir()
    add_class(tmp_path / "half" / "train" / "ant", (1, 2, 3))
    for root in (tmp_path / "nowhere", flat / "ant" / "0.png", flat / "ant", tmp_path / "empty", tmp_path / "half"):
        with pytest.raises(DataError, match="FOLDER/train/<class>"):
            load_folder(root, image_size=4)


def test_train_and_test_share_classes(tmp_path):
    for part, names in {"train": ("ant", "bee"), "test": ("ant", "cat")}.items():
        for name in names:
            add_class(tmp_path / part / name, COLOURS[name], num=2)
    with pytest.raises(DataError, match="only in train: 'bee', only in test: 'cat'"):
        load_folder(tmp_path, image_size=4)


def test_unusual_class_names_are_kept(tmp_path):
    joined = ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f469\u200d\U0001f467"]
    names = ['it\'s "one"', "\U0001f41d", "a b", "Bee", "bee", "x" * 255, *joined]
    for name in names:
        add_class(tmp_path / name, (1, 2, 3), num=2)
    assert list(load_classes(tmp_path, image_size=4).class_names) == sorted(names)


@pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines", b"\x1b[31m"])
def test_control_characters_in_names_are_refused(name, tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    write_noise(tmp_path / os.fsdecode(name), 2, seed=0)
    with pytest.raises(DataError, match="control characters") as caught:
        load_folder(tmp_path)
    assert str(caught.value).isprintable()


def test_impossible_options_are_refused(flat):
    for options in ({"image_size": 0}, {"image_size": 5000}, {"held_out": 1.0}):
        with pytest.raises(UsageError):
            load_folder(flat, **options)


def test_too_many_pixels_for_memory(flat, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError("Unable to allocate 4 TiB")

    monkeypatch.setattr(np, "zeros", full)
    with pytest.raises(ResourceError, match="image-size"):
        load_folder(flat)


@pytest.mark.parametrize("method", ["finetune", "podnet", "icarl", "gdumb", "il2a"])
def test_one_image_per_class_is_enough(method, tmp_path):
    for part in ("train", "test"):
        for seed, name in enumerate(("ant", "bee", "cat")):
            write_noise(tmp_path / "photos" / part / name, 1, seed + 10 * (part == "test"))
    options = SMALL | ({"balanced_epochs": "1"} if method == "podnet" else {})
    data = str(tmp_path / "photos")
    resolved = resolve(Experiment(method, data=data, scenario="2,1", image_size=8, options=options))
    assert len(resolved.notes) == bool(resolved.method.memory.per_class)
    shutil.rmtree(data)  # a run needs its folder only until it is read
    report = toy_run(tmp_path / "run", resolved)
    assert report.finished


def test_methods_name_too_small_classes(tmp_path):
    for part in ("train", "test"):
        write_noise(tmp_path / part / "ant", 5, seed=len(part))
        write_noise(tmp_path / part / "bee", 1, seed=10 + len(part))
    with pytest.raises(DataError, match="'bee' has 1"):
        resolve(Experiment("bic", data=str(tmp_path), image_size=8, options=SMALL))


def test_one_class_is_learned(tmp_path):
    write_noise(tmp_path / "ant", 4, seed=0)
    resolved = resolve(Experiment("finetune", data=str(tmp_path), image_size=8, options=SMALL))
    assert "one class only" in resolved.notes[0]
    assert [stage.num_new for stage in resolved.stages] == [1]
