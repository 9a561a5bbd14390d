"""Event files for TensorBoard: the numbers of the run directory, each once."""

import json
import time
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, Run, resolve
from ccfa.learning import Progress
from ccfa.reporting import tensorboard
from ccfa.reporting.tensorboard import TensorBoard, require_tensorboard
from toy_runs import Silent, toy_run

RESOLVED = resolve(Experiment("podnet", scenario="4,3,3", options={"epochs": "2", "balanced_epochs": "1"}))
CPU = torch.device("cpu")

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)


class HaltError(Exception):
    """What stops a run in these tests."""


class Halting(Silent):
    """Stops the run after so many batches."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def on_batch(self, progress, losses):
        super().on_batch(progress, losses)
        if self.num_batches >= self.limit:
            raise HaltError


def scalars(folder):
    """Everything TensorBoard would show: step and value by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def trained(path, *limits):
    """A run that was stopped after each number of batches, and continued."""
    directory = Run(path)
    for limit in (*limits, 10**9):
        time.sleep(1.1 * bool(limits))  # event files are ordered by the second in their names
        with suppress(HaltError):
            board = TensorBoard(directory.path, Halting(limit))
            report = toy_run(directory.path, RESOLVED, board, checkpoint_minutes=0)
    return report


@needs_tensorboard
def test_numbers_are_those_of_the_run(tmp_path):
    report = trained(tmp_path / "run")
    shown = scalars(tmp_path / "run" / "tensorboard" / "epochs")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for phase, at in {"main": [1, 2, 3, 4, 6, 7], "balanced": [5, 8]}.items():
        records = [line for line in lines if line["phase"] == phase]
        for name in ("loss", "classification", "lr"):
            expected = [(step, pytest.approx(line[name])) for step, line in zip(at, records, strict=True)]
            assert shown[f"{phase}/{name}"] == expected
    stages = scalars(tmp_path / "run" / "tensorboard" / "stages")
    assert stages["stage/accuracy"] == list(zip([4, 7, 10], map(pytest.approx, report.overall), strict=True))
    assert [step for step, _ in stages["stage/old_accuracy"]] == [7, 10], "there is nothing old in the first stage"


@needs_tensorboard
def test_a_continued_run_tells_everything_once(tmp_path):
    trained(tmp_path / "whole")
    trained(tmp_path / "run", 7, 40)
    for kind in ("epochs", "stages"):
        whole, found = (scalars(tmp_path / name / "tensorboard" / kind) for name in ("whole", "run"))
        assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
            tag: [step for step, _ in values] for tag, values in whole.items()
        }
        timed = [tag for tag in whole if tag.endswith(("images_per_second", "seconds"))]
        assert {tag: found[tag] for tag in whole if tag not in timed} == {
            tag: whole[tag] for tag in whole if tag not in timed
        }


@needs_tensorboard
def test_a_killed_run_has_told_everything(tmp_path):
    board = TensorBoard(tmp_path, Silent())
    board.on_batch(Progress(Stage(0, 0, 4), "main", 0, 1, 0, 1, 1), {})
    assert list(tmp_path.iterdir()) == [], "no file before there is a number"
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    board.on_epoch(Progress(Stage(0, 0, 4), "main", 0, 2, 2, 3, 10), {"loss": 10.0}, 0.1, 1.0)
    assert scalars(tmp_path / "tensorboard" / "epochs")["main/loss"] == [(1, 10.0)], "without being closed"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install"):
        require_tensorboard()
