"""The cache of decoded photos: when it is used, when it is not, and what is in it."""

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from ccfa.data import Framing, cache, cache_folder, decode_files, decoding, load, read_photos
from ccfa.files import read_tensors
from zoo import write_class, write_noise

SMALL = Framing(8)


@pytest.fixture
def paths(tmp_path):
    """Files that were last changed long ago."""
    found = sorted(write_noise(tmp_path / "photos", 4, seed=0).iterdir())
    for path in found:
        os.utime(path, (10, 10))
    return found


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a" / "cache"


@pytest.fixture
def decoded(monkeypatch):
    """The names of the files that were decoded since it was last cleared."""
    names, decode = [], decoding.decode_image
    monkeypatch.setattr(
        decoding, "decode_image", lambda path, framing: (names.append(path.name), decode(path, framing))[1]
    )
    return names


def entries(place):
    return sorted(place.glob("*.safetensors"))


def test_second_time_nothing_is_decoded(paths, place, decoded):
    plain = decode_files(paths, SMALL)
    assert len(decoded) == 4
    decode_files(paths, SMALL, place)
    decoded.clear()
    images, rows, unreadable = decode_files(paths, SMALL, place)
    assert (decoded, rows, unreadable) == ([], [0, 1, 2, 3], [])
    np.testing.assert_array_equal(images, plain.images)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda paths: write_noise(paths[0].parent, 1, seed=9), ["0.png"]),
        (lambda paths: os.utime(paths[0], ns=(1, 1)), ["0.png"]),
        (lambda paths: paths[0].write_bytes(paths[1].read_bytes()), ["0.png"]),
        (lambda paths: paths.insert(1, shutil.copy(paths[0], paths[0].with_name("new.png"))), ["new.png"]),
        (lambda paths: paths.reverse(), []),
        (lambda paths: paths.pop(0), []),
    ],
)
def test_only_what_changed_is_decoded_anew(change, names, paths, place, decoded):
    decode_files(paths, SMALL, place)
    change(paths)
    decoded.clear()
    images = decode_files(paths, SMALL, place).images
    assert decoded == names
    np.testing.assert_array_equal(images, decode_files(paths, SMALL).images)
    decoded.clear()
    decode_files(paths, SMALL, place)
    assert decoded == []
    assert len(entries(place)) == 1


def test_a_folder_grows_class_by_class(tmp_path, place, decoded, monkeypatch):
    """Only the new class is decoded, no image is stored twice, and many classes share few entries."""
    monkeypatch.setattr(cache, "ENTRIES", 3)
    for number in range(12):
        write_noise(tmp_path / "photos" / f"class {number:02}", 2, seed=number)
        decoded.clear()
        images = read_photos(tmp_path / "photos", SMALL, cache=place).images.images
        assert decoded == ["0.png", "1.png"]
    assert sum(len(read_tensors(path)[0]["images"]) for path in entries(place)) == 24
    assert len(entries(place)) <= 3
    assert torch.equal(images, read_photos(tmp_path / "photos", SMALL).images.images)


def test_a_replaced_file_with_its_old_times_is_noticed(paths, place):
    for path in paths[:2]:
        path.write_bytes(b"P6 1 1 255\n " + path.name.encode()[:2])
    decode_files(paths, SMALL, place)
    before = paths[0].stat()
    other = paths[0].with_name("other")
    other.write_bytes(paths[1].read_bytes())
    while other.stat().st_ctime_ns == before.st_ctime_ns or other.stat().st_mtime_ns != before.st_mtime_ns:
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, paths[0])
    after = paths[0].stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    images = decode_files(paths, SMALL, place).images
    np.testing.assert_array_equal(images[0], images[1])


def test_framing_and_decoder_have_entries_of_their_own(paths, place, monkeypatch):
    for framing in (SMALL, Framing(9), Framing(8, 0.5), Framing(8, interpolation="bicubic")):
        assert decode_files(paths, framing, place).images.shape[2] == framing.size
    monkeypatch.setattr(decoding, "VERSION", decoding.VERSION + 1)
    decode_files(paths, SMALL, place)
    monkeypatch.setattr("PIL.__version__", "other")
    decode_files(paths, SMALL, place)
    assert len(entries(place)) == 6


