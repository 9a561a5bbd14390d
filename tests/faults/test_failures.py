"""Runs that are stopped or fail in this process, and end as if they had not been."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load

from ccfa.errors import DivergedError, ModelError, Notice, Stopped
from ccfa.experiments import Run
from ccfa.experiments.running import Stop
from ccfa.files import read_tensors, write_tensors
from digests import run_digest
from dying import STEPS, checkpoints
from toy_runs import Silent, StopAfter, toy_resolved, toy_run
from zoo import write_noise


def test_stopped_after_every_so_many_steps_it_ends_the_same(place, undisturbed):
    path, resolved, messages = place / "run", toy_resolved(), []
    for number in range(3, 100):  # longer each time: an evaluation is done again from its beginning
        try:
            report = toy_run(path, resolved, stop=StopAfter(number), checkpoint_minutes=1000)
            break
        except Stopped as stopped:
            messages.append(stopped.message)
        assert Run(path).status["state"] == "interrupted"
    assert "stage 1, phase main, epoch 2" in messages[0]
    assert len(messages) > 3
    assert all(f"ccfa resume {path}" in message for message in messages)
    assert run_digest(path) == undisturbed
    rows = (path / "stages.csv").read_text().splitlines()[1:]
    assert report.seconds == pytest.approx(sum(float(row.split(",")[-1]) for row in rows), abs=0.5)


def test_an_error_leaves_a_traceback_and_finished_stages_stay(place, undisturbed, fail):
    path = place / "run"
    for fault in ("step:9:raise", "evaluate:2:raise"):
        fail(fault)
        with pytest.raises(RuntimeError):
            toy_run(path)
        assert Run(path).status["state"] == "failed"
    Run(path).set_status("finished")
    assert not Run(path).is_finished(), "the report decides"
    audience = Silent()
    toy_run(path, audience=audience)
    assert audience.stages == [0, 1, 2]
    assert audience.num_batches == STEPS.count((2, "main")) + STEPS.count((2, "balanced"))
    errors = (path / "errors.txt").read_text()
    assert errors.count("Traceback") == 2
    assert "RuntimeError" in errors
    assert run_digest(path) == undisturbed


@pytest.mark.parametrize(
    ("step", "minutes", "stop", "where"),
    [(7, 0, None, (1, 1)), (1, 1000, Stop(max_minutes=0), (0, 0)), (1, 1000, None, (0, 0))],
    ids=["checkpoint due", "stopped", "epoch"],
)
def test_training_that_diverges_keeps_finite_checkpoints(place, undisturbed, fail, step, minutes, stop, where):
    path = place / "run"
    fail(f"step:{step}:nan")
    with pytest.raises(DivergedError, match=f"stage {where[0] + 1}, phase main, epoch {where[1] + 1}"):
        toy_run(path, stop=stop, checkpoint_minutes=minutes)
    assert Run(path).status["state"] == "failed"
    assert "phase main" in (path / "errors.txt").read_text()
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    assert (diagnosis["stage"], diagnosis["epoch"]) == where
    assert {"classification", "loss"} <= diagnosis["losses"].keys()
    assert "NaN" in diagnosis["largest_weights"].values()
    for stored in checkpoints(path):
        assert all(tensor.isfinite().all() for tensor in load(stored.read_bytes()).values())
    toy_run(path)
    assert run_digest(path) == undisturbed


def test_another_environment_is_noted(place):
    resolved = toy_resolved()
    with warnings.catch_warnings(action="error", category=Notice):
        for _ in range(2):  # the second time in the same environment
            with pytest.raises(Stopped):
                toy_run(place / "run", resolved, stop=StopAfter(0))
    run = Run(place / "run")
    run.write_json("environment.json", {**run.environment, "torch": "0.4.1"})
    with pytest.warns(Notice, match=r"torch +\"0\.4\.1\" +\"\d"), pytest.raises(Stopped):
        toy_run(run.path, resolved, stop=StopAfter(0))
    (resumed,) = run.environment["resumed"]
    assert resumed["differences"]["torch"] == ["0.4.1", str(torch.__version__)]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_damaged_checkpoint_costs_only_time(killed, undisturbed, kept):
    for path in checkpoints(killed)[kept:]:
        path.write_bytes(b"")
    with pytest.warns(Notice, match="damaged-"):
        toy_run(killed)
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


CONTRADICTIONS = {
    "text as a length": lambda tensors, state: state.update(log_lengths="x"),
    "no stage": lambda tensors, state: state["learner"].pop("stage"),
    "other classes": lambda tensors, state: state["learner"].update(num_classes_stored=99),
    "rows of another class": lambda tensors, state: tensors["memory.0"].copy_(tensors["memory.1"]),
    "no weights": lambda tensors, state: [tensors.pop(name) for name in list(tensors) if "conv" in name],
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_checkpoint_that_contradicts_itself_is_refused(killed, change):
    newest = checkpoints(killed)[-1]
    tensors, facts = read_tensors(newest)
    change(tensors, facts["state"])
    write_tensors(newest, tensors, facts)
    before = (killed / "metrics.jsonl").read_bytes()
    with pytest.raises(ModelError):
        toy_run(killed)
    assert (killed / "metrics.jsonl").read_bytes() == before
