"""Checkpoints that are cut, changed, forged or of something else: refused, or passed over with a word."""

import io
import json
import os
import pickle
import random
import shutil
import tarfile

import pytest
import torch
from safetensors.torch import save

from ccfa.errors import DivergedError, ModelError, Notice, ResourceError
from ccfa.experiments.checkpoint import MANIFEST, STATE, TENSORS, Checkpoints, _canonical, _facts, _manifest, _sealed

CONFIG = {"experiment": {"method": "podnet", "seed": 0}, "resolved": {"class_order": [0, 1, 2]}}
FILES = [TENSORS, STATE, MANIFEST]


def value(number):
    return {"weights": torch.full((3, 5), float(number)), "rows": torch.arange(4), "empty": torch.empty(0, 7)}


@pytest.fixture
def stored(tmp_path):
    """Two checkpoints: the numbers 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG)
    for number in (1, 2):
        checkpoints.save(value(number), {"number": number})
    return checkpoints


def forged(checkpoints, number, content):
    """Put other content into a checkpoint, with a manifest that fits it."""
    path = checkpoints.path(number)
    data = {name: content.get(name, (path / name).read_bytes()) for name in (TENSORS, STATE)}
    for name, text in data.items():
        (path / name).write_bytes(text)
    (path / MANIFEST).write_bytes(_canonical(_sealed(_manifest(checkpoints.config, data))))


def assert_falls_back(checkpoints):
    with pytest.warns(Notice, match=r"set aside as damaged-000002, and the one before it is used"):
        checkpoint = checkpoints.load()
    assert checkpoint.number == 1
    assert checkpoint.state["number"] == 1
    assert torch.equal(checkpoint.tensors["weights"], value(1)["weights"])
    assert checkpoints.numbers() == [1]


def test_what_was_stored_comes_back(stored):
    checkpoint = stored.load()
    assert checkpoint.number == 2
    assert checkpoint.state == {"config": CONFIG, "number": 2}
    assert checkpoint.tensors.keys() == value(2).keys()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in value(2).items())


def test_nothing_stored_is_nothing_to_continue(tmp_path):
    assert Checkpoints(tmp_path / "none", CONFIG).load() is None


def test_the_last_two_are_kept_and_a_finished_run_keeps_one(stored):
    stored.save(value(3), {})
    assert stored.numbers() == [2, 3]
    (stored.folder / ".tmp-000004-1").mkdir()
    stored.prune(1)
    assert os.listdir(stored.folder) == ["000003"]


def test_the_same_state_makes_the_same_bytes(stored):
    stored.save(value(2), {"number": 2})
    for name in FILES:
        assert (stored.path(2) / name).read_bytes() == (stored.path(3) / name).read_bytes()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", ["empty", "half", "minus one", "plus one", "in front", "missing", "a link", "a folder"]
)
def test_a_damaged_file_is_found_and_the_checkpoint_before_is_used(stored, tmp_path, name, damage):
    path = stored.path(2) / name
    data = path.read_bytes()
    path.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a folder":
        path.mkdir()
    elif damage != "missing":
        changed = {"empty": b"", "half": data[: len(data) // 2], "minus one": data[:-1]}
        changed |= {"plus one": data + b"x", "in front": b"x" + data}
        path.write_bytes(changed[damage])
    assert_falls_back(stored)


def test_every_flipped_bit_is_found(stored):
    draw = random.Random(0)
    original = {name: (stored.path(2) / name).read_bytes() for name in FILES}
    for _ in range(300):
        name = draw.choice(FILES)
        data = bytearray(original[name])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (stored.path(2) / name).write_bytes(data)
        with pytest.raises(ModelError):
            stored._verified(stored.path(2))
        (stored.path(2) / name).write_bytes(original[name])
    stored._verified(stored.path(2))


def test_files_of_two_checkpoints_are_not_mixed(stored):
    shutil.copy(stored.path(1) / TENSORS, stored.path(2) / TENSORS)
    assert_falls_back(stored)


def test_a_file_that_the_manifest_does_not_name_is_not_tolerated(stored):
    (stored.path(2) / "extra.bin").write_bytes(b"")
    assert_falls_back(stored)


def test_a_manifest_cannot_name_files_elsewhere(stored, tmp_path):
    (tmp_path / "secret").write_bytes((stored.path(2) / STATE).read_bytes())
    manifest = json.loads((stored.path(2) / MANIFEST).read_text())
    manifest["files"]["../../secret"] = manifest["files"].pop(STATE)
    del manifest["sha256"]
    (stored.path(2) / MANIFEST).write_bytes(_canonical(_sealed(manifest)))
    assert_falls_back(stored)


def test_with_none_left_the_run_starts_from_the_beginning(stored):
    for number in (1, 2):
        (stored.path(number) / STATE).write_bytes(b"")
    with pytest.warns(Notice, match="the run starts from the beginning"):
        assert stored.load() is None


def test_numbers_go_on_after_a_damaged_one(stored):
    (stored.path(2) / STATE).write_bytes(b"")
    assert_falls_back(stored)
    stored.save(value(3), {})
    assert stored.load().number == 2
    assert (stored.folder / "damaged-000002").is_dir()


@pytest.mark.parametrize("change", [("experiment", "method", "afc"), ("resolved", "class_order", [2, 1, 0])])
def test_a_checkpoint_of_another_experiment_is_refused_with_the_difference(stored, change):
    group, name, new = change
    other = {**CONFIG, group: {**CONFIG[group], name: new}}
    with pytest.raises(ModelError, match=r"another experiment(.|\n)*\n +stored +now\n") as error:
        Checkpoints(stored.folder, other).load()
    assert f"{group}.{name}" in str(error.value)
    assert json.dumps(CONFIG[group][name]) in str(error.value)
    assert json.dumps(new) in str(error.value)
    assert stored.numbers() == [1, 2]


def test_a_checkpoint_of_another_format_is_refused_with_the_version(stored):
    manifest = json.loads((stored.path(2) / MANIFEST).read_text())
    del manifest["sha256"]
    (stored.path(2) / MANIFEST).write_bytes(_canonical(_sealed({**manifest, "format": 2, "ccfa": "9.9"})))
    with pytest.raises(ModelError, match=r"has format 2, written by ccfa 9\.9; ccfa \S+ reads format 1"):
        stored.load()


class Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def bombs(canary):
    bomb = Bomb(canary)
    whole = io.BytesIO()
    torch.save(bomb, whole)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo("data.pkl")
        info.size = len(pickle.dumps(bomb))
        tar.addfile(info, io.BytesIO(pickle.dumps(bomb)))
    return [*(pickle.dumps(bomb, protocol) for protocol in range(6)), whole.getvalue(), archive.getvalue()]


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("name", [TENSORS, STATE])
def test_a_pickle_with_a_valid_manifest_is_refused_and_not_run(stored, tmp_path, kind, name):
    forged(stored, 2, {name: bombs(tmp_path / "canary")[kind]})
    assert_falls_back(stored)
    assert not (tmp_path / "canary").exists()


def header(content, data=b"", length=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape, offsets, kind="F32"):
    return {"x": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        header({}, length=2**63),
        header({}, length=2**30),
        header({}, length=0),
        header(b"[" * 100_000),
        header(b'{"x":' * 100_000),
        header(b"\xff\xfe"),
        header(entry([2], [0, 8])),
        header(entry([2], [0, 4]), b"\0" * 8),
        header(entry([10**12], [0, 8]), b"\0" * 8),
        header(entry([2**63, 2**63], [0, 8]), b"\0" * 8),
        header(entry([-2], [0, 8]), b"\0" * 8),
        header(entry([2], [-8, 0]), b"\0" * 8),
        header(entry([2], [8, 0]), b"\0" * 8),
        header(entry([2], [0, 8], "F1024"), b"\0" * 8),
        header({**entry([2], [0, 8]), "y": entry([2], [4, 12])["x"]}, b"\0" * 12),
        header(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":1}', b"\0" * 4),
    ],
)
def test_a_hostile_header_is_refused(stored, content):
    forged(stored, 2, {TENSORS: content})
    assert_falls_back(stored)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"1", b"\xff"])
def test_a_hostile_state_is_refused(stored, content):
    forged(stored, 2, {STATE: content})
    assert_falls_back(stored)


def test_values_that_are_not_finite_are_never_stored(stored):
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DivergedError, match="weights"):
            stored.save({**value(3), "weights": torch.tensor([1.0, bad])}, {})
    assert stored.numbers() == [1, 2]


def test_values_that_are_not_finite_are_refused_when_found(stored):
    forged(stored, 2, {TENSORS: save({"weights": torch.tensor([float("nan")])})})
    with pytest.raises(DivergedError, match=r"000002 holds values of weights"):
        stored.load()


def test_where_nothing_can_be_written_the_last_one_stays(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"Could not store checkpoint 1 .* needs [\d,]+ bytes"):
        Checkpoints(tmp_path / "file" / "checkpoints", CONFIG).save(value(1), {})


def test_a_file_of_any_size_is_not_read_into_memory(stored):
    """The manifest says how large it is; what is larger, here by a hole of a terabyte, is not even read."""
    os.truncate(stored.path(2) / TENSORS, 2**40)
    assert_falls_back(stored)


def test_a_manifest_cannot_ask_for_more_than_the_cap(stored):
    path = stored.path(2)
    os.truncate(path / TENSORS, 2**40)
    facts = {TENSORS: {"size": 2**40, "sha256": ""}, STATE: _facts((path / STATE).read_bytes())}
    manifest = {**_manifest(CONFIG, {}), "files": facts}
    (path / MANIFEST).write_bytes(_canonical(_sealed(manifest)))
    assert_falls_back(stored)
