"""Event files for TensorBoard: the numbers of the run directory, each once."""

from contextlib import suppress
from importlib.util import find_spec

import pytest

from ccfa.data import Stage
from ccfa.experiments import Run
from ccfa.learning import Progress
from ccfa.reporting import tensorboard
from ccfa.reporting.tensorboard import TensorBoard
from toy_runs import Silent, toy_run

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)


class HaltError(Exception):
    """Stops a run in these tests."""


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


@needs_tensorboard
@pytest.mark.parametrize("limits", [(), (4, 11)])
def test_numbers_are_those_of_the_run_and_once(tmp_path, limits, monkeypatch):
    """The second run is stopped twice and continued."""
    path = tmp_path / "run"
    for number, limit in enumerate((*limits, 10**9)):
        monkeypatch.setattr("time.time", lambda number=number: 1.8e9 + number)  # it orders the event files
        with suppress(HaltError):
            report = toy_run(path, audience=TensorBoard(path, Halting(limit)), checkpoint_minutes=0)
    assert len(list((path / "tensorboard" / "epochs").iterdir())) == len(limits) + 1
    shown, lines = scalars(path / "tensorboard" / "epochs"), Run(path).read_epochs()
    for phase in {line["phase"] for line in lines}:
        for name in ("loss", "classification", "lr"):
            records = [(step, line) for step, line in enumerate(lines, start=1) if line["phase"] == phase]
            assert shown[f"{phase}/{name}"] == [(step, pytest.approx(line[name])) for step, line in records]
    stages = scalars(path / "tensorboard" / "stages")
    assert stages["stage/accuracy"] == list(zip(report.num_seen, map(pytest.approx, report.overall), strict=True))
    assert [step for step, _ in stages["stage/old_accuracy"]] == report.num_seen[1:], (
        "nothing is old in the first stage"
    )


@needs_tensorboard
def test_killed_run_has_written_everything(tmp_path):
    board, progress = TensorBoard(tmp_path, Silent()), Progress(Stage(0, 0, 4), "main", 0, 2, 2, 3, 10)
    board.on_batch(progress, {})
    assert list(tmp_path.iterdir()) == [], "no file before there is a number"
    board.on_epoch(progress, {"loss": 9.0}, 0.1, 1.0)  # the disk took no line of the log
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    board.on_epoch(progress, {"loss": 10.0}, 0.1, 1.0)
    board.on_epoch(progress, {"loss": 11.0}, 0.1, 1.0)
    shown = scalars(tmp_path / "tensorboard" / "epochs")["main/loss"]
    assert shown == [(0, 9.0), (1, 10.0), (2, 11.0)], "without being closed"


def test_missing_package_is_named_before_anything_is_done(call, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    for verb in (["run", "podnet"], ["sweep", "podnet"], ["resume", "run"]):
        code, _, err = call(*verb, "--tensorboard")
        assert code == 2
        assert "ccfa[tensorboard]" in err
    assert list(tmp_path.iterdir()) == []
