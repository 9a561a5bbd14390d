"""Trackers that speak wandb's calls: every number once, in one run of the tracker, however often a run is stopped."""

import sys
import types
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from ccfa.experiments import Experiment, Run
from ccfa.reporting import showing, trackers
from ccfa.reporting.trackers import Tracker, watched
from ccfa.settings import Running
from toy_runs import Silent, toy_run

SWEEP = ("sweep", "finetune", "--ccfa", "off", "--scenario", "9,1", "--seeds", "0", "1", "--set", "epochs=0")


class Session:
    """A run of the invented tracker."""

    def __init__(self, **given):
        self.given, self.logged, self.num_finished = given, [], 0

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.num_finished += 1


@pytest.fixture(params=["wandb", "trackio", "swanlab"])
def tracker(request, monkeypatch):
    """An invented module in the place of a tracker; `sessions` are what `init` was called for."""
    module = types.ModuleType(request.param)
    module.sessions = []

    def init(**given):
        module.sessions.append(Session(**given))
        return module.sessions[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: "installed")
    return module


def tracked(path, name, **how):
    with watched(Run(path), Running(track=name, project="toys"), Silent()) as audience:
        return toy_run(path, audience=audience, checkpoint_minutes=0, **how)


def test_stopped_run_goes_on_and_repeats_nothing(tmp_path, tracker, fail):
    path = tmp_path / "run"
    for fault in ("step:4:raise", "step:11:raise", ""):
        fail(fault)
        with suppress(RuntimeError):
            report = tracked(path, tracker.__name__)
    first, *others = tracker.sessions
    assert len(others) == 2
    for other in others:
        assert {**other.given, "config": None} == {**first.given, "config": None}, "the same run of the tracker"
    assert first.given["project"] == "toys"
    assert first.given["name"].startswith("run")
    assert first.given["config"]["method"] == "podnet"
    assert all(session.num_finished == 1 for session in tracker.sessions)
    told = [entry for session in tracker.sessions for entry in session.logged]
    steps = [step for step, _ in told]
    lines = Run(path).read_epochs()
    assert steps == list(range(1, len(lines) + len(report.num_seen) + 1))
    stages = [values for _, values in told if "stage/accuracy" in values]
    assert [values["stage/accuracy"] for values in stages] == pytest.approx(report.overall)
    assert "stage/old_accuracy" not in stages[0], "nothing is old in the first stage"
    epochs = [values for _, values in told if "stage/accuracy" not in values]
    for line, values in zip(lines, epochs, strict=True):
        assert values[f"{line['phase']}/loss"] == line["loss"]
        assert values[f"{line['phase']}/lr"] == line["lr"]


def test_tracker_of_a_continued_run_learns_what_was_before(tmp_path, tracker, fail):
    path = tmp_path / "run"
    fail("step:11:raise")
    with suppress(RuntimeError):
        toy_run(path, checkpoint_minutes=0)
    fail("")
    report = tracked(path, tracker.__name__)
    (session,) = tracker.sessions
    steps = [step for step, _ in session.logged]
    assert steps == list(range(1, len(Run(path).read_epochs()) + len(report.num_seen) + 1))


def test_failing_tracker_does_not_end_the_run(tmp_path, tracker):
    def init(**given):
        raise ConnectionError("no network")

    tracker.init = init
    with pytest.warns(UserWarning, match="no network") as told:
        assert tracked(tmp_path / "run", tracker.__name__).finished
    assert len([one for one in told if "no network" in str(one.message)]) == 1


def test_other_project_is_another_run(tmp_path, tracker):
    toy_run(tmp_path / "run")
    for project in ("a", "b", "a"):
        one = Tracker(Run(tmp_path / "run"), Silent(), tracker.__name__, project)
        one._begin()
    first, second, third = (session.given.get("id", session.given["name"]) for session in tracker.sessions)
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_sweep_has_one_run_each(call, tracker):
    code, _, err = call(*SWEEP, "--track", "wandb", "--project", "p", "--out", "out", "--at-once", "2")
    assert (code, err) == (0, "")
    assert {session.given["config"]["seed"] for session in tracker.sessions} == {0, 1}
    assert all(session.num_finished == 1 and len(session.logged) == 2 for session in tracker.sessions)


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_only_process_0_tracks(tracker, tmp_path, monkeypatch):
    second = SimpleNamespace(rank=1, number=2)
    followed = []
    monkeypatch.setattr(showing, "joined", lambda device: nullcontext(second))
    monkeypatch.setattr(showing, "follow", lambda running, processes: followed.append(processes))
    showing.run(Experiment("finetune"), tmp_path / "run", Running(device="cpu", track="wandb"))
    assert followed == [second]
    assert tracker.sessions == []


@pytest.mark.parametrize("tracker", ["swanlab"], indirect=True)
def test_swanlab_takes_one_run_at_a_time(call, tracker, tmp_path):
    code, _, err = call(*SWEEP, "--track", "swanlab", "--at-once", "2")
    assert code == 2
    assert "--at-once" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trackio", "wandb", "swanlab"])
def test_missing_tracker_is_named_before_anything_is_done(call, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for verb in (["run", "podnet"], ["sweep", "podnet"], ["resume", "run"]):
        code, _, err = call(*verb, "--track", name)
        assert code == 2
        assert ("[trackio]'," if name == "trackio" else f"pip install {name},") in err
    assert list(tmp_path.iterdir()) == []


def test_trackio_stores_every_number_once(tmp_path, monkeypatch, fail):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    path = tmp_path / "run"
    for fault in ("step:11:raise", ""):
        fail(fault)
        with suppress(RuntimeError):
            report = tracked(path, "trackio")
    (name,) = SQLiteStorage.get_runs("toys")
    steps = [record["step"] for record in SQLiteStorage.get_logs("toys", name)]
    assert steps == list(range(1, len(Run(path).read_epochs()) + len(report.num_seen) + 1))
