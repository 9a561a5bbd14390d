import json
import threading
from itertools import product

import pytest
import torch

from ccfa.errors import DivergedError, LockedError, Stopped, UsageError
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.lock import locked
from ccfa.experiments.stopping import Stop
from ccfa.experiments.sweep import Plan, sweep
from ccfa.learning.acceleration import Acceleration
from ccfa.methods import METHODS

CPU = torch.device("cpu")
SMALL = Plan(("finetune", "replay"), ccfa=(False,), scenario="6,2,2", seeds=(0, 1), options={"epochs": "1"})


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
    """The cells, and who watched each run that was made."""
    watching = {}

    def audience(resolved, directory):
        name = resolved.experiment.name
        assert len(resolved.stages) == 3
        assert directory.path == out / name
        watching[name] = Audience((errors or {}).get(name))
        return watching[name]

    cells = sweep(
        plan, out, None, CPU, Acceleration(), at_once, FirstStages(out / ".first-stages"), audience, **options
    )
    return cells, watching


def numbers(report):
    return report.num_seen, report.overall, report.accuracy_matrix, report.metrics, report.overall_by_nearest_mean


def networks(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/networks/*"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, *swept(SMALL, out)


def test_every_combination_is_one_experiment():
    plan = Plan(("podnet", "ucir"), data="cifar100", orders=("podnet-0", "podnet-1"), seeds=(3, 4), memory=5)
    expected = [
        ((method, ccfa), Experiment(method, ccfa, data="cifar100", order=order, memory=5, seed=seed))
        for method, ccfa, order, seed in product(("podnet", "ucir"), (False, True), ("podnet-0", "podnet-1"), (3, 4))
    ]
    assert list(plan.experiments()) == expected
    assert len({experiment.name for _, experiment in expected}) == 16


def test_without_orders_the_data_decides():
    assert [experiment.order for _, experiment in Plan(("podnet",)).experiments()] == [None] * 6


def test_all_means_every_method():
    keys = [key for key, _ in Plan(("all",), seeds=(0,)).experiments()]
    assert keys == [(name, ccfa) for name in METHODS for ccfa in (False, True)]


def test_an_option_goes_to_the_methods_that_have_it():
    plan = Plan(("finetune", "podnet"), seeds=(0,), options={"epochs": "1", "lambda_flat": "2", "ccfa.count": "3"})
    assert {key: experiment.options for key, experiment in plan.experiments()} == {
        ("finetune", False): {"epochs": "1"},
        ("finetune", True): {"epochs": "1", "ccfa.count": "3"},
        ("podnet", False): {"epochs": "1", "lambda_flat": "2"},
        ("podnet", True): {"epochs": "1", "lambda_flat": "2", "ccfa.count": "3"},
    }


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(()), "at least one method"),
        (Plan(("podnet",), seeds=()), "one seed"),
        (Plan(("podnett",)), "(?s)podnett.*podnet"),
        (Plan(("podnet", "all")), "method 'all'"),
        (Plan(("podnet",), options={"epoch": "1"}), "(?s)option of these methods 'epoch'.*epochs"),
        (Plan(("finetune",), options={"lambda_flat": "1"}), "lambda_flat"),
        (Plan(("replay",), options={"ccfa.cuont": "1"}), "(?s)ccfa.cuont.*ccfa.count"),
    ],
)
def test_what_cannot_be_swept_is_refused(plan, message):
    with pytest.raises(UsageError, match=message):
        list(plan.experiments())


@pytest.mark.parametrize(
    "plan",
    [
        Plan(("replay",), ccfa=(True,), seeds=(0,), options={"ccfa.count": "many"}),
        Plan(("replay",), ccfa=(True,), seeds=(0,), options={"epochs": "many"}),
    ],
    ids=["of CCFA", "of the method"],
)
def test_a_wrong_value_is_no_reason_to_leave_a_cell_empty(tmp_path, plan):
    with pytest.raises(UsageError, match="expected a whole number, got 'many'"):
        swept(plan, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cells_hold_the_reports_by_order_and_seed(finished):
    out, cells, watching = finished
    natural = "0,1,2,3,4,5,6,7,8,9"
    assert cells.keys() == {("finetune", False), ("replay", False)}
    for (method, _), cell in cells.items():
        assert cell.reason == ""
        assert cell.reports.keys() == {(natural, 0), (natural, 1)}
        for (_, seed), report in cell.reports.items():
            experiment = report.config["experiment"]
            assert (experiment["method"], experiment["seed"], report.finished) == (method, seed, True)
            assert report.num_seen == [6, 8, 10]
    assert len(watching) == 4
    assert {path.name for path in out.iterdir()} == {*watching, ".first-stages", ".lock"}


def test_runs_that_can_share_a_first_stage_do(finished):
    out, _, watching = finished
    # finetune and replay begin alike: of each seed's two runs, the second trains two stages only
    assert sorted(audience.num_epochs for audience in watching.values()) == [2, 2, 3, 3]
    assert len(list((out / ".first-stages").iterdir())) == 2


def test_a_second_sweep_has_nothing_to_do(finished):
    out, cells, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again, watching = swept(SMALL, out)
    assert watching == {}
    assert again == cells
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_runs_at_once_are_the_runs_one_by_one(finished, tmp_path):
    out, cells, _ = finished
    at_once, _ = swept(SMALL, tmp_path, at_once=2)
    assert at_once.keys() == cells.keys()
    for key, cell in cells.items():
        assert {of: numbers(report) for of, report in at_once[key].reports.items()} == {
            of: numbers(report) for of, report in cell.reports.items()
        }
    assert networks(tmp_path) == networks(out)
    assert len(networks(out)) == 12


def test_where_ccfa_has_no_meaning_the_cell_says_why(tmp_path):
    plan = Plan(("joint",), scenario="6,2,2", seeds=(0,), options={"epochs": "1"})
    cells, watching = swept(plan, tmp_path)
    assert len(watching) == 1
    assert len(cells["joint", False].reports) == 1
    assert cells["joint", True].reports == {}
    assert "joint" in cells["joint", True].reason


def test_a_failing_run_does_not_lose_the_others(tmp_path):
    names = {experiment.method: experiment.name for _, experiment in SMALL.experiments() if experiment.seed == 0}
    failing = names["finetune"]
    cells, _ = swept(SMALL, tmp_path, errors={failing: DivergedError("on purpose")})
    assert [len(cell.reports) for cell in cells.values()] == [1, 2]
    assert {name: str(error) for cell in cells.values() for name, error in cell.errors.items()} == {
        failing: "on purpose"
    }
    states = {
        path.parent.name: json.loads(path.read_text())["state"] for path in sorted(tmp_path.glob("*/status.json"))
    }
    assert states.pop(failing) == "failed"
    assert list(states.values()) == ["finished"] * 3

    cells, watching = swept(SMALL, tmp_path)
    assert watching.keys() == {failing}
    assert [len(cell.reports) for cell in cells.values()] == [2, 2]
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
    saved = [path for path in tmp_path.glob("*/checkpoints/0*") if path.is_dir()]
    assert saved
    cells, _ = swept(SMALL, tmp_path, at_once)
    assert [len(cell.reports) for cell in cells.values()] == [2, 2]
    assert networks(tmp_path) == networks(finished[0])


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_unexpected_error_of_one_run_does_not_lose_the_others(tmp_path, at_once):
    failing = next(experiment.name for _, experiment in SMALL.experiments())
    ended = []
    cells, _ = swept(SMALL, tmp_path, at_once, {failing: ZeroDivisionError("a mistake of mine")}, on_end=ended.append)
    assert [len(cell.reports) for cell in cells.values()] == [1, 2]
    error = cells["finetune", False].errors[failing]
    traceback = tmp_path / failing / "errors.txt"
    assert str(error) == f"ZeroDivisionError: a mistake of mine. The traceback is in {traceback}."
    assert error.exit_code == 1
    assert "in on_epoch" in traceback.read_text()
    assert [outcome.error for outcome in ended if outcome.job.directory.path.name == failing] == [error]


@pytest.mark.row("P5")
def test_a_second_sweep_in_a_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("ccfa.experiments.sweep.resolve", lambda *arguments: pytest.fail("read data"))
    with locked(tmp_path), pytest.raises(LockedError, match=f"{tmp_path} is being written by another process"):
        swept(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.row("P5")
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
