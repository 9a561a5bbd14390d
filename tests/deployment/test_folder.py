"""The model's folder: every state is whole, damage is noticed, and a killed writer leaves the old or the new model."""

import os
import shutil
import signal

import pytest
import torch
from PIL import Image

from ccfa.deployment import folder as folder_module
from ccfa.deployment.folder import Images, ModelFolder, State
from ccfa.errors import LockedError, ModelError, UsageError
from children import started, wait
from commands import contents

UPDATE = {
    "date": "2026-01-01",
    "new_classes": ["a"],
    "photos": 2,
    "held_out": 1,
    "measured_classes": 2,
    "accuracy": 1.0,
    "phases": [],
}


def state(number, num_classes=2):
    labels = torch.arange(2 * num_classes) // 2
    images = torch.full((2 * num_classes, 3, 4, 4), 10 * number, dtype=torch.uint8)
    images += torch.arange(2 * num_classes, dtype=torch.uint8)[:, None, None, None]
    config = {
        "state": number,
        "classes": [
            {"name": f"class {label}", "stage": 0, "images": 2, "memory": 2, "held_out": 1, "accuracy": 1.0}
            for label in range(num_classes)
        ],
        "experiment": {"method": "replay", "ccfa": False},
        "backbone": "small",
        "weights": "none",
        "head": "LinearHead",
        "rule": "logits",
        "preprocessing": {
            "channels": 3,
            "size": 4,
            "crop": 1.0,
            "interpolation": "bilinear",
            "mean": [0.5],
            "std": [0.5],
        },
        "calibration": {"error": None},
        "updates": [UPDATE] * number,
    }
    network = {"weight": torch.full((3,), float(number))}
    kept = Images(images, labels)
    return State(config, network, {"term0.x": torch.ones(2)}, f"card {number}", kept, Images(images[:1], labels[:1]))


def stored(path, *numbers):
    folder = ModelFolder(path)
    for number in numbers:
        with folder.held():
            folder.replace(state(number))
    return folder


def same(one, other):
    assert one.config == other.config
    assert torch.equal(one.network["weight"], other.network["weight"])
    for kept, wanted in ((one.memory, other.memory), (one.held_out, other.held_out)):
        assert torch.equal(kept.images, wanted.images)
        assert torch.equal(kept.labels, wanted.labels)
    return True


def test_what_was_written_is_read(tmp_path):
    folder = stored(tmp_path / "model", 1)
    assert same(folder.read(), state(1))
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".lock",
        "README.md",
        "config.json",
        "exemplars",
        "learner.safetensors",
        "model.safetensors",
    ]
    with Image.open(folder.path / "exemplars/memory/00001-class_1/00000.png") as file:
        assert file.size == (4, 4)


def test_undo_goes_back_one_state_at_a_time(tmp_path):
    folder = stored(tmp_path / "model", 1, 2, 3)
    assert folder.earlier() == [1, 2]
    for number in (2, 1):
        with folder.held():
            folder.undo()
        assert same(folder.read(), state(number))
    with folder.held(), pytest.raises(UsageError, match="no earlier state"):
        folder.undo()
    assert not list((folder.path / "history").iterdir())


