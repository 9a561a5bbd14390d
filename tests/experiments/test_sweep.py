"""Sweeps: the experiments of a grid, runs at once, and what is left when some fail or all are stopped."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product

import pytest
import torch

from ccfa.data import load, split
from ccfa.errors import CcfaError, DivergedError, LockedError, Stopped, UsageError
from ccfa.experiments.sweep import experiments_of, run_all, sweep
from ccfa.files import locked
from ccfa.kernels.graphs import Lane, own_stream
from ccfa.learning import Learner
from ccfa.learning.progress import WAITING
from ccfa.methods import METHODS
from ccfa.settings import Experiment, Grid, Running
from toy_runs import Silent, StopAfter, toy_resolved
from toys import toy_images

SMALL = Grid(("finetune", "replay"), ccfa="off", seeds=(0, 1), scenario="6,2,2", options={"epochs": "1"})
NAMES = [experiment.name for experiment in experiments_of(SMALL)]


def test_every_combination_is_one_experiment():
    shared = {"data": "cifar100", "memory": 5, "validation": 0.1, "image_size": 32, "skip_bad": True, "batch_seed": 7}
    grid = Grid(("podnet", "ucir"), orders=("podnet-0", "podnet-1"), seeds=(3, 4), **shared)
    expected = [
        Experiment(method, ccfa, order, seed, **shared)
        for method, ccfa, order, seed in product(("podnet", "ucir"), (False, True), ("podnet-0", "podnet-1"), (3, 4))
    ]
    assert experiments_of(grid) == expected
    assert len({experiment.name for experiment in expected}) == 16
    assert len(experiments_of(Grid(("finetune",), "off", seeds=(3, 3, 1), orders=("natural", "natural")))) == 2
    everything = experiments_of(Grid(("all",), seeds=(0,)))
    assert [(one.method, one.ccfa) for one in everything] == list(product(METHODS, (False, True)))


def test_an_option_goes_to_what_has_it():
    options = {"epochs": "1", "lambda_flat": "2", "ccfa.count": "3", "mix.num_places": "2"}
    grid = Grid(("finetune", "podnet"), seeds=(0,), options=options, axes={"mix": ("none", "manifold-mixup")})
    for experiment in experiments_of(grid):
        has = {
            "epochs": True,
            "lambda_flat": experiment.method == "podnet",
            "ccfa.count": experiment.ccfa,
            "mix.num_places": experiment.mix is not None,
        }
        assert experiment.options == {name: text for name, text in options.items() if has[name]}
    assert len(experiments_of(grid)) == 8


def test_what_lacks_an_axis_is_run_once():
    grid = Grid(("finetune", "podnet"), seeds=(0,), axes={"ccfa.count": ("1", "3"), "lambda_flat": ("2",)})
    assert [(one.method, one.options) for one in experiments_of(grid)] == [
        ("finetune", {}),
        ("finetune", {"ccfa.count": "1"}),
        ("finetune", {"ccfa.count": "3"}),
        ("podnet", {"lambda_flat": "2"}),
        ("podnet", {"ccfa.count": "1", "lambda_flat": "2"}),
        ("podnet", {"ccfa.count": "3", "lambda_flat": "2"}),
    ]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Grid(()), "method"),
        (Grid(("podnet",), seeds=()), "seed"),
        (Grid(("podnet", "all")), "'all'"),
        (Grid(("finetune",), options={"lambda_flat": "1"}), "lambda_flat"),
        (Grid(("replay",), axes={"ccfa.cuont": ("1",)}), "ccfa.count"),
        (Grid(("replay",), "off", axes={"ccfa.count": ("1",)}), "needs CCFA"),
        (Grid(("replay",), axes={"seed": ("1",)}), "axis 'seed'"),
        (Grid(("replay",), axes={"memory": ("1", "few")}), "'few'"),
        (Grid(("replay",), memory=2, axes={"memory": ("1",)}), "memory is given twice"),
    ],
)
def test_what_cannot_be_swept_is_refused(grid, message):
    with pytest.raises(UsageError, match=message):
        experiments_of(grid)


class Audience(Silent):
    """Keeps how many epochs it saw, and can end the run at the first."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error
        self.num_epochs = 0

    def on_epoch(self, progress, losses, lr, seconds):
        self.num_epochs += 1
        if self.error:
            raise self.error


def swept(grid, out, at_once=1, errors=None, **options):
    """What came of it, and who watched each run that was made."""
    watching = {}

    def audience(resolved, directory):
        name = resolved.experiment.name
        assert directory.path == out / name
        watching[name] = Audience((errors or {}).get(name))
        return watching[name]

    running = Running(device="cpu", at_once=at_once, first_stages=out / ".first-stages", checkpoint_minutes=1000)
    return sweep(experiments_of(grid), out, running, audience, **options), watching


