"""Who watches a run: a live line on a screen, plain lines elsewhere, event files for TensorBoard."""

import io
from contextlib import suppress
from importlib.util import find_spec

import pytest

from ccfa.data import Stage
from ccfa.experiments import Experiment, Run, resolve
from ccfa.learning import Progress
from ccfa.reporting import showing, terminal
from ccfa.reporting.tables import duration
from ccfa.reporting.terminal import Display, Output, TensorBoard, planned_images
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
LAST = Progress(Stage(1, 4, 7), "main", 1, 2, 0, 3, 64)


@pytest.fixture(params=["pipe", "dumb terminal"])
def plain(request, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    return Output(file=io.StringIO(), force_terminal=request.param != "pipe", width=100)


def test_plan_counts_new_images_and_exemplars():
    sizes = RESOLVED.train.labels.bincount().tolist()
    kept = RESOLVED.method.memory.per_class
    later = sum(sizes[4:7]) + kept * 4, sum(sizes[7:]) + kept * 7
    assert planned_images(RESOLVED) == [sum(sizes[:4]), 2 * later[0], 2 * later[1]]


def test_other_places_get_plain_lines(plain, monkeypatch):
    with Display(RESOLVED, plain) as display:
        monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began)  # no time passes
        display.on_batch(LAST, {})
        display.on_epoch(LAST._replace(epoch=0), {"loss": 9.0}, 0.1, 1.0)
        display.on_epoch(LAST, {"loss": 1.2345}, 0.1, 1.0)
        display.on_stage(Stage(1, 4, 7), RESULT)
    phase, stage = plain.file.getvalue().splitlines()
    assert phase.startswith("stage 2/3 · main · epoch 2/2 · ")
    assert "loss 1.234" in phase
    assert stage.startswith("stage 2/3  7 classes  accuracy 50.00%  (old 25.00%, new 75.00%)  nearest mean 62.50%")
    assert not set("\r\x1b") & set(plain.file.getvalue())


def test_long_phases_show_speed_and_time_left(plain, monkeypatch):
    display = Display(RESOLVED, plain)
    display.on_stage(RESOLVED.stages[0], RESULT)  # as a continued run reports it
    for seconds, num_lines in ((4.9, 1), (8, 2)):
        monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began + seconds)  # noqa: B023
        display.last_shown = display.began
        display.on_batch(LAST, {})
        assert len(plain.file.getvalue().splitlines()) == num_lines
    left = duration((sum(planned_images(RESOLVED)[1:]) - 128) / 16)  # 128 images in 8 seconds
    assert f" · 16 images/s · about {left} left · accuracies 50.0%" in plain.file.getvalue()


def test_several_runs_have_their_names(monkeypatch):
    screen = Output(file=io.StringIO(), force_terminal=True, width=100)
    display = Display(RESOLVED, screen, several=True)
    display.on_epoch(LAST, {"loss": 1.0}, 0.1, 1.0)
    display.on_stage(Stage(0, 0, 4), RESULT)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began + 61)
    display.last_shown = display.began
    display.on_batch(LAST, {})
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{RESOLVED.experiment.name}  stage ") for line in lines)


def test_other_rule_and_missing_values(plain):
    Display(resolve(Experiment("icarl")), plain).on_stage(Stage(1, 4, 7), RESULT)
    assert "logits 12.50%" in plain.file.getvalue()
    missing = {"old_accuracy": None, "nearest_mean_accuracy": None}
    Display(RESOLVED, plain).on_stage(Stage(0, 0, 4), {**RESULT, **missing})
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
        assert "ccfa[tensorboard]" in err
    assert list(tmp_path.iterdir()) == []
