import json
import threading
from dataclasses import replace

import pytest
import torch

from ccfa.data import load
from ccfa.errors import DivergedError, LockedError, Stopped, UsageError
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.plan import Plan
from ccfa.experiments.run_directory import locked
from ccfa.experiments.stopping import Stop
from ccfa.experiments.sweep import sweep
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration

CPU = torch.device("cpu")
BASE = Experiment("", scenario="6,2,2", options={"epochs": "1"})
SMALL = Plan(("finetune", "replay"), BASE, ccfa=(False,), seeds=(0, 1))
NAMES = [experiment.name for experiment in SMALL.experiments()]


class Audience:
    """Keeps how many epochs it saw, and can end the run at the first."""

    def __init__(self, error=None):
        self.error = error
        self.num_epochs = 0

    def on_batch(self, progress, losses):
        pass

    def on_epoch(self, progress, losses, lr, seconds):
        self.num_epochs += 1
        if self.error:
            raise self.error

    def on_stage(self, stage, result):
        pass


def swept(plan, out, at_once=1, errors=None, **options):
    """What came of it, and who watched each run that was made."""
    watching = {}

    def audience(resolved, directory):
        name = resolved.experiment.name
        assert len(resolved.stages) == 3
        assert directory.path == out / name
        watching[name] = Audience((errors or {}).get(name))
        return watching[name]

    found = sweep(
        plan.experiments(),
        out,
        None,
        CPU,
        Acceleration(),
        at_once,
        FirstStages(out / ".first-stages"),
        audience,
        **options,
    )
    return found, watching


def numbers(report):
    return report.num_seen, report.overall, report.rules


def networks(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/networks/*"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, *swept(SMALL, out)


@pytest.mark.parametrize("option", ["ccfa.count", "epochs"])
def test_a_wrong_value_is_refused_before_anything_runs(tmp_path, option):
    plan = Plan(("replay",), ccfa=(True,), seeds=(0,), axes={option: ("1", "many")})
    with pytest.raises(UsageError, match="expected a whole number, got 'many'"):
        swept(plan, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reports_are_found_by_the_name_of_their_run(finished):
    out, found, watching = finished
    assert (list(found.reports), found.refused, found.errors) == (NAMES, {}, {})
    for experiment, report in zip(SMALL.experiments(), found.reports.values(), strict=True):
        stored = report.config["experiment"]
        assert (stored["method"], stored["seed"], report.finished) == (experiment.method, experiment.seed, True)
        assert report.num_seen == [6, 8, 10]
    assert {path.name for path in out.iterdir()} == {*watching, ".first-stages", ".lock"}
    assert watching.keys() == {*NAMES}


def test_the_data_are_loaded_once(tmp_path, monkeypatch):
    loaded, trained = [], []

    def counted(name, *arguments, **options):
        loaded.append(name)
        return load(name, *arguments, **options)

    def recorded(self, method, train, **options):
        trained.append(train.images)
        made(self, method, train, **options)

    made = Learner.__init__
    monkeypatch.setattr("ccfa.data.load", counted)
    monkeypatch.setattr(Learner, "__init__", recorded)
    plan = replace(SMALL, base=replace(BASE, validation=0.2), orders=("natural", "seed-1"), seeds=(0,))
    assert len(swept(plan, tmp_path)[0].reports) == len(trained) == 4
    assert loaded == ["digits"]
    assert len({images.data_ptr() for images in trained}) == 1


def test_runs_that_can_share_a_first_stage_do(finished):
    out, _, watching = finished
    # finetune and replay begin alike: of each seed's two runs, the second trains two stages only
    assert sorted(audience.num_epochs for audience in watching.values()) == [2, 2, 3, 3]
    assert len(list((out / ".first-stages").iterdir())) == 2


def test_a_second_sweep_has_nothing_to_do(finished):
    out, found, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again, watching = swept(SMALL, out)
    assert watching == {}
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_runs_at_once_are_the_runs_one_by_one(finished, tmp_path):
    out, found, _ = finished
    at_once, _ = swept(SMALL, tmp_path, at_once=2)
    assert [*map(numbers, at_once.reports.values())] == [*map(numbers, found.reports.values())]
    assert networks(tmp_path) == networks(out)
    assert len(networks(out)) == 12


def test_where_ccfa_has_no_meaning_the_reason_is_told(tmp_path):
    found, watching = swept(Plan(("joint",), BASE, seeds=(0,)), tmp_path)
    assert watching.keys() == found.reports.keys()
    assert len(found.reports) == 1
    assert list(found.refused) == ["joint"]
    assert "joint" in found.refused["joint"]


def test_a_failing_run_does_not_lose_the_others(tmp_path):
    failing, *others = NAMES
    found, _ = swept(SMALL, tmp_path, errors={failing: DivergedError("on purpose")})
    assert list(found.reports) == others
    assert {name: str(error) for name, error in found.errors.items()} == {failing: "on purpose"}
    states = {
        path.parent.name: json.loads(path.read_text())["state"] for path in sorted(tmp_path.glob("*/status.json"))
    }
    assert states.pop(failing) == "failed"
    assert list(states.values()) == ["finished"] * 3

    found, watching = swept(SMALL, tmp_path)
    assert watching.keys() == {failing}
    assert list(found.reports) == NAMES  # in the plan's order, whichever was run first
    assert len(list(tmp_path.glob("*/status.json"))) == 4  # continued where it was