def test_history_is_bounded(tmp_path):
    folder = ModelFolder(tmp_path / "model")
    for number in range(1, 6):
        with folder.held():
            folder.replace(state(number), keep=2)
    assert folder.earlier() == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("is_undo", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_kill_at_any_place_leaves_old_or_new_model(tmp_path, is_undo):
    """Each call that changes the disk is a place to die at."""
    original = stored(tmp_path / "original", 1, 2).path
    changes = ["replace", "link", "mkdir", "fsync", "rmdir", "unlink", "rename"]

    def change(path):
        folder = ModelFolder(path)
        with folder.held():
            folder.undo() if is_undo else folder.replace(state(3))

    def killed_at(place, path):
        passed = 0

        def counting(real):
            def call(*arguments, **options):
                nonlocal passed
                passed += 1
                if passed == place:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        def body():
            for name in changes:
                setattr(os, name, counting(getattr(os, name)))
            change(path)

        return wait(started(body))

    old, new = state(2), state(1 if is_undo else 3)
    seen = set()
    for place in range(1, 500):
        path = tmp_path / f"{place}"
        shutil.copytree(original, path)
        code = killed_at(place, path)
        found = ModelFolder(path).read()
        is_new = found.config["state"] == new.config["state"]
        assert same(found, new if is_new else old)
        seen.add(is_new)
        with ModelFolder(path).held():  # the next writer finishes
            pass
        assert same(ModelFolder(path).read(), found)
        assert not any((path / name).exists() for name in (".next", ".ready", ".discarded"))
        assert ModelFolder(path).earlier() == list(range(1, found.config["state"]))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == {False, True}
    assert code == 0
    assert place > 20


def test_every_flipped_bit_is_noticed(tmp_path):
    folder = stored(tmp_path / "model", 1)
    for name, content in contents(folder.path).items():
        if name in (".lock", "README.md"):
            continue
        for place in range(0, len(content), max(1, len(content) // 50)):
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            (folder.path / name).write_bytes(damaged)
            with pytest.raises(ModelError):
                folder.read()
        (folder.path / name).write_bytes(content)
    assert same(folder.read(), state(1))


def test_damage_in_the_history_is_noticed(tmp_path):
    folder = stored(tmp_path / "model", 1, 2)
    path = folder.path / "history/00001/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with folder.held(), pytest.raises(ModelError, match="digest"):
        folder.undo()
    assert same(folder.read(), state(2))


def test_exemplars_can_be_left_out(tmp_path):
    folder = stored(tmp_path / "model", 1)
    shutil.rmtree(folder.path / "exemplars")
    found = folder.read()
    assert found.memory is None
    assert torch.equal(found.network["weight"], state(1).network["weight"])


def test_a_missing_exemplar_is_damage(tmp_path):
    folder = stored(tmp_path / "model", 1)
    (folder.path / "exemplars/memory/00001-class_1/00000.png").unlink()
    with pytest.raises(ModelError, match=r"00000\.png"):
        folder.read()


def test_files_may_be_links_as_in_a_cache(tmp_path):
    folder = stored(tmp_path / "model", 1)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder.path / "model.safetensors", elsewhere)
    (folder.path / "model.safetensors").symlink_to(elsewhere)
    assert same(folder.read(), state(1))
    elsewhere.write_bytes(elsewhere.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match="digest"):
        folder.read()


@pytest.mark.parametrize("name", ["history", ".ready", ".next", ".discarded"])
def test_no_folder_elsewhere_is_changed(tmp_path, name):
    folder = stored(tmp_path / "model", 1)
    victim = stored(tmp_path / "victim", 1, 2).path
    before = contents(victim)
    (folder.path / name).symlink_to(victim)
    with pytest.raises(ModelError, match="link"), folder.held():
        folder.replace(state(2))
    assert contents(victim) == before


def test_foreign_files_in_the_history_stay(tmp_path):
    folder = stored(tmp_path / "model", 1, 2)
    (folder.path / "history" / "notes.txt").write_text("mine")
    with folder.held():
        folder.replace(state(3), keep=0)
    assert os.listdir(folder.path / "history") == ["notes.txt"]


def test_undo_and_reading_keep_the_whole_history(tmp_path):
    folder = ModelFolder(tmp_path / "model")
    for number in range(1, 10):
        with folder.held():
            folder.replace(state(number), keep=20)
    with folder.held():
        folder.undo()
    assert folder.earlier() == list(range(1, 8))


def test_a_damaged_state_can_be_undone(tmp_path):
    folder = stored(tmp_path / "model", 1, 2)
    (folder.path / "config.json").write_text("{}")
    with folder.held():
        folder.undo()
    assert folder.read().config["state"] == 1


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    folder = stored(tmp_path / "model", 1)
    before = contents(folder.path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_json", full)
    with pytest.raises(OSError, match="space"), folder.held():
        folder.replace(state(2))
    assert contents(folder.path) == before


def test_second_writer_is_refused(tmp_path):
    folder = stored(tmp_path / "model", 1)
    with folder.held(), pytest.raises(LockedError, match="another process"), ModelFolder(folder.path).held():
        pass


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(UsageError, match=r"cat\.jpg"):
        ModelFolder(tmp_path / "photos").require_unused()
    with pytest.raises(UsageError, match=r"cat\.jpg"), ModelFolder(tmp_path / "photos").held():
        pass
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(ModelError, match="is not a model"):
        ModelFolder(tmp_path / "photos").read()


def test_failed_first_state_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("model", "new/deep/model", "empty"):
        with pytest.raises(KeyError), ModelFolder(tmp_path / name).held():
            raise KeyError
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["empty"]
