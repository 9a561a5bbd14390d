"""Who watches a run: a live line on a screen, plain lines elsewhere, event files for TensorBoard."""

import io
import json
import math
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch

from ccfa.data import Stage
from ccfa.errors import installing
from ccfa.experiments import Experiment, Run, resolve
from ccfa.learning import Progress
from ccfa.learning.progress import COMPILING, EVALUATING, WAITING, planned_work
from ccfa.reporting import showing, terminal
from ccfa.reporting.terminal import Board, Display, Output, StatusLines, SweepDisplay, TensorBoard
from toy_runs import Silent, toy_run

RESOLVED = resolve(Experiment("podnet", scenario="4,3,3", options={"epochs": "1", "balanced_epochs": "1"}))
RESULT = {
    "accuracy": 0.5,
    "old_accuracy": 0.25,
    "new_accuracy": 0.75,
    "logits_accuracy": 0.125,
    "nearest_mean_accuracy": 0.625,
    "seconds": 2.04,
}
LOSSES = {"loss": torch.tensor(2.5)}
LAST = Progress(Stage(1, 4, 7), "main", 1, 2, 0, 3, 64)


@pytest.fixture(params=["pipe", "dumb terminal"])
def plain(request, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    return Output(file=io.StringIO(), force_terminal=request.param != "pipe", width=100)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(terminal.time, "monotonic", clock)
    return clock


def train(display, clock, seconds, steps=1, **place):
    """Steps of 64 images that take so many seconds each."""
    for _ in range(steps):
        clock.now += seconds
        display.on_batch(LAST._replace(**place), LOSSES)


def written(console):
    return console.file.getvalue().splitlines()


def test_plan_counts_new_images_and_exemplars():
    sizes = RESOLVED.train.labels.bincount().tolist()
    kept = RESOLVED.method.memory.per_class
    found = [planned_work(RESOLVED.method, RESOLVED.train, stage) for stage in RESOLVED.stages]
    assert found[0] == {"main": (1, sum(sizes[:4]))}
    assert found[1] == {"main": (1, sum(sizes[4:7]) + kept * 4), "balanced": (1, kept * 7)}
    assert found[2] == {"main": (1, sum(sizes[7:]) + kept * 7), "balanced": (1, kept * 10)}


def test_files_get_a_line_at_the_end_of_phases_and_stages(plain, clock):
    with StatusLines(plain) as lines:
        display = Display(RESOLVED, lines)
        train(display, clock, 0.01)
        display.on_activity(LAST.stage, "choosing exemplars")
        display.on_epoch(LAST._replace(epoch=0), {"loss": 9.0}, 0.1, 1.0)
        display.on_epoch(LAST, {"loss": 1.2345}, 0.1, 1.0)
        display.on_stage(Stage(1, 4, 7), RESULT)
    phase, stage = written(plain)
    assert phase.startswith("stage 2/3 · main · epoch 2/2 · batch 1/3 · loss 1.234")
    assert stage.startswith("stage 2/3  7 classes  accuracy 50.00%  (old 25.00%, new 75.00%)  nearest mean 62.50%")
    assert not set("\r\x1b") & set(plain.file.getvalue())


def test_files_get_a_line_every_half_minute(plain, clock):
    display = Display(RESOLVED, StatusLines(plain))
    train(display, clock, 2, steps=46)
    shown = [line for line in written(plain) if line.startswith("stage")]
    assert len(shown) == 3
    assert all(" · loss 2.500 · 32 images/s · about " in line for line in shown)


def test_compiling_and_waiting_are_told_at_once(plain, clock):
    display = Display(RESOLVED, StatusLines(plain))
    for activity in (COMPILING, EVALUATING, WAITING):
        display.on_activity(Stage(0, 0, 4), activity)
    assert written(plain) == [f"stage 1/3 · {activity}" for activity in (COMPILING, WAITING)]


def test_screen_shows_how_long_an_activity_lasts(clock):
    lines = StatusLines(Output(file=io.StringIO(), force_terminal=True, width=100))
    display = Display(RESOLVED, lines)
    train(display, clock, 1)
    assert lines.texts() == ["stage 2/3 · main · epoch 2/2 · batch 1/3 · loss 2.500"]
    display.on_activity(LAST.stage, COMPILING)
    clock.now += 42
    assert lines.texts() == [f"stage 2/3 · {COMPILING} · 42 s"]


@pytest.mark.parametrize(("on_cpu", "word"), [(True, "warning"), (False, "speed")])
def test_a_night_on_a_cpu_is_a_warning(clock, on_cpu, word):
    plain = Output(file=io.StringIO(), width=100)
    display = Display(RESOLVED, StatusLines(plain, on_cpu))
    train(display, clock, 3600, steps=3)
    told = [line for line in written(plain) if " h " in line and not line.startswith("stage")]
    assert len(told) == 1
    assert word in told[0]


def test_the_first_stage_gives_a_lower_bound(clock):
    plain = Output(file=io.StringIO(), width=100)
    display = Display(RESOLVED, StatusLines(plain))
    train(display, clock, 60, steps=3, stage=RESOLVED.stages[0])
    assert "at least" in plain.file.getvalue()
    assert "at least" in display.words(LAST)
    display.on_stage(RESOLVED.stages[0], RESULT)
    train(display, clock, 60, steps=3)
    assert "about" in display.words(LAST)
    frozen = Display(resolve(Experiment("fetril", scenario="4,3,3")), StatusLines(plain))
    train(frozen, clock, 60, steps=3, stage=RESOLVED.stages[0])
    assert "about" in frozen.words(LAST)  # features train faster than images


def test_stored_rate_serves_a_continued_run(plain, clock):
    display = Display(RESOLVED, StatusLines(plain))
    display.on_stage(RESOLVED.stages[0], RESULT)
    train(display, clock, 1, steps=2)
    again = Display(RESOLVED, StatusLines(plain))
    again.on_stage(RESOLVED.stages[0], RESULT)
    again.restore(json.loads(json.dumps(display.state())))
    clock.now += 1000
    again.on_activity(LAST.stage, EVALUATING)
    train(again, clock, 500)
    assert " · 64 images/s · " in again.words(LAST)
    assert again.seconds_left() == pytest.approx(display.seconds_left() - 1)


def test_checkpoint_at_a_stages_end_begins_the_next_one(plain, clock):
    display = Display(RESOLVED, StatusLines(plain))
    train(display, clock, 1, steps=5)
    state, again = display.state(), Display(RESOLVED, StatusLines(plain))
    for stage in RESOLVED.stages[:2]:
        again.on_stage(stage, RESULT)
    again.restore(state)
    display.on_stage(RESOLVED.stages[1], RESULT)
    assert again.seconds_left() == pytest.approx(display.seconds_left())


@pytest.fixture
def board(clock):
    return Board(Output(file=io.StringIO(), width=200), at_once=2, on_cpu=False)


def test_sweep_says_how_many_runs_are_done_and_left(board):
    board.plan([("a", 100.0), ("b", 100.0), ("c", 50.0)], num_done=5)
    assert board.texts() == ["5/8 runs done"]
    board.at_work("a", 100.0, 200.0, "at least")
    assert board.texts() == ["5/8 runs done, at least 5 min 00 s left"]
    board.at_work("a", 100.0, 200.0, "about")
    board.at_work("b", 0.0, math.nan, "about")  # it waits
    assert board.texts() == ["5/8 runs done, about 5 min 00 s left"]  # a and b 200 s, then c 100 s
    board.end("a", is_finished=True, has_failed=False)
    board.end("b", is_finished=False, has_failed=True)
    assert board.texts() == ["6/8 runs done, 1 failed, about 1 min 40 s left"]
    board.end("c", is_finished=False, has_failed=False)  # it was stopped
    assert board.texts() == ["6/8 runs done, 1 failed, about 0 s left"]


def test_an_unknown_time_is_not_told(board):
    assert board.texts() == []  # before the plan
    board.plan([("a", 100.0)], num_done=0)
    assert board.texts() == ["0/1 runs done"]


def test_runs_of_a_sweep_have_their_names_and_share_the_pause(board, clock):
    other = resolve(Experiment("finetune", scenario="4,3,3", options={"epochs": "1"}))
    board.plan([("a", 1.0), ("b", 1.0)], num_done=0)
    displays = [SweepDisplay(one, board) for one in (RESOLVED, other)]
    for _ in range(31):
        for display in displays:
            train(display, clock, 0.5)
        displays[0].on_epoch(LAST, {"loss": 1.0}, 0.1, 1.0)
    displays[0].on_stage(Stage(1, 4, 7), RESULT)
    head, first, second, stage = written(board.console)
    assert head.startswith("0/2 runs done, about ")
    assert first.startswith(f"{RESOLVED.experiment.name}  stage 2/3 · main ")
    assert second.startswith(f"{other.experiment.name}  stage 2/3 · main ")
    assert stage.startswith(f"{RESOLVED.experiment.name}  stage 2/3  7 classes")


def test_other_rule_and_missing_values(plain):
    lines = StatusLines(plain)
    Display(resolve(Experiment("icarl")), lines).on_stage(Stage(1, 4, 7), RESULT)
    assert "logits 12.50%" in plain.file.getvalue()
    missing = {"old_accuracy": None, "nearest_mean_accuracy": None}
    Display(RESOLVED, lines).on_stage(Stage(0, 0, 4), {**RESULT, **missing})
    assert plain.file.getvalue().splitlines()[1] == "stage 1/3  4 classes  accuracy 50.00%  2.0 s"


def test_control_characters_are_written_out(plain):
    for text in ("a\x1b[2Jb", "\x9b2J", "bell\x07", "back\rover", "as [bold] it is\n"):
        plain.print(text)
    assert not set("\x1b\x9b\x07\r") & set(plain.file.getvalue())
    assert "[bold]" in plain.file.getvalue()


needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)