class StopAfter(Stop):
    """Asks all runs to stop at the n-th time any of them asks."""

    def __init__(self, number):
        super().__init__()
        self.left = number
        self.lock = threading.Lock()

    def asked(self):
        with self.lock:
            self.left -= 1
            self.code = 130 if self.left < 0 else None
        return self.code


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_stopped_sweep_is_continued_by_repeating_it(tmp_path, finished, at_once):
    for number in (10, 40):
        with pytest.raises(Stopped, match="Repeat the command") as stopped:
            swept(SMALL, tmp_path, at_once, stop=StopAfter(number), checkpoint_minutes=1000)
        assert stopped.value.code == 130
    saved = list(tmp_path.glob("*/checkpoints/0*"))
    assert saved
    assert list(swept(SMALL, tmp_path, at_once)[0].reports) == NAMES
    assert networks(tmp_path) == networks(finished[0])


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_unexpected_error_of_one_run_does_not_lose_the_others(tmp_path, at_once):
    failing, *others = NAMES
    ended = []
    found, _ = swept(SMALL, tmp_path, at_once, {failing: ZeroDivisionError("a mistake of mine")}, on_end=ended.append)
    assert list(found.reports) == others
    error = found.errors[failing]
    traceback = tmp_path / failing / "errors.txt"
    assert str(error) == f"ZeroDivisionError: a mistake of mine. The traceback is in {traceback}."
    assert error.exit_code == 1
    assert "in on_epoch" in traceback.read_text()
    assert [outcome.error for outcome in ended if outcome.job.directory.path.name == failing] == [error]


def test_a_second_sweep_in_a_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("ccfa.experiments.sweep.resolve", lambda *arguments: pytest.fail("read data"))
    with locked(tmp_path), pytest.raises(LockedError, match=f"{tmp_path} is being written by another process"):
        swept(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_sweep_holds_its_folder_until_its_end(tmp_path):
    held = []

    def second(outcome):
        with pytest.raises(LockedError):
            swept(SMALL, tmp_path)
        held.append(outcome)

    swept(SMALL, tmp_path, on_end=second)
    assert len(held) == 4
    with locked(tmp_path):
        pass


def test_runs_that_were_stopped_are_told_of_too(tmp_path):
    ended = []
    with pytest.raises(Stopped):
        swept(SMALL, tmp_path, stop=StopAfter(10), on_end=ended.append)
    assert [type(outcome.error) for outcome in ended] == [Stopped]
