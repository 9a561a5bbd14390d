"""Runs that are stopped, killed or fail at every place, and end as if they had not been."""

import json
import warnings

import pytest
import torch

from ccfa.errors import DivergedError, ModelError, Notice, ResourceError, Stopped
from ccfa.experiments import Run
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.options import plain
from ccfa.experiments.running import speed_again
from ccfa.experiments.stopping import Stop
from ccfa.learning.acceleration import Acceleration
from digests import run_digest
from toy_runs import CPU, Silent, begun, toy_resolved, toy_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    audience = Silent()
    toy_run(path, audience=audience)
    return path, audience.num_batches


class StopAfter(Stop):
    """Asks to stop at the n-th time it is asked."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def asked(self):
        self.left -= 1
        return 143 if self.left < 0 else None


def test_stopped_after_every_so_many_steps_it_ends_the_same(tmp_path, whole):
    path, resolved, messages = tmp_path / "run", toy_resolved(), []
    for number in range(3, 100):  # longer each time: what is no step is done again from its beginning
        try:
            toy_run(path, resolved, stop=StopAfter(number), checkpoint_minutes=1000)
            break
        except Stopped as stopped:
            messages.append((stopped.code, stopped.message))
        assert Run(path).read_json("status.json")["state"] == "interrupted"
    assert len(messages) > 3
    assert all(code == 143 and f"ccfa resume {path}" in message for code, message in messages)
    assert run_digest(path) == run_digest(whole[0])


def test_a_stop_between_two_steps_is_saved_at_that_step(tmp_path):
    with pytest.raises(Stopped, match=r"Stopped at stage 1, phase main, epoch 1 of \d+; saved\. Continue with"):
        toy_run(tmp_path / "run", stop=StopAfter(0), checkpoint_minutes=1000)
    first, second = Silent(), Silent()
    toy_run(tmp_path / "run", audience=first)
    toy_run(tmp_path / "other", audience=second)
    assert first.num_batches == second.num_batches - 1
    assert first.stages == second.stages == [0, 1, 2]


def test_seconds_add_up_over_processes(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        toy_run(path, stop=StopAfter(0))
    stored = Run(path).load_checkpoint().state["stage_seconds"]
    assert stored > 0
    report = toy_run(path)
    assert report.seconds > stored
    rows = (path / "stages.csv").read_text().splitlines()[1:]
    assert report.seconds == pytest.approx(sum(float(row.split(",")[-1]) for row in rows), abs=0.5)


def test_finished_stages_are_shown_again_and_not_learned_again(tmp_path, fail):
    fail("evaluate:3:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run")
    audience = Silent()
    toy_run(tmp_path / "run", audience=audience)
    assert audience.stages == [0, 1, 2]
    assert audience.num_batches == 10  # of the last stage


def test_training_that_diverges_leaves_the_last_finite_checkpoint_and_a_diagnosis(tmp_path, whole, fail):
    path = tmp_path / "run"
    fail("step:6:nan")
    with pytest.raises(DivergedError, match=r"stage 2, phase main, epoch \d|not finite") as error:
        toy_run(path, checkpoint_minutes=0)
    assert error.value.exit_code == 6
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    assert "nan" in diagnosis["largest_weights"].values()
    toy_run(path)  # the fault was ours: from the checkpoint on, all is as it should be
    assert run_digest(path) == run_digest(whole[0])


@pytest.mark.parametrize(("stop", "minutes"), [(None, 0), (Stop(max_minutes=0), 1000)], ids=["due", "stopped"])
def test_what_a_checkpoint_finds_is_told_with_its_place(tmp_path, fail, stop, minutes):
    fail("step:3:nan" if stop is None else "step:1:nan")
    place = r"not finite.* found in stage 1, phase main, epoch \d of \d+, at a learning rate of 0\.1"
    with pytest.raises(DivergedError, match=place):
        toy_run(tmp_path / "run", stop=stop, checkpoint_minutes=minutes)
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert [diagnosis[name] for name in ("stage", "phase", "epoch")] == [0, "main", int(stop is None)]
    assert diagnosis["lr"] == pytest.approx(0.1)
    assert diagnosis["losses"].keys() == {"classification", "loss"}


def test_errors_survive_being_continued(tmp_path, whole, fail):
    for step in (9, 3):
        fail(f"step:{step}:raise")
        with pytest.raises(RuntimeError):
            toy_run(tmp_path / "run")
    toy_run(tmp_path / "run")
    assert (tmp_path / "run" / "errors.txt").read_text().count("RuntimeError: asked for at step") == 2
    assert len((tmp_path / "run" / "log.txt").read_text().splitlines()) == 3
    assert run_digest(tmp_path / "run") == run_digest(whole[0])


def test_a_diverged_epoch_tells_its_losses(tmp_path, fail):
    fail("step:1:nan")
    with pytest.raises(DivergedError, match=r"stage 1, phase main, epoch 1 of \d+, at a learning rate of"):
        toy_run(tmp_path / "run", checkpoint_minutes=1000)
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert diagnosis["losses"]["loss"] == "nan"
    assert diagnosis["stage"] == 0
    assert diagnosis["lr"] > 0
    assert not list((tmp_path / "run" / "checkpoints").glob("0*"))


def test_running_out_of_memory_can_be_continued(tmp_path, whole, fail):
    fail("step:7:oom")
    with pytest.raises(ResourceError, match=r"Out of memory .* --set batch_size=8"):
        toy_run(tmp_path / "run")
    toy_run(tmp_path / "run")
    assert run_digest(tmp_path / "run") == run_digest(whole[0])


def test_a_shared_first_stage_is_continued_and_then_shared(tmp_path, whole, fail):
    shared = FirstStages(tmp_path / "first")
    fail("step:3:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run", first_stages=shared, checkpoint_minutes=0)
    toy_run(tmp_path / "run", first_stages=FirstStages(tmp_path / "first"))
    audience = Silent()
    toy_run(tmp_path / "other", audience=audience, first_stages=FirstStages(tmp_path / "first"))
    assert run_digest(tmp_path / "run") == run_digest(whole[0])
    assert audience.num_batches < whole[1]


def test_other_surroundings_are_told_and_written_down(tmp_path):
    resolved = toy_resolved()
    directory = begun(
        tmp_path / "run", resolved.config, {"torch": "0.4.1", "threads": 1, "acceleration": {"precision": "float32"}}
    )
    with pytest.raises(Stopped):
        toy_run(directory.path, resolved, stop=StopAfter(2))
    with pytest.warns(Notice, match=r"last bits:(.|\n)*torch +\"0\.4\.1\" +\"\d"):
        toy_run(directory.path, resolved)
    (resumed,) = directory.read_json("environment.json")["resumed"]
    assert resumed["differences"]["torch"] == ["0.4.1", str(torch.__version__)]
    assert directory.report().environment["resumed"] == [resumed]


def test_the_same_surroundings_are_not_worth_a_word(tmp_path):
    with pytest.raises(Stopped):
        toy_run(tmp_path / "run", stop=StopAfter(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        toy_run(tmp_path / "run")


def test_a_run_goes_on_with_the_device_and_precision_it_began_with(tmp_path):
    resolved = toy_resolved()
    directory = begun(
        tmp_path / "run", resolved.config, {"torch_device": "cpu", "acceleration": {"precision": "float32"}}
    )
    assert speed_again(directory, "auto", None, True, True)[0] == CPU
    directory.write_json("environment.json", {"torch_device": "cuda:7", "acceleration": {"precision": "bf16"}})
    with pytest.raises(ResourceError, match="cuda:7"):
        speed_again(directory, "auto", None, True, True)
    assert speed_again(directory, "cpu", None, True, True)[1].precision == "float32"


@pytest.mark.parametrize("off", [{}, {"compile": False}, {"graph": False}, {"compile": False, "graph": False}], ids=str)
def test_what_was_switched_off_stays_off(tmp_path, monkeypatch, off):
    monkeypatch.setattr("ccfa.experiments.running.pick_device", lambda name: torch.device(name))
    first = Acceleration("bf16", **{"compile": True, "graph": True, **off})
    surroundings = {"torch_device": "cuda", "acceleration": plain(first)}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert speed_again(directory, "auto", None, True, True)[1] == first
    assert speed_again(directory, "auto", None, False, False)[1] == Acceleration("bf16", False, False)
    directory.write_json("environment.json", {"torch_device": "cpu", "acceleration": plain(Acceleration())})
    assert speed_again(directory, "cuda", None, True, True)[1] == Acceleration("bf16", True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["learner"].pop("stage"), "does not hold what it should"),
        (lambda state: state["learner"].update(num_classes_stored=99), "does not hold what it should"),
        (lambda state: state.update(rows=[]), "the stage"),
        (lambda state: state["learner"].update(num_auxiliary=3), "the number of classes"),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_refused(tmp_path, fail, monkeypatch, change, message):
    fail("evaluate:2:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run")
    load = Run.load_checkpoint

    def changed(self):
        stored = load(self)
        change(stored.state)
        return stored

    monkeypatch.setattr(Run, "load_checkpoint", changed)
    with pytest.raises(ModelError, match=message):
        toy_run(tmp_path / "run")
