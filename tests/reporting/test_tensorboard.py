import json
import math
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, Run, resolve, run
from ccfa.learning import Progress
from ccfa.methods import METHODS
from ccfa.reporting import tensorboard
from ccfa.reporting.tensorboard import TensorBoard, planned_epochs, require_tensorboard, with_tensorboard

RESOLVED = resolve(Experiment("podnet", scenario="4,3,3", options={"epochs": "2", "balanced_epochs": "1"}))

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)


class Watcher:
    """Counts what it is told."""

    def __init__(self):
        self.told = {"batch": 0, "epoch": 0, "stage": 0}

    def on_batch(self, progress, losses):
        self.told["batch"] += 1

    def on_epoch(self, progress, losses, lr, seconds):
        self.told["epoch"] += 1

    def on_stage(self, stage, result):
        self.told["stage"] += 1


class HaltError(Exception):
    """What stops a run in these tests."""


class Interrupting(Watcher):
    """Passes everything on, and stops the run after so many batches."""

    def __init__(self, audience, limit):
        super().__init__()
        self.audience, self.limit = audience, limit

    def on_batch(self, progress, losses):
        super().on_batch(progress, losses)
        self.audience.on_batch(progress, losses)
        if self.told["batch"] >= self.limit:
            raise HaltError

    def on_epoch(self, *told):
        self.audience.on_epoch(*told)

    def on_stage(self, *told):
        self.audience.on_stage(*told)