def test_bad_files_are_tried_again(paths, place, decoded):
    write_class(paths[0].parent, {"bad.png": b"bad"})
    paths = [paths[0], paths[0].with_name("bad.png"), *paths[1:]]
    decode_files(paths, SMALL, place)
    decoded.clear()
    images, rows, unreadable = decode_files(paths, SMALL, place)
    assert (decoded, rows, unreadable[0][0]) == (["bad.png"], [0, 2, 3, 4], paths[1])
    np.testing.assert_array_equal(images, decode_files(paths, SMALL).images)


def test_a_reason_that_passed_is_forgotten(paths, place, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(decoding, "MAX_BYTES", paths[2].stat().st_size - 1)
        assert len(decode_files(paths, SMALL, place).rows) < 4
    images, rows, _ = decode_files(paths, SMALL, place)
    assert rows == [0, 1, 2, 3]
    np.testing.assert_array_equal(images, decode_files(paths, SMALL).images)


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + b"?", lambda _: b""])
def test_damage_is_decoded_anew_and_repaired(damage, paths, place, decoded):
    expected = decode_files(paths, SMALL, place).images
    (entry,) = entries(place)
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    decoded.clear()
    np.testing.assert_array_equal(decode_files(paths, SMALL, place).images, expected)
    assert (len(decoded), entry.read_bytes()) == (4, content)


def single_files(folder):
    """Files of folders that have entries of their own."""
    paths = [write_noise(folder / str(seed), 1, seed) / "0.png" for seed in range(40)]
    names = {next(iter(cache.entries_of([path], ""))): path for path in paths}
    return list(names.values())


def test_an_entry_under_another_name_is_not_used(tmp_path, place):
    one, other = single_files(tmp_path / "photos")[:2]
    decode_files([one], SMALL, place)
    (first,) = entries(place)
    decode_files([other], SMALL, place)
    (second,) = set(entries(place)) - {first}
    first.write_bytes(second.read_bytes())
    np.testing.assert_array_equal(decode_files([one], SMALL, place).images, decode_files([one], SMALL).images)


def test_least_recently_used_entries_are_removed(tmp_path, place, monkeypatch, decoded):
    paths = single_files(tmp_path / "photos")[:4]
    for number, path in enumerate(paths[:3]):
        decode_files([path], SMALL, place)
        os.utime(max(entries(place), key=lambda entry: entry.stat().st_mtime_ns), (number, number))
    (place / "mine.safetensors").write_bytes(bytes(10_000))
    decode_files([paths[0]], SMALL, place)  # used now
    monkeypatch.setattr(cache, "LIMIT", 3 * entries(place)[0].stat().st_size)
    decode_files([paths[3]], SMALL, place)
    decoded.clear()
    for path in (paths[0], paths[2], paths[3]):
        decode_files([path], SMALL, place)
    assert decoded == []
    decode_files([paths[1]], SMALL, place)
    assert len(decoded) == 1
    assert (place / "mine.safetensors").exists()


def test_too_large_images_are_not_kept(paths, place, monkeypatch):
    monkeypatch.setattr(cache, "FILES_LIMIT", 4 * 3 * 8 * 8 - 1)
    decode_files(paths, SMALL, place)
    assert not place.exists()
    decode_files(paths[:3], SMALL, place)
    assert len(entries(place)) == 1


def test_a_folder_that_cannot_be_used_is_no_cache(paths, tmp_path):
    expected = decode_files(paths, SMALL).images
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        np.testing.assert_array_equal(decode_files(paths, SMALL, place).images, expected)


def test_where_the_cache_is(tmp_path, monkeypatch):
    assert cache_folder() is None
    monkeypatch.setenv("CCFA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CCFA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ccfa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in cache_folder().parents


def test_folders_are_loaded_by_way_of_the_cache(paths, place, monkeypatch, decoded):
    write_noise(paths[0].parent / "ant", 3, seed=1)
    write_noise(paths[0].parent / "bee", 3, seed=2)
    for path in paths:
        path.unlink()
    monkeypatch.setenv("CCFA_CACHE", str(place))
    first = load(paths[0].parent, image_size=8)
    decoded.clear()
    second = load(paths[0].parent, image_size=8)
    assert decoded == []
    assert [one.fingerprint for one in first] == [one.fingerprint for one in second]
    shutil.rmtree(place)
    assert [one.fingerprint for one in load(paths[0].parent, image_size=8)] == [one.fingerprint for one in first]
    assert len(decoded) == 6