def scalars(folder):
    """Everything TensorBoard would show: step and value by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@needs_tensorboard
def test_numbers_are_those_of_the_run_and_once(tmp_path, monkeypatch, fail):
    """The run is stopped twice and continued."""
    path = tmp_path / "run"
    for number, fault in enumerate(("step:4:raise", "step:11:raise", "")):
        monkeypatch.setattr("time.time", lambda number=number: 1.8e9 + number)  # it orders the event files
        fail(fault)
        with suppress(RuntimeError):
            report = toy_run(path, audience=TensorBoard(Run(path), Silent()), checkpoint_minutes=0)
    assert len(list((path / "tensorboard" / "epochs").iterdir())) == 3
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
    board, progress = TensorBoard(Run(tmp_path), Silent()), Progress(Stage(0, 0, 4), "main", 0, 2, 2, 3, 10)
    board.on_batch(progress, {})
    assert list(tmp_path.iterdir()) == [], "no file before there is a number"
    board.on_epoch(progress, {"loss": 9.0}, 0.1, 1.0)  # the disk took no line of the log
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    board.on_epoch(progress, {"loss": 10.0}, 0.1, 1.0)
    board.on_epoch(progress, {"loss": 11.0}, 0.1, 1.0)
    shown = scalars(tmp_path / "tensorboard" / "epochs")["main/loss"]
    assert shown == [(0, 9.0), (1, 10.0), (2, 11.0)], "without being closed"


def test_missing_package_is_named_before_anything_is_done(call, tmp_path, monkeypatch):
    monkeypatch.setattr(showing, "find_spec", lambda name: None)
    for verb in (["run", "podnet"], ["sweep", "podnet"], ["resume", "run"]):
        code, _, err = call(*verb, "--tensorboard")
        assert code == 2
        assert installing("tensorboard") in err
    assert list(tmp_path.iterdir()) == []
