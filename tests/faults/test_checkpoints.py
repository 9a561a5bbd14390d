"""Checkpoints and weights that are damaged, hostile or of something else: known before they are used."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import tarfile
import tempfile
import time
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import fuzzing
from ccfa.errors import CcfaError, DivergedError, ModelError, Notice
from ccfa.experiments import Experiment, RunDirectory, resolve
from ccfa.experiments.checkpoint import Checkpoints
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.weights import pack, unpack
from children import in_child, limit_memory
from digests import run_digest
from dying import checkpoints, die, status, stoppable_run
from toy_runs import toy_run
from toys import tiny

CONFIG = {"experiment": {"method": "toy", "seed": 0}, "resolved": {"class_order": [0, 1]}}
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "rows": torch.tensor([3, 1, 2])}
NAMES = ("MANIFEST.json", "state.json", "tensors.safetensors")
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def store(place):
    """Two checkpoints; the older one has the value 1, the newer one 2."""
    checkpoints = Checkpoints(place / "checkpoints", CONFIG)
    for value in (1, 2):
        checkpoints.save({**WEIGHTS, "a": WEIGHTS["a"] + value}, {"value": value})
    return checkpoints


def loaded(store):
    """The value that is found, and what was said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        found = store.load()
    return found and found.state["value"], [str(warning.message) for warning in caught]


def newest(store):
    return store.path(store.numbers()[-1])


def falls_back(store, saved):
    """Whether the damage is seen and the older checkpoint taken; the newer one is put back whole afterwards."""
    value, said = loaded(store)
    folder = store.path(2)
    for path in store.folder.glob("*000002"):
        shutil.rmtree(path)
    shutil.copytree(saved, folder)
    return value == 1 and len(said) == 1 and "000002" in said[0]


def canonical(content):
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


def seal(folder, **changes):
    """What someone would do who wants a changed checkpoint to be taken: a manifest that agrees with it."""
    manifest = json.loads((folder / "MANIFEST.json").read_bytes())
    del manifest["sha256"]
    for name in ("state.json", "tensors.safetensors"):
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest |= changes
    sealed = {**manifest, "sha256": hashlib.sha256(canonical(manifest)).hexdigest()}
    (folder / "MANIFEST.json").write_bytes(canonical(sealed))


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_cut_or_grown_are_seen(store, place, name):
    saved = shutil.copytree(newest(store), place / "saved")
    content = (saved / name).read_bytes()
    cuts = [content[: len(content) * point // 64] for point in range(64)]
    for changed in (*cuts, content[:-1], content + b"\0", content + b"junk", b"\n" + content, content[1:], b""):
        (newest(store) / name).write_bytes(changed)
        assert falls_back(store, saved), changed


def test_a_bit_flipped_anywhere_is_seen(store, place):
    saved = shutil.copytree(newest(store), place / "saved")
    source = random.Random(1993)
    for _ in range(500):
        path = newest(store) / source.choice(NAMES)
        content = bytearray(path.read_bytes())
        position, bit = source.randrange(len(content)), source.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        assert falls_back(store, saved), (path.name, position, bit)


def test_a_bit_flipped_in_a_network_is_seen(place):
    path = place / "stage-000.safetensors"
    content = pack(tiny("podnet").backbone(3))
    source = random.Random(1993)
    for position in [*range(8), *(source.randrange(len(content)) for _ in range(150))]:
        changed = bytearray(content)
        changed[position] ^= 1 << source.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=r"stage-000\.safetensors is damaged.*Mend it\."):
            unpack(path, "Mend it.")
    path.write_bytes(content)
    assert unpack(path, "")


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_missing_are_seen(store, name):
    (newest(store) / name).unlink()
    value, said = loaded(store)
    assert value == 1
    assert name in said[0]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"state.json": {}},
        {"state.json": {}, "tensors.safetensors": {}, "more": {}},
        {"../state.json": {}, "tensors.safetensors": {}},
        {"/etc/passwd": {}, "tensors.safetensors": {}},
        ["state.json"],
        None,
    ],
)
def test_a_manifest_that_lists_other_files_is_refused(store, files):
    seal(newest(store), files=files)
    value, said = loaded(store)
    assert value == 1
    assert "should name" in said[0]


