"""Photos as people have them, and as attackers make them: seen rightly, or refused with their names."""

import os
import shutil
import socket
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fuzzing
from ccfa.data.decoding import FORMATS, decode_image
from ccfa.data.folder import load_classes, load_folder
from ccfa.errors import DataError, Notice
from ccfa.experiments import Experiment, Run, resolve, run
from children import in_child, limit_memory
from toy_runs import Silent
from zoo import SIDE, bad_files, black_rows, encoded, good_files, gradient, png, write_class, write_noise

SMALL = {"backbone": "small", "epochs": "1", "batch_size": "4"}


def classes(root, num_each=4, names=("ant", "bee")):
    for seed, name in enumerate(names):
        write_noise(root / name, num_each, seed)
    return root


def notices(function, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    return result, [str(warning.message) for warning in caught if issubclass(warning.category, Notice)]


def test_every_good_file_of_the_zoo_is_seen_as_a_person_sees_it(tmp_path):
    files = good_files()
    write_class(tmp_path / "zoo", {name: content for name, (content, _, _) in files.items()})
    images, _ = notices(load_classes, tmp_path, image_size=SIDE)
    assert len(images) == len(files)
    for image, name in zip(images.images.numpy(), sorted(files), strict=True):
        _, expected, tolerance = files[name]
        difference = np.abs(image.transpose(1, 2, 0).astype(int) - np.rint(expected)).max()
        assert difference <= tolerance, name


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_bad_file_of_the_zoo_is_named_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ccfa.data.folder._NUM_SHOWN", 100)
    files = bad_files()
    classes(tmp_path / "photos")
    write_class(tmp_path / "photos" / "ant", {name: content for name, (content, _) in files.items()})
    with pytest.raises(DataError, match=rf"^{len(files)} files are not usable") as caught:
        load_folder(tmp_path / "photos", image_size=8)
    lines = str(caught.value).splitlines()
    for name, (_, reason) in files.items():
        (line,) = [line for line in lines if f"/{name}: " in line]
        assert reason in line
    images, said = notices(load_classes, tmp_path / "photos", image_size=8, skip_bad=True)
    assert len(images) == 8
    assert said[0].startswith(f"Skipped: {len(files)} files")
    assert not (tmp_path / "canary").exists()


def test_bad_files_can_be_left_out_of_a_run(tmp_path):
    folder = classes(tmp_path / "photos")
    (folder / "ant" / "text.jpg").write_text("text")
    experiment = Experiment("finetune", data=str(folder), image_size=8, options=SMALL)
    with pytest.raises(DataError, match=r"text\.jpg: not an image.*\n.*--skip-bad"):
        resolve(experiment)
    resolved, said = notices(resolve, replace(experiment, skip_bad=True))
    assert len(resolved.train) + len(resolved.test) == 8
    assert "text.jpg" in said[0]


@pytest.mark.parametrize(("width", "height"), [(13000, 13000), (9000, 9000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_small_file_that_unpacks_to_much_costs_no_memory(width, height, tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height, rows=black_rows(width, 50)))
    assert path.stat().st_size < 30_000

    def refused():
        limit_memory(100_000_000)
        with pytest.raises(DataError, match="at most 64 million"):
            decode_image(path, SIDE)

    in_child(refused)


def test_what_was_done_to_images_is_said_once_for_all_of_them(tmp_path):
    files = good_files()
    names = ("moving.gif", "moving.webp", "pages.tiff", "stereo.mpo", "moving.png", "sixteen.png", "float.tiff")
    write_class(tmp_path / "zoo", {name: files[name][0] for name in (*names, "plain.png")})
    _, said = notices(load_classes, tmp_path, image_size=SIDE + 1)
    assert sorted(line.partition(", such as")[0] for line in said) == [
        "More than 8 bits a channel, scaled to 8: 2 images",
        "More than one frame, the first is used: 5 images",
        "Smaller than 17 pixels, enlarged: 8 images",
    ]


def test_sockets_and_devices_are_passed_over(tmp_path, monkeypatch):
    folder = classes(tmp_path / "photos") / "ant"
    monkeypatch.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jpg")
    os.mkfifo("pipe.jpg")
    Path("null.jpg").symlink_to("/dev/null")
    Path("zero.jpg").symlink_to("/dev/zero")  # would be read without end
    assert len(load_classes(tmp_path / "photos", image_size=8)) == 8


def test_loops_of_links_between_folders_end_at_once(tmp_path):
    folder = classes(tmp_path / "photos")
    (folder / "ant" / "up").symlink_to(folder, target_is_directory=True)
    (folder / "bee" / "self").symlink_to(folder / "bee" / "self")
    with pytest.raises(DataError, match="is a folder inside a class folder"):
        load_folder(folder, image_size=8)
    (folder / "ant" / "up").unlink()
    with pytest.raises(DataError, match="self: dangling link"):
        load_folder(folder, image_size=8)


@pytest.mark.parametrize("method", ["finetune", "podnet", "icarl", "gdumb", "il2a"])
def test_one_image_a_class_is_enough_to_learn(method, tmp_path):
    for part in ("train", "test"):
        for seed, name in enumerate(("ant", "bee", "cat")):
            write_noise(tmp_path / part / name, 1, seed + 10 * (part == "test"))
    options = SMALL | ({"balanced_epochs": "1"} if method == "podnet" else {})
    resolved = resolve(Experiment(method, data=str(tmp_path), scenario="2,1", image_size=8, options=options))
    if resolved.method.memory.per_class:
        assert resolved.notes == ("The smallest class has 1 images, fewer than 20: all of them are kept.",)
    directory = Run(tmp_path / "run")
    report = run(resolved, directory, Silent(), torch.device("cpu"))
    assert report.finished
    assert all(0 <= accuracy <= 1 for accuracy in report.overall)


def test_a_method_that_needs_more_images_of_a_class_names_it(tmp_path):
    for part in ("train", "test"):
        write_noise(tmp_path / part / "ant", 5, seed=len(part))
        write_noise(tmp_path / part / "bee", 1, seed=10 + len(part))
    with pytest.raises(DataError, match="bic needs at least 2 images of each class, and class 'bee' has 1"):
        resolve(Experiment("bic", data=str(tmp_path), image_size=8, options=SMALL))


def test_an_image_in_two_classes_is_named(tmp_path):
    folder = classes(tmp_path / "photos")
    shutil.copy(folder / "ant" / "0.png", folder / "bee" / "copy.png")
    (folder / "bee" / "other.bmp").write_bytes(encoded(gradient(), "BMP"))
    (folder / "ant" / "same-pixels.png").write_bytes(encoded(gradient(), "PNG"))
    _, said = notices(load_classes, folder, image_size=8)
    assert said[0].startswith("2 images are the same in two classes")
    assert f"{str(folder / 'ant' / '0.png')!r} = {str(folder / 'bee' / 'copy.png')!r}" in said[0]
    assert "same-pixels.png' = " in said[0]


def test_test_images_that_are_trained_on_are_counted(tmp_path):
    for part in ("train", "test"):
        classes(tmp_path / part)
    write_noise(tmp_path / "test" / "ant", 5, seed=9)
    _, said = notices(load_folder, tmp_path, image_size=8)
    assert said == [
        "4 of the 9 test images are training images too: accuracies will look better than they are. Remove the copies."
    ]


def test_one_class_is_learned_and_said_to_mean_little(tmp_path):
    folder = classes(tmp_path / "photos", names=("ant",))
    resolved = resolve(Experiment("finetune", data=str(folder), image_size=8, options=SMALL))
    assert "one class only" in resolved.notes[0]
    directory = Run(tmp_path / "run")
    assert run(resolved, directory, Silent(), torch.device("cpu")).overall == [1.0]


def test_a_run_needs_its_folder_only_until_it_is_read(tmp_path):
    folder = classes(tmp_path / "photos")
    resolved = resolve(Experiment("finetune", data=str(folder), image_size=8, options=SMALL))
    shutil.rmtree(folder)
    directory = Run(tmp_path / "run")
    assert run(resolved, directory, Silent(), torch.device("cpu")).finished


def test_files_that_may_not_be_read_are_listed(tmp_path):
    folder = classes(tmp_path / "photos")
    (folder / "ant" / "0.png").chmod(0)
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o055) if path.stat().st_uid == os.geteuid() != 0 else None

    def read_as_somebody():
        if os.geteuid() == 0:
            shown = Path("/proc/self/fd") / str(handle)
            os.setgid(65534)
            os.setuid(65534)
        else:
            shown = folder
        with pytest.raises(DataError, match=r"0\.png: .*Permission denied"):
            load_folder(shown, image_size=8)

    handle = os.open(folder, os.O_RDONLY)
    try:
        in_child(read_as_somebody)
    finally:
        os.close(handle)


@pytest.mark.parametrize("num", [2_000, pytest.param(200_000, marks=pytest.mark.soak)])
def test_many_files_take_bounded_memory_and_no_more_time_each(num, tmp_path):
    def seconds_each(num):
        folder = tmp_path / f"photos-{num}" / "ant"
        num_files = 1 + num // 50_000  # a file cannot have more names on some disks
        write_noise(folder, num_files, seed=0, size=8)
        for index in range(num - num_files):
            os.link(folder / f"{index % num_files}.png", folder / f"copy-{index}.png")

        def read():
            limit_memory(num * 3 * 8 * 8 * 3 + 400_000_000)
            began = time.process_time()
            assert len(load_classes(folder.parent, image_size=8)) == num
            return time.process_time() - began

        return in_child(read, timeout=600) / num

    assert seconds_each(num) < 4 * seconds_each(num // 4)


def test_a_long_scan_gives_signs_of_life(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ccfa.data.folder._SECONDS_BETWEEN_SIGNS", -1.0)
    load_classes(classes(tmp_path / "photos"), image_size=8)
    assert [record.getMessage() for record in caplog.records] == [f"Read {n} of 8 images" for n in range(1, 9)]


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_images_are_decoded_or_refused(seconds, tmp_path):
    path = tmp_path / "fuzzed"

    def decode(content):
        path.write_bytes(content)
        try:
            pixels = decode_image(path, SIDE).pixels
        except DataError:
            return
        assert (pixels.shape, pixels.dtype) == ((3, SIDE, SIDE), np.uint8)

    assert fuzzing.fuzz([content for content, _, _ in good_files().values()], decode, seconds) > 50


def test_only_formats_on_the_list_are_opened(tmp_path):
    assert set(FORMATS) == {"JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"}
    for kind in ("ICO", "PCX", "TGA", "JPEG2000"):
        path = tmp_path / kind
        path.write_bytes(encoded(gradient(), kind))
        with pytest.raises(DataError, match="not an image of a known format"):
            decode_image(path, SIDE)