def scalars(folder):
    """Everything TensorBoard would show: step and value by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def trained(tmp_path, resolved):
    directory = Run(tmp_path / "run")
    watcher = Watcher()
    audience = with_tensorboard(True, directory.path, resolved, watcher)
    report = run(resolved, directory, audience, torch.device("cpu"))
    return directory.path, report, watcher


@needs_tensorboard
def test_the_numbers_are_those_of_the_run_directory(tmp_path):
    path, report, watcher = trained(tmp_path, RESOLVED)
    shown = scalars(path / "tensorboard" / "epochs")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = {"main": [1, 2, 3, 4, 6, 7], "balanced": [5, 8]}
    for phase, at in steps.items():
        records = [line for line in lines if line["phase"] == phase]
        for name in ("loss", "classification", "lr"):
            values = shown[f"{phase}/{name}"]
            assert [step for step, _ in values] == at
            assert [value for _, value in values] == pytest.approx([line[name] for line in records], rel=1e-6)
        speeds = [value for _, value in shown[f"{phase}/images_per_second"]]
        assert speeds == pytest.approx([line["images_per_second"] for line in records], rel=1e-3)
    stages = scalars(path / "tensorboard" / "stages")
    assert stages["stage/accuracy"] == [
        (num_seen, pytest.approx(accuracy)) for num_seen, accuracy in zip([4, 7, 10], report.overall, strict=True)
    ]
    assert [step for step, _ in stages["stage/old_accuracy"]] == [7, 10], "there is nothing old in the first stage"
    assert watcher.told["epoch"] == len(lines) == 8
    assert watcher.told["stage"] == 3
    assert watcher.told["batch"] > 8


@needs_tensorboard
def test_a_phase_within_epochs_has_a_value_an_epoch(tmp_path):
    options = {"epochs": "2", "balanced_epochs": "1", "learn_blend": "true", "backbone": "small"}
    resolved = resolve(Experiment("aanet", scenario="4,6", options=options))
    path, _, _ = trained(tmp_path, resolved)
    shown = scalars(path / "tensorboard" / "epochs")
    inner = [phase.after_epoch.name for phase in resolved.method.phases(resolved.stages[1]) if phase.after_epoch]
    assert [step for step, _ in shown[f"{inner[0]}/loss"]] == [3, 4]
    assert [step for step, _ in shown["main/loss"]] == [1, 2, 3, 4]


def epoch(board, stage, phase, number, num_epochs, loss):
    board.on_epoch(Progress(stage, phase, number, num_epochs, 2, 3, 10), {"loss": loss}, 0.1, 1.0)


def stage(board, index, accuracy):
    board.on_stage(RESOLVED.stages[index], {"stage": index, "num_seen": 0, "accuracy": accuracy, "old_accuracy": None})


@needs_tensorboard
def test_a_resumed_run_goes_on_without_duplicates(tmp_path):
    """The first process is lost in stage 1; others take up earlier states, and tell of finished stages first."""
    first, second, third = (TensorBoard(tmp_path, RESOLVED, Watcher()) for _ in range(3))
    stages = RESOLVED.stages
    for number in range(2):
        epoch(first, stages[0], "main", number, 2, 10 + number)
    stage(first, 0, 0.5)
    for number in range(2):
        epoch(first, stages[1], "main", number, 2, 20 + number)
    first.close()

    stage(second, 0, 0.5)
    epoch(second, stages[1], "main", 1, 2, 31)
    epoch(second, stages[1], "balanced", 0, 1, 40)
    stage(second, 1, 0.25)
    second.close()
    shown = scalars(tmp_path / "epochs")
    assert shown["main/loss"] == [(1, 10), (2, 11), (3, 20), (4, 31)]
    assert shown["balanced/loss"] == [(5, 40)]
    assert scalars(tmp_path / "stages")["stage/accuracy"] == [(4, 0.5), (7, 0.25)]

    stage(third, 0, 0.5)  # stage 1 was told, but its checkpoint was lost
    epoch(third, stages[1], "main", 0, 2, 50)
    third.close()
    shown = scalars(tmp_path / "epochs")
    assert shown["main/loss"] == [(1, 10), (2, 11), (3, 50)]
    assert not shown.get("balanced/loss")
    assert scalars(tmp_path / "stages")["stage/accuracy"] == [(4, 0.5)]


@needs_tensorboard
def test_a_run_stopped_and_continued_tells_everything_once(tmp_path):
    whole, _, _ = trained(tmp_path / "whole", RESOLVED)
    directory = Run(tmp_path / "run")
    for limit in (7, 40, 10**9):
        audience = Interrupting(with_tensorboard(True, directory.path, RESOLVED, Watcher()), limit)
        with suppress(HaltError):
            run(RESOLVED, directory, audience, torch.device("cpu"), checkpoint_minutes=0)
    for kind, timed in (("epochs", "images_per_second"), ("stages", "stage/seconds")):
        wanted, found = (scalars(path / "tensorboard" / kind) for path in (whole, directory.path))
        assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
            tag: [step for step, _ in values] for tag, values in wanted.items()
        }
        assert {tag: values for tag, values in found.items() if not tag.endswith(timed)} == {
            tag: values for tag, values in wanted.items() if not tag.endswith(timed)
        }


@needs_tensorboard
def test_a_killed_run_has_told_all_it_knew(tmp_path):
    board = TensorBoard(tmp_path, RESOLVED, Watcher())
    epoch(board, RESOLVED.stages[0], "main", 0, 2, 10.0)
    assert scalars(tmp_path / "epochs")["main/loss"] == [(1, 10.0)], "without being closed"
    board.close()


@needs_tensorboard
def test_values_that_are_no_numbers_are_told_too(tmp_path):
    board = TensorBoard(tmp_path, RESOLVED, Watcher())
    epoch(board, RESOLVED.stages[0], "main", 0, 2, math.nan)
    board.close()
    ((step, value),) = scalars(tmp_path / "epochs")["main/loss"]
    assert step == 1
    assert math.isnan(value)


@pytest.mark.parametrize("method", METHODS)
def test_every_phase_of_a_stage_has_a_name_and_epochs_of_its_own(method):
    resolved = resolve(Experiment(method))
    starts = planned_epochs(resolved)
    phases = [(stage, phase) for stage in resolved.stages for phase in resolved.method.phases(stage)]
    assert len(starts) == len(phases), "two phases of one name would write over each other"
    taken = [
        start + epoch
        for (_, phase), start in zip(phases, starts.values(), strict=True)
        for epoch in range(phase.epochs)
    ]
    assert taken == list(range(len(taken)))


def test_where_it_is_not_wanted_nothing_changes(tmp_path):
    watcher = Watcher()
    assert with_tensorboard(False, tmp_path, RESOLVED, watcher) is watcher
    TensorBoard(tmp_path / "events", RESOLVED, watcher).on_batch(Progress(Stage(0, 0, 4), "main", 0, 1, 0, 1, 1), {})
    assert list(tmp_path.iterdir()) == [], "no file before there is a number"


def test_where_it_is_missing_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'ccfa\[tensorboard\]'") as refused:
        require_tensorboard()
    assert refused.value.exit_code == 2
