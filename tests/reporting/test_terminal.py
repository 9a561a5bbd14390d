"""What the terminal shows of a run: a live line on a screen, plain lines elsewhere."""

import io

import pytest

from ccfa.data import Stage
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Progress
from ccfa.reporting import terminal
from ccfa.reporting.terminal import Display, Output, planned_images
from ccfa.reporting.values import duration

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


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Output(file=io.StringIO(), force_terminal=True, width=100)


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
    assert stage.split("  ") == [
        "stage 2/3",
        "7 classes",
        "accuracy 50.00%",
        "(old 25.00%, new 75.00%)",
        "nearest mean 62.50%",
        "2.0 s",
    ]
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


def test_several_runs_have_their_names(screen, monkeypatch):
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


def test_screen_has_a_live_line(screen):
    with Display(RESOLVED, screen) as display:
        display.on_stage(Stage(0, 0, 4), RESULT)
        display.last_shown -= 1
        display.on_batch(LAST, {})
        shown = screen.file.getvalue()
    assert "stage 2/3 · main · epoch 2/2" in shown
    assert "\x1b[?25l" in shown, "the cursor is hidden while the line lives"
    written = screen.file.getvalue()
    assert "\x1b[?25h" in written, "and comes back"
    assert written.rfind("\x1b[2K") > written.rfind("epoch 2/2"), "the live line is erased"


def test_control_characters_are_written_out(plain):
    for text in ("a\x1b[2Jb", "\x9b2J", "bell\x07", "back\rover", "as [bold] it is\n"):
        plain.print(text)
    assert not set("\x1b\x9b\x07\r") & set(plain.file.getvalue())
    assert "[bold]" in plain.file.getvalue()
