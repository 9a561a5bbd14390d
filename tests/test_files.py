"""One reader, one writer, one format for tensors: whatever is damaged or hostile is refused with its name."""

import io
import os
import pickle
import random
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import fuzzing
from ccfa import files
from ccfa.errors import CcfaError, ModelError, ResourceError
from ccfa.files import (
    STALE_SECONDS,
    read_arrays,
    read_file,
    read_json,
    read_tensors,
    require_place,
    sync,
    write_arrays,
    write_atomically,
    write_tensors,
)
from children import started, wait
from commands import contents

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "rows": torch.tensor([3, 1]), "half": torch.ones(3).bfloat16()}
FACTS = {"number": 2, "text": "ü", "nested": {"list": [1, None]}}


@pytest.fixture
def stored(tmp_path):
    write_tensors(tmp_path / "t.safetensors", TENSORS, FACTS)
    return tmp_path / "t.safetensors"


def test_files_of_any_size_are_not_read_into_memory(stored, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ModelError, match=r"file has 5 bytes"):
        read_file(tmp_path / "file", 4)
    os.truncate(stored, files.TENSOR_LIMIT + 1)
    with pytest.raises(ModelError, match="bytes"):
        read_tensors(stored)


@pytest.mark.parametrize("kind", ["pipe", "endless", "link", "folder", "missing"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.symlink_to("/dev/zero" if kind == "endless" else __file__)
    with pytest.raises(ModelError, match=kind):
        read_file(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' * 100_000])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_writing_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first, and longer")
    write_atomically(path, "söcond \udcff")
    assert path.read_bytes() == "söcond ?".encode()
    write_atomically(path, b"\x00\xff")
    assert contents(tmp_path) == {"a.json": b"\x00\xff"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(ResourceError, match=r"a\.json: No space left on device"):
        write_atomically(path, "new")
    assert contents(tmp_path) == {"a.json": b"old"}
    monkeypatch.setattr(Path, "unlink", fail)  # the disk fails again while the temporary file is removed
    with pytest.raises(ResourceError, match=r"a\.json"):
        write_atomically(path, "new")


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "a", "x")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder that has the name


def test_writers_with_one_process_number_do_not_meet(tmp_path, monkeypatch):
    path = tmp_path / "shared"
    large = [bytes([number]) * 300_000 for number in range(2)]

    def write(number):
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
        for _ in range(20):
            write_atomically(path, large[number])

    processes = [started(lambda number=number: write(number)) for number in range(2)]
    while not path.exists():
        pass
    for _ in range(50):
        assert path.read_bytes() in large
    assert [wait(process) for process in processes] == [0, 0]


def test_what_killed_writers_left_is_removed_by_the_next_write(tmp_path):
    for name, age in ((".table.csv.0a.tmp", STALE_SECONDS + 60), (".table.csv.0b.tmp", 60), (".mine", 10**6)):
        (tmp_path / name).write_text("half")
        changed = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (changed, changed))
    write_atomically(tmp_path / "other.csv", "whole")
    assert sorted(contents(tmp_path)) == [".mine", ".table.csv.0b.tmp", "other.csv"]  # one may still be written


def test_a_file_system_that_cannot_flush_folders_is_used(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    for path in (Path("/dev/null/run"), tmp_path / ("n" * 300)):
        with pytest.raises(ResourceError, match="Could not create"):
            require_place(path)
    require_place(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []


def test_arrays_come_back(tmp_path):
    arrays = {"a": np.arange(5), "b": np.eye(2, dtype=np.float32)}
    write_arrays(tmp_path / "a.npz", arrays)
    found = read_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    with pytest.raises(ModelError, match="too many"):
        read_arrays(tmp_path / "a.npz", limit=10)


def test_tensors_come_back_with_their_facts(stored, tmp_path):
    tensors, facts = read_tensors(stored)
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    write_tensors(tmp_path / "again", TENSORS, FACTS)
    assert (tmp_path / "again").read_bytes() == stored.read_bytes()


def test_every_change_of_tensors_is_found(stored):
    content = stored.read_bytes()
    source = random.Random(1993)
    changed = [content[: len(content) * point // 64] for point in range(64)]
    changed += [content[:-1], content + b"\0", b"\n" + content, content[1:], save(TENSORS)]
    for position in [*range(8), *(source.randrange(len(content)) for _ in range(300))]:
        changed.append(bytearray(content))
        changed[-1][position] ^= 1 << source.randrange(8)
    for damaged in changed:
        stored.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"t\.safetensors"):
            read_tensors(stored)


class Canary:
    """Would make a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_never_run(stored, tmp_path):
    canary, modern, zipped = Canary(tmp_path / "canary"), io.BytesIO(), io.BytesIO()
    torch.save({"a": canary}, modern)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.npy", pickle.dumps(canary))
    both = save(TENSORS) + modern.getvalue()  # a safetensors file at its head, a zip at its tail
    for bomb in (pickle.dumps({"a": canary}), modern.getvalue(), zipped.getvalue(), both):
        stored.write_bytes(bomb)
        for read in (read_tensors, read_arrays, read_json):
            with pytest.raises(ModelError):
                read(stored)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.soak)])
def test_mutated_files_are_read_or_refused(stored, tmp_path, seconds):
    write_arrays(tmp_path / "a.npz", {"a": np.arange(50)})
    contents = [stored.read_bytes(), (tmp_path / "a.npz").read_bytes()]

    def read(changed):
        stored.write_bytes(changed)
        for reader in (read_tensors, read_arrays):
            with suppress(CcfaError):
                reader(stored)

    assert fuzzing.fuzz(contents, read, seconds) > 50
