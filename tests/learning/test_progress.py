"""How fast training is, what is left of it, and who is told."""

import io
import json
import math

import pytest
import torch

from ccfa.data import Stage
from ccfa.learning import Learner, Observer, Progress, ProgressLine, progress
from ccfa.learning.progress import COMPILING, EVALUATING, EXEMPLARS, IDLE, WAITING, Pace, Work, planned_work
from toys import STAGES, Recorder, tiny, toy_images

MAIN = Progress(Stage(1, 4, 7), "main", 0, 10, 0, 100, 10)
LOSSES = {"loss": torch.tensor(2.5)}
TRAINED = Work(10, 1000)


class Device:
    """A device that finishes a step some seconds after it was given, and the time that passes."""

    def __init__(self):
        self.now, self.delay, self.asked = 1000.0, 0.0, math.inf

    def ask(self, number):
        self.asked, self.number = self.now, number

    def answer(self):
        return float(self.number) if self.now >= self.asked + self.delay else None


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(progress.time, "monotonic", lambda: device.now)
    monkeypatch.setattr(progress, "LossReader", lambda: device)
    return device


def step(pace, device, seconds, steps=1, place=MAIN):
    for _ in range(steps):
        device.now += seconds
        pace.on_step(place, LOSSES, TRAINED)


def test_rate_is_of_training_steps_alone(device):
    pace = Pace()
    for activity in (COMPILING, EXEMPLARS, EVALUATING, WAITING):
        pace.on_activity(activity)
        step(pace, device, 3600)  # the first step ends the activity
        step(pace, device, 0.5, steps=10)
    assert pace.rate(MAIN) == pytest.approx(20)
    assert pace.beside == pytest.approx(2 * 3600), "later stages compile and wait no more"


def test_rate_follows_a_change_within_a_minute(device):
    pace = Pace()
    step(pace, device, 0.1, steps=2000)
    step(pace, device, 10, steps=10)
    assert pace.rate(MAIN) == pytest.approx(1, rel=0.01)


def test_queued_steps_are_not_finished_steps(device):
    """A hundred steps are queued in a second, and the device needs ten seconds for each of them."""
    pace, device.delay = Pace(), 10.0
    step(pace, device, 0.01, steps=100)
    assert math.isnan(pace.rate(MAIN))
    device.now += 1000
    pace.on_epoch(MAIN, 2.0)  # it has waited for them
    step(pace, device, 0.01, steps=100)
    device.now += 1000
    pace.on_epoch(MAIN, 2.0)
    assert pace.rate(MAIN) == pytest.approx(1, rel=0.01)


def test_losses_are_read_rarely(device):
    asked = []
    device.ask = lambda number: asked.append(device.now)
    device.answer = lambda: 1.0
    step(Pace(), device, 0.01, steps=1000)
    assert len(asked) <= 41


def test_phases_have_rates_of_their_own(device):
    pace = Pace()
    step(pace, device, 1, steps=5)
    pace.on_activity(EXEMPLARS)
    step(pace, device, 0.1, steps=5, place=MAIN._replace(phase="balanced"))
    assert pace.seconds_per_image(False, "main") == pytest.approx(0.1)
    assert pace.seconds_per_image(False, "balanced") == pytest.approx(0.01)
    assert pace.seconds_per_image(True, "main") == pytest.approx(0.1), "as in later stages, if it is all that is known"


def test_time_left_counts_stages_to_come_with_their_costs(device):
    pace, work = Pace(), [{"main": TRAINED}] * 4
    assert math.isnan(pace.seconds_left(work))
    step(pace, device, 1, steps=100)  # 1,000 of 10,000 images, 10 per second
    assert pace.seconds_left(work[1:], 1) == pytest.approx(900 + 2 * 1000)
    pace.on_activity(EVALUATING)
    device.now += 50
    pace.end_stage()
    assert pace.seconds_left(work[2:], 2) == pytest.approx(2 * 1050)


def test_phases_may_see_other_rows_than_planned(device):
    pace = Pace()
    step(pace, device, 1, steps=10, place=MAIN._replace(num_batches=50))
    assert pace.images_left([{"main": TRAINED}, {"main": TRAINED}]) == 2 * 5000 - 100


def test_state_survives_and_nonsense_is_passed_over(device):
    pace, again = Pace(), Pace()
    step(pace, device, 1, steps=10)
    again.restore(json.loads(json.dumps(pace.state())))
    assert again.state() == pace.state()
    for wrong in ({}, {"speeds": 3}, {**pace.state(), "speeds": [[1]]}, {**pace.state(), "done": [2]}):
        again.restore(wrong)
        assert again.state() == pace.state()


def test_nested_phases_are_planned():
    method, train = tiny("aanet", learn_blend=True, epochs=3), toy_images()
    main, blend = list(planned_work(method, train, STAGES[1]).values())[:2]
    assert (main.passes, blend.passes) == (3, 3)


class Activities(Observer):
    def __init__(self):
        self.seen = []

    def on_activity(self, stage, activity):
        self.seen.append((stage.index, activity))


def test_observers_hear_of_activities():
    observer = Activities()
    learner = Learner(tiny("podnet", epochs=1), toy_images(), observer=observer)
    learner.learn(STAGES[0])
    assert {(0, EXEMPLARS), (0, IDLE)} <= set(observer.seen)
    learner.evaluate(toy_images(seed=1))
    assert observer.seen[-2:] == [(0, EVALUATING), (0, IDLE)]


def test_progress_and_an_observer_go_together(capsys):
    recorder = Recorder()
    learner = Learner(tiny("podnet", epochs=1), toy_images(), observer=recorder, progress=True)
    learner.learn(STAGES[0])
    assert recorder.batches
    assert not any(capsys.readouterr()), "a file gets its first line after half a minute"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("file", "num_lines"), [(Screen(), 0), (io.StringIO(), 2)])
def test_python_shows_the_same_progress(device, file, num_lines):
    line = ProgressLine(tiny("podnet", epochs=10), toy_images(), file)
    line.on_activity(MAIN.stage, EVALUATING)
    for _ in range(65):
        device.now += 1
        line.on_batch(MAIN, LOSSES)
    line.on_activity(MAIN.stage, IDLE)
    assert file.getvalue().count("\n") == num_lines
    assert "stage 2 · main · epoch 1/10 · batch 1/100 · loss 2.500 · 10 images/s · about " in file.getvalue()
    assert num_lines or (EVALUATING in file.getvalue() and file.getvalue().endswith(" \r"))