def numbers(report):
    return report.num_seen, report.overall, report.rules


def networks(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/networks/*"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, *swept(SMALL, out)


def test_a_wrong_value_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="'many'"):
        swept(Grid(("replay",), "on", seeds=(0,), axes={"ccfa.count": ("1", "many")}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reports_have_the_names_of_runs_that_share_first_stages(finished):
    out, found, watching = finished
    assert (list(found.reports), found.refused, found.errors) == (NAMES, {}, {})
    for experiment, report in zip(experiments_of(SMALL), found.reports.values(), strict=True):
        stored = report.config["experiment"]
        assert (stored["method"], stored["seed"], report.finished) == (experiment.method, experiment.seed, True)
        assert report.num_seen == [6, 8, 10]
    assert {path.name for path in out.iterdir()} == {*watching, ".first-stages", ".lock"}
    # finetune and replay begin alike: of each seed's two runs, the second trains two stages only
    assert sorted(audience.num_epochs for audience in watching.values()) == [2, 2, 3, 3]
    assert len(list((out / ".first-stages").iterdir())) == 2


def test_the_data_are_loaded_once(tmp_path, monkeypatch):
    loaded, trained = [], []

    def counted(name, *arguments, **options):
        loaded.append(name)
        return load(name, *arguments, **options)

    def recorded(self, method, train, **options):
        trained.append(train.images)
        made(self, method, train, **options)

    made = Learner.__init__
    monkeypatch.setattr("ccfa.data.registry.load", counted)
    monkeypatch.setattr(Learner, "__init__", recorded)
    grid = replace(SMALL, validation=0.2, orders=("natural", "seed-1"), seeds=(0,))
    assert len(swept(grid, tmp_path)[0].reports) == len(trained) == 4
    assert loaded == ["digits"]
    assert len({images.data_ptr() for images in trained}) == 1


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
    found, _ = swept(replace(SMALL, methods=("joint",), ccfa="both", seeds=(0,)), tmp_path)
    assert len(found.reports) == 1
    assert "joint" in found.refused["joint"]


@pytest.mark.parametrize(
    ("at_once", "failure", "code"), [(1, DivergedError("on purpose"), 6), (2, ZeroDivisionError("on purpose"), 1)]
)
def test_a_failing_run_does_not_lose_the_others(tmp_path, at_once, failure, code):
    grid, ended = replace(SMALL, seeds=(0,)), []
    failing, other = (experiment.name for experiment in experiments_of(grid))
    found, _ = swept(grid, tmp_path, at_once, {failing: failure}, on_end=ended.append)
    assert list(found.reports) == [other]
    assert list(found.errors) == [failing]
    error = found.errors[failing]
    assert "on purpose" in str(error)
    assert error.exit_code == code
    assert [outcome.error for outcome in ended if outcome.directory.path.name == failing] == [error]
    assert "on purpose" in (tmp_path / failing / "errors.txt").read_text()
    states = {path.parent.name: json.loads(path.read_text())["state"] for path in tmp_path.glob("*/status.json")}
    assert states == {failing: "failed", other: "finished"}

    found, watching = swept(grid, tmp_path)
    assert watching.keys() == {failing}
    assert list(found.reports) == [failing, other]  # in the plan's order, whichever was run first


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_stopped_sweep_is_continued_by_repeating_it(tmp_path, finished, at_once):
    ended = []
    for number in (10, 40):
        with pytest.raises(Stopped, match="Repeat the command") as stopped:
            swept(SMALL, tmp_path, at_once, stop=StopAfter(number), on_end=ended.append)
        assert stopped.value.code == 143
        assert isinstance(ended[-1].error, Stopped)
    assert list(tmp_path.glob("*/checkpoints/0*"))
    assert list(swept(SMALL, tmp_path, at_once)[0].reports) == NAMES
    assert networks(tmp_path) == networks(finished[0])


def test_a_sweep_holds_its_folder_until_its_end(tmp_path, monkeypatch):
    held = []

    def second(outcome):
        monkeypatch.setattr("ccfa.experiments.sweep.resolve", lambda *arguments: pytest.fail("read data"))
        with pytest.raises(LockedError, match=str(tmp_path)):
            swept(SMALL, tmp_path)
        held.append(outcome)

    swept(replace(SMALL, methods=("finetune",), seeds=(0,)), tmp_path, on_end=second)
    assert len(held) == 1
    with locked(tmp_path):
        pass


def test_runs_that_need_not_wait_go_first(tmp_path):
    first, other = (toy_resolved("podnet", seed=seed) for seed in (0, 1))
    same = first._replace(experiment=replace(first.experiment, memory=7))  # another name, the same first stage
    resolved = [first, same, other]
    begun, two_at_work = [], threading.Barrier(2, timeout=60)

    def audience(one, directory):
        begun.append(one)
        if len(begun) <= 2:
            two_at_work.wait()
        return Silent()

    running = Running(device="cpu", at_once=2, first_stages=tmp_path / "first-stages")
    outcomes = run_all(resolved, tmp_path / "runs", running, audience)
    assert begun[-1] is same
    assert [one.resolved for one in outcomes] == resolved
    assert all(one.report.finished for one in outcomes)


def test_a_first_stage_that_was_begun_is_continued(tmp_path):
    begun = toy_resolved("podnet")
    other = begun._replace(experiment=replace(begun.experiment, memory=7))  # another name, the same first stage
    running = Running(device="cpu", at_once=2, first_stages=tmp_path / "first-stages")
    with pytest.raises(Stopped):
        run_all([begun], tmp_path / "runs", running, lambda *_: Silent(), stop=StopAfter(2))
    audiences = {}

    def audience(one, directory):
        audiences[one.experiment.name] = Silent()
        return audiences[one.experiment.name]

    run_all([other, begun], tmp_path / "runs", running, audience)
    continued, waited = audiences[begun.experiment.name], audiences[other.experiment.name]
    assert WAITING not in continued.activities
    assert continued.num_batches > waited.num_batches  # the rest of the first stage


def test_a_failed_run_is_not_waited_for(tmp_path):
    first, other = (toy_resolved("podnet", seed=seed) for seed in (0, 1))
    resolved = [first, first._replace(experiment=replace(first.experiment, memory=7)), other]
    begun = []

    def audience(one, directory):
        begun.append(one)
        if one is first:
            raise CcfaError("It fails before its first stage is stored.")
        return Silent()

    running = Running(device="cpu", first_stages=tmp_path / "first-stages")
    outcomes = run_all(resolved, tmp_path / "runs", running, audience)
    assert begun == resolved
    assert [bool(one.error) for one in outcomes] == [True, False, False]


CUDA = torch.device("cuda")


def on_a_gpu(folder, at_once, precision):
    """Run eight experiments of eleven stages; the sizes of their test sets, and so of their last batches, differ."""
    resolved = [
        toy_resolved("podnet", seed=number)._replace(
            train=toy_images(12, 40 + number),
            test=toy_images(12, 43 + number, seed=1),
            stages=split(12, 2, 1),
            order=tuple(range(12)),
        )
        for number in range(8)
    ]
    running = Running(device="cuda", precision=precision, compile=False, at_once=at_once)
    return run_all(resolved, folder, running, lambda resolved, directory: Silent())


@pytest.mark.gpu
@pytest.mark.slow
def test_eight_runs_capture_and_evaluate_against_each_other(tmp_path):
    began, outcomes = time.monotonic(), []
    while time.monotonic() - began < 60:
        outcomes += on_a_gpu(tmp_path / str(len(outcomes)), 8, "bf16")
    assert [str(outcome.error) for outcome in outcomes if outcome.error] == []
    assert all(outcome.report.finished for outcome in outcomes)


@pytest.mark.gpu
def test_packed_runs_learn_what_they_learn_alone(tmp_path):
    packed, alone = (on_a_gpu(tmp_path / str(at_once), at_once, "float32") for at_once in (8, 1))
    for one, other in zip(packed, alone, strict=True):
        assert one.report.overall == pytest.approx(other.report.overall, abs=0.05)


@pytest.mark.gpu
def test_no_two_lanes_share_a_stream():
    lanes = [Lane(CUDA) for _ in range(40)]
    handles = [stream.cuda_stream for lane in lanes for stream in (lane.main, lane.branch("a"), lane.branch("b"))]
    assert len(set(handles)) == len(handles)


@pytest.mark.gpu
def test_a_lane_is_lent_to_the_next_run():
    with own_stream(CUDA):
        first = torch.cuda.current_stream().cuda_stream
    with own_stream(CUDA):
        assert torch.cuda.current_stream().cuda_stream == first


@pytest.mark.gpu
def test_threads_may_begin_with_linear_algebra():
    """In a process of its own: torch loads it once, and two threads that were the first failed."""
    code = """
import torch
from concurrent.futures import ThreadPoolExecutor
from ccfa.kernels.graphs import own_stream
def solve(number):
    with own_stream(torch.device("cuda")):
        return torch.linalg.cholesky(torch.eye(8, device="cuda", dtype=torch.float64)).sum().item()
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(solve, range(8))) == [8.0] * 8
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
