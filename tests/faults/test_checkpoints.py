"""Runs that move, and checkpoints that are whole but wrong: continued exactly, or refused."""

import os
import shutil
import subprocess
from contextlib import suppress

import pytest
import torch

from ccfa.errors import CcfaError, ModelError, Notice
from ccfa.experiments import Run
from ccfa.files import read_tensors, write_tensors
from digests import run_digest
from dying import checkpoints, die, status, stoppable_run
from toy_runs import toy_run
from zoo import write_noise


@pytest.fixture
def killed(place):
    """A run that was killed in its second stage."""
    assert die(place / "run", "step:11:kill") < 0
    return place / "run"


def test_a_run_can_be_renamed_copied_and_continued(killed, place, undisturbed):
    shutil.copytree(killed, place / "elsewhere" / "copied", copy_function=shutil.copy)
    os.rename(killed, place / "renamed")
    for path in (place / "renamed", place / "elsewhere" / "copied"):
        stoppable_run(path)
        assert run_digest(path) == undisturbed


def test_a_finished_run_is_read_from_a_read_only_folder(place):
    toy_run(place / "run")
    before = {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")}
    (place / "seen").mkdir()
    bound = subprocess.run(["mount", "--bind", "-o", "ro", place / "run", place / "seen"], capture_output=True)
    run = Run(place / "run" if bound.returncode else place / "seen")
    try:
        assert run.report().finished
        assert run.read_exemplars(2)
        assert run.network_weights(2)
    finally:
        if bound.returncode == 0:
            subprocess.run(["umount", "-l", place / "seen"], check=True)
    assert {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")} == before


def test_without_a_whole_checkpoint_the_run_starts_again(killed, undisturbed):
    for path in checkpoints(killed):
        path.write_bytes(b"")
    with pytest.warns(Notice, match="from the beginning"):
        stoppable_run(killed)
    assert run_digest(killed) == undisturbed


def test_a_run_on_other_data_is_not_continued(call, tmp_path, fail):
    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / "photos" / name, 6, seed)
    words = ("--data", "photos", "--image-size", "8", "--set", "backbone=small", "epochs=1", "--out", "run")
    fail("evaluate:2:sigterm")
    code, _, err = call("run", "finetune", *words)
    assert (code, "ccfa resume run" in err) == (143, True)
    fail("")
    first, other = (tmp_path / "photos" / name / "0.png" for name in ("ant", "bee"))
    kept = first.read_bytes()
    shutil.copy(other, first)
    code, _, err = call("resume", "run")
    assert code == 4
    assert "resolved.fingerprints" in err
    first.write_bytes(kept)
    assert call("resume", "run")[0] == 0


def rewritten(path, change):
    """Change tensors and state of a run's newest checkpoint, with a digest that fits."""
    newest = checkpoints(path)[-1]
    tensors, facts = read_tensors(newest)
    change(tensors, facts["state"])
    write_tensors(newest, tensors, facts)


@pytest.mark.parametrize("value", [None, -1, "x", [[]], {"metrics.jsonl": "x"}], ids=str)
@pytest.mark.parametrize("name", ["learner", "rows", "log_lengths", "seconds", "stage_seconds"])
def test_a_state_with_a_wrong_value_costs_no_log(killed, name, value):
    rewritten(killed, lambda tensors, state: state.pop(name) if value is None else state.update({name: value}))
    before = (killed / "metrics.jsonl").read_bytes()
    with suppress(CcfaError):
        stoppable_run(killed)
    assert (killed / "metrics.jsonl").read_bytes().startswith(before[:10])


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
def test_a_checkpoint_that_contradicts_itself_is_refused(killed, change, said):
    rewritten(killed, lambda tensors, state: change(tensors))
    with pytest.raises(ModelError, match=said):
        stoppable_run(killed)
    assert status(killed)["state"] != "finished"
