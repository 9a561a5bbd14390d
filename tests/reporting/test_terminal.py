import io
from itertools import pairwise

import pytest
import torch
from rich.console import Console

from ccfa.data import Stage
from ccfa.experiments import Experiment, Run, resolve, run
from ccfa.experiments.options import schema
from ccfa.learning import Progress
from ccfa.methods import METHODS
from ccfa.reporting import terminal
from ccfa.reporting.terminal import Display, packed, planned_images
from ccfa.reporting.values import duration

RESOLVED = resolve(Experiment("podnet", scenario="4,3,3", options={"epochs": "1", "balanced_epochs": "1"}))
RESULT = {
    "accuracy": 0.5,
    "old_accuracy": 0.25,
    "new_accuracy": 0.75,
    "nearest_mean_accuracy": 0.625,
    "seconds": 2.04,
}


def console(live=False, **options):
    file = io.StringIO()
    return file, Console(file=file, force_terminal=live, width=100, markup=False, highlight=False, **options)


def at(epoch=0, batch=0, num_epochs=2):
    return Progress(Stage(1, 4, 7), "main", epoch, num_epochs, batch, 3, 64)


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        *((method, {}) for method in METHODS),
        *((method, {"memory": 3}) for method in ("replay", "ucir", "podnet", "bic")),
        *((method, {"memory_total": 47}) for method in ("replay", "ucir", "podnet", "bic", "gdumb")),
    ],
)
def test_the_plan_is_what_is_trained_on(tmp_path, method, memory):
    names = [name for name in ("epochs", "balanced_epochs") if name in schema(METHODS[method])]
    options = dict.fromkeys(names, "1")
    resolved = resolve(Experiment(method, scenario="4,3,3", options=options, **memory))
    directory = Run(tmp_path / "run")
    _, quiet = console()
    with Display(resolved, quiet) as display:
        run(resolved, directory, display, torch.device("cpu"))
    assert display.done_here == display.done == display.total == sum(planned_images(resolved)) > 0


def test_piped_output_is_one_line_a_phase_without_controls():
    file, plain = console()
    with Display(RESOLVED, plain) as display:
        display.on_batch(at(), {})
        display.on_epoch(at(0), {"loss": 9.0}, 0.1, 1.0)
        display.on_epoch(at(1), {"loss": 1.2345}, 0.1, 1.0)
        display.on_stage(Stage(1, 4, 7), RESULT)
    first, second = file.getvalue().splitlines()
    assert first.startswith("stage 2/3 · main · epoch 2/2 · ")
    assert first.endswith(" left · loss 1.234")
    assert second == "stage 2/3  7 classes  accuracy 50.00%  (old 25.00%, new 75.00%)  nearest mean 62.50%  2.0 s"
    assert not set("\r\x1b") & set(file.getvalue())


def test_piped_output_shows_the_last_stages_accuracies():
    file, plain = console()
    display = Display(RESOLVED, plain)
    for accuracy in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        display.on_stage(Stage(0, 0, 4), {**RESULT, "accuracy": accuracy})
    display.on_epoch(at(1), {"loss": 1.0}, 0.1, 1.0)
    assert file.getvalue().splitlines()[-1].endswith("loss 1.000 · accuracies 80.0% 70.0% 60.0% 50.0% 40.0%")


def test_the_time_left_knows_what_another_process_has_done(monkeypatch):
    file, plain = console()
    display = Display(RESOLVED, plain)
    first, *others = planned_images(RESOLVED)
    display.on_stage(RESOLVED.stages[0], RESULT)  # as a continued run tells it
    monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began + 8)
    display.on_batch(at(), {})
    left = duration((sum(others) - 64) / 8)
    assert f" · 8 images/s · {left} left" in file.getvalue()
    assert display.done == first + 64


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_parts_are_packed_into_the_width(width):
    parts = ["stage 10/51", "balanced", "epoch 12/20", "12,345 images/s", "1:23:45 left", "accuracies 50.0% 40.0%"]
    lines = packed(parts, width)
    assert " · ".join(lines).replace("\n", "") == " · ".join(parts)
    assert all(len(line) <= max(width, *map(len, parts)) for line in lines)
    for line, following in pairwise(lines):
        assert len(f"{line} · {following.split(' · ')[0]}") > width, "no line could have held more"


def test_piped_output_shows_a_sign_of_life_in_long_phases(monkeypatch):
    file, plain = console()
    display = Display(RESOLVED, plain)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began + 4.9)
    display.on_batch(at(), {})
    assert file.getvalue() == ""
    monkeypatch.setattr(terminal.time, "monotonic", lambda: display.began + 8)
    display.on_batch(at(), {})
    # 128 images in 8 seconds
    left = duration((display.total - 128) / 16)
    assert file.getvalue() == f"stage 2/3 · main · epoch 1/2 · 16 images/s · {left} left\n"


def test_beside_the_method_s_own_rule_stands_the_other_one():
    file, plain = console()
    Display(resolve(Experiment("icarl")), plain).on_stage(Stage(1, 4, 7), {**RESULT, "logits_accuracy": 0.125})
    assert "accuracy 50.00%  (old 25.00%, new 75.00%)  logits 12.50%" in file.getvalue()


def test_a_stage_without_old_classes_or_exemplars_leaves_them_out():
    file, plain = console()
    missing = {"old_accuracy": None, "nearest_mean_accuracy": None}
    Display(RESOLVED, plain).on_stage(Stage(0, 0, 4), {**RESULT, **missing})
    assert file.getvalue() == "stage 1/3  4 classes  accuracy 50.00%  2.0 s\n"


def test_a_screen_has_a_live_line_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file, screen = console(live=True)
    with Display(RESOLVED, screen) as display:
        display.on_stage(Stage(0, 0, 4), RESULT)
        display.last_shown -= 1
        display.on_batch(at(), {})
        shown = file.getvalue()
    assert "stage 2/3 · main · epoch 1/2" in shown
    assert "accuracies 50.0%" in shown
    assert "\x1b[?25l" in shown, "the cursor is hidden while the line lives"
    assert "\x1b[?25h" in file.getvalue(), "and comes back"
    assert file.getvalue().rfind("\x1b[2K") > file.getvalue().rfind("epoch 1/2"), "the live line is erased"


def test_the_live_line_is_not_drawn_at_every_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file, screen = console(live=True)
    with Display(RESOLVED, screen) as display:
        for batch in range(100):
            display.on_batch(at(batch=batch), {})
    assert file.getvalue().count("images/s") < 50


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file, dumb = console(live=True)
    with Display(RESOLVED, dumb) as display:
        display.on_epoch(at(1), {"loss": 1.0}, 0.1, 1.0)
    assert file.getvalue().startswith("stage 2/3")
    assert not set("\r\x1b") & set(file.getvalue())