def test_a_file_too_many_is_seen(store):
    (newest(store) / "more.bin").write_bytes(b"x")
    value, said = loaded(store)
    assert value == 1
    assert "more.bin" in said[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_checkpoint_is_seen(store, name):
    shutil.copy(store.path(1) / name, store.path(2) / name)
    value, _ = loaded(store)
    assert value == 1


def test_without_a_whole_checkpoint_the_run_starts_again_and_nothing_is_lost(place, undisturbed):
    assert die(place / "run", "step:9:kill") < 0
    for path in checkpoints(place / "run"):
        (path / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(Notice, match="starts from the beginning"):
        stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed
    assert sorted(path.name[:7] for path in (place / "run" / "checkpoints").glob("damaged-*"))


def test_a_run_can_be_renamed_copied_and_continued(place, undisturbed):
    assert die(place / "run", "step:9:kill") < 0
    shutil.copytree(place / "run", place / "elsewhere" / "copied", copy_function=shutil.copy)
    os.rename(place / "run", place / "renamed")
    for path in (place / "renamed", place / "elsewhere" / "copied"):
        stoppable_run(path)
        assert run_digest(path) == undisturbed


def test_a_finished_run_is_read_from_a_read_only_folder(place):
    toy_run(place / "run")
    before = {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")}
    (place / "seen").mkdir()
    bound = subprocess.run(["mount", "--bind", "-o", "ro", place / "run", place / "seen"], capture_output=True)
    folder = place / "run" if bound.returncode else place / "seen"
    try:
        assert RunDirectory(folder).report().finished
        assert RunDirectory(folder).read_exemplars(2)
        assert unpack(folder / "networks" / "stage-002.safetensors", "")
    finally:
        if bound.returncode == 0:
            subprocess.run(["umount", "-l", place / "seen"], check=True)
    assert {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")} == before


class Canary:
    """Would make a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def bombs(canary):
    """Files that execute code in those who load them carelessly."""
    for protocol in range(6):
        yield pickle.dumps({"a": Canary(canary)}, protocol)
    modern, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"a": Canary(canary)}, modern)
    torch.save({"a": Canary(canary)}, legacy, _use_new_zipfile_serialization=False)
    yield modern.getvalue()
    yield legacy.getvalue()
    with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w") as tar:
        member = tarfile.TarInfo("pickle")
        member.size = len(modern.getvalue())
        tar.addfile(member, io.BytesIO(modern.getvalue()))
    yield archive.getvalue()
    yield save(WEIGHTS) + modern.getvalue()  # a safetensors file at its head, a zip at its tail
    with zipfile.ZipFile(archive := io.BytesIO(), "w") as zipped:
        zipped.writestr("../../canary", b"x")
    yield archive.getvalue()


def test_pickles_in_any_disguise_are_refused_and_never_run(store, place):
    canary = place / "canary"
    saved = shutil.copytree(newest(store), place / "saved")
    shared = FirstStages(place / "shared")
    shared.folder.mkdir()
    for bomb in bombs(canary):
        for name in ("tensors.safetensors", "state.json"):
            (newest(store) / name).write_bytes(bomb)
            seal(newest(store))
            assert falls_back(store, saved)
        (newest(store) / "MANIFEST.json").write_bytes(bomb)
        assert falls_back(store, saved)
        shared.path("key").write_bytes(bomb)
        with pytest.raises(ModelError, match="Remove it to train that first stage again"):
            shared.load("key")
    assert not list(place.rglob("canary"))


def headers():
    """Heads of safetensors files that lie about what follows."""

    def tensor(**changes):
        return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}

    def file(header, content=b"\0" * 8):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content

    good = file(tensor())
    yield struct.pack("<Q", 2**63) + good[8:]
    yield struct.pack("<Q", 2**64 - 1) + good[8:]
    yield struct.pack("<Q", 10**9) + good[8:]
    yield struct.pack("<Q", 0) + good[8:]
    yield good[:8]
    yield b""
    yield file(b'{"a":' * 100_000)
    yield file(b"[" * 1_000_000)
    yield file(b"\xff\xfe")
    yield file(b"null")
    yield file(b"[]")
    yield file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 3}')
    for shape in ([-2], [2**63], [2**32, 2**32], [10**12], [3], [2, 2], ["2"], "2", [2.0], None, [0]):
        yield file(tensor(shape=shape))
    for offsets in ([8, 0], [0, 9], [-8, 0], [0, 2**63], [4, 12], [0], "0", None, [0, 8, 16], [0.0, 8.0]):
        yield file(tensor(data_offsets=offsets))
    for dtype in ("F7", "", None, 3, "O", "F64", "I8"):
        yield file(tensor(dtype=dtype))
    two = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    yield file({**two, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})
    yield file({**two, "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, b"\0" * 16)
    yield file(two, b"\0" * 16)


def test_lying_headers_are_refused_quickly_and_in_little_memory(store, place):
    saved = shutil.copytree(newest(store), place / "saved")

    def refused():
        limit_memory(10**9)
        began = time.monotonic()
        for number, content in enumerate(headers()):
            (newest(store) / "tensors.safetensors").write_bytes(content)
            seal(newest(store))
            assert falls_back(store, saved), (number, content[:80])
            path = place / "network"
            path.write_bytes(content)
            with pytest.raises(ModelError, match="damaged"):
                unpack(path, "")
            assert time.monotonic() - began < 5, number
            began = time.monotonic()

    in_child(refused)


@pytest.mark.parametrize("name", NAMES)
def test_links_out_of_a_checkpoint_are_not_followed(store, place, name):
    (place / "outside").write_bytes((newest(store) / name).read_bytes())
    (newest(store) / name).unlink()
    (newest(store) / name).symlink_to(place / "outside")
    value, said = loaded(store)
    assert value == 1
    assert "no plain file" in said[0]


def test_only_plain_numbers_are_checkpoints(store, place):
    for name in ("000009x", "9", "..", "../000009", "latest", "000003.tmp"):
        (store.folder / name).mkdir(exist_ok=True, parents=True)
    (store.folder / "000099").write_text("a file")
    value, said = loaded(store)
    assert value == 2
    assert "000099" in said[0]


def test_a_checkpoint_of_a_newer_format_names_the_version_it_needs(store):
    seal(newest(store), format=2, ccfa="9.1")
    with pytest.raises(ModelError, match=r"format 2, written by ccfa 9\.1; ccfa .* reads format 1"):
        store.load()


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
def test_checkpoints_of_every_released_format_are_read(place, folder):
    shutil.copytree(folder, place / "checkpoints")
    stored = Checkpoints(place / "checkpoints", CONFIG).load()
    assert stored.state["value"] == 1
    assert torch.equal(stored.tensors["rows"], WEIGHTS["rows"])


CHANGES = [
    {"method": "ucir"},
    {"ccfa": True},
    {"mix": "mixup"},
    {"scenario": "4,6"},
    {"order": "seed-1"},
    {"memory": 3},
    {"validation": 0.2},
    {"seed": 1},
    {"batch_seed": 1},
    {"options": {"backbone": "resnet32-ucir"}},
    {"options": {"lr": "0.2"}},
    {"options": {"epochs": "3"}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_checkpoint_of_another_experiment_is_refused_with_both_values(place, changes):
    stored = resolve(Experiment("podnet")).config
    Checkpoints(place / "checkpoints", stored).save(WEIGHTS, {"value": 1})
    other = resolve(Experiment(**{"method": "podnet", **changes})).config
    with pytest.raises(ModelError, match="is of another experiment") as error:
        Checkpoints(place / "checkpoints", other).load()
    (name,) = changes
    assert f"experiment.{name}" in str(error.value)
    assert checkpoints(place), "it is left where it is"


def test_a_run_on_other_data_is_not_continued(call, tmp_path, monkeypatch):
    from zoo import write_noise

    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / "photos" / name, 6, seed)
    words = ("--data", "photos", "--image-size", "8", "--set", "backbone=small", "epochs=1", "--out", "run")
    monkeypatch.setenv("CCFA_FAIL", "evaluate:2:sigterm")
    code, _, err = call("run", "finetune", *words)
    assert (code, "ccfa resume run" in err) == (143, True)
    monkeypatch.delenv("CCFA_FAIL")
    kept = (tmp_path / "photos" / "ant" / "0.png").read_bytes()
    shutil.copy(tmp_path / "photos" / "bee" / "0.png", tmp_path / "photos" / "ant" / "0.png")
    code, _, err = call("resume", "run")
    assert code == 4
    assert "cannot be continued" in err
    assert "resolved.fingerprints" in err
    (tmp_path / "photos" / "ant" / "0.png").write_bytes(kept)
    assert call("resume", "run")[0] == 0


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_mutated_checkpoints_are_read_or_refused(store, place, name, seconds):
    saved = shutil.copytree(newest(store), place / "saved")

    def read(content):
        (newest(store) / name).write_bytes(content)
        seal(newest(store))
        try:
            store.load()
        except CcfaError:
            pass
        finally:
            for path in store.folder.glob("*000002"):
                shutil.rmtree(path)
            shutil.copytree(saved, store.path(2))

    assert fuzzing.fuzz([(saved / name).read_bytes()], read, seconds) > 50


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_neither_stored_nor_loaded(store, value):
    bad = {**WEIGHTS, "a": torch.tensor([1.0, value])}
    with pytest.raises(DivergedError, match="values of a that are no finite numbers"):
        store.save(bad, {"value": 3})
    assert store.numbers() == [1, 2]
    (newest(store) / "tensors.safetensors").write_bytes(save(bad))
    seal(newest(store))
    with pytest.raises(DivergedError, match=r"000002 holds values of a that are no finite numbers"):
        store.load()


def tampered(path, change):
    """Change the tensors of a run's newest checkpoint and seal it again."""
    from safetensors.torch import load

    folder = checkpoints(path)[-1]
    tensors = load((folder / "tensors.safetensors").read_bytes())
    change(tensors)
    (folder / "tensors.safetensors").write_bytes(save(tensors))
    seal(folder)


@pytest.mark.parametrize("value", [None, -1, "x", [[]], {"metrics.jsonl": "x"}], ids=str)
@pytest.mark.parametrize("name", ["learner", "rows", "log_lengths", "seconds", "stage_seconds"])
def test_a_state_with_a_wrong_value_is_refused_or_harmless(place, stopped, name, value):
    shutil.copytree(stopped, place / "run")
    folder = checkpoints(place / "run")[-1]
    state = json.loads((folder / "state.json").read_bytes())
    state[name] = value
    if value is None:
        del state[name]
    (folder / "state.json").write_bytes(canonical(state))
    seal(folder)
    before = (place / "run" / "metrics.jsonl").read_bytes()
    with suppress(CcfaError):
        stoppable_run(place / "run")
    assert (place / "run" / "metrics.jsonl").read_bytes().startswith(before[:10])


@pytest.fixture(scope="module")
def stopped():
    """A run that was killed in its second stage."""
    with tempfile.TemporaryDirectory(prefix="ccfa-test-") as folder:
        assert die(Path(folder) / "run", "step:11:kill") < 0
        yield Path(folder) / "run"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors["memory.0"].add_(10**6), "the exemplars"),
        (lambda tensors: tensors["memory.0"].neg_(), "the exemplars"),
        (lambda tensors: tensors["memory.0"].copy_(tensors["memory.1"]), "the exemplars"),
        (lambda tensors: tensors.pop("memory.1"), "does not hold what it should"),
        (lambda tensors: tensors.update({"memory.0": torch.zeros(3)}), "the exemplars"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors) if "conv" in name], "another network|should"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(place, change, said):
    assert die(place / "run", "step:11:kill") < 0
    tampered(place / "run", change)
    with pytest.raises(ModelError, match=said):
        stoppable_run(place / "run")
    assert status(place / "run")["state"] != "finished"
