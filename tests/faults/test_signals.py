"""Death and signals: whatever ends a run, one command continues it, and it ends as if nothing had happened."""

import itertools
import os
import random
import signal
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ccfa.experiments import Run, running
from ccfa.experiments.running import Stop
from ccfa.methods import METHODS
from children import started, wait
from digests import run_digest
from dying import STEPS, checkpoints, die, left_over, start, stoppable_run
from toy_runs import Silent, begun, toy_resolved, toy_run

KILLED = -signal.SIGKILL
PLACES = ("write:1", "append:1", "step:3", "commit:2", "phase:1", "after_commit:1", "select:1", "pause:1", "evaluate:1")
PLACES += ("report:1", "write:9", "append:1")


def finish(path, **options):
    """Continue until done, and check what is promised afterwards."""
    stoppable_run(path, **options)
    assert Run(path).status["state"] == "finished"
    assert left_over(path) == []
    assert len(checkpoints(path)) == 1
    assert len((path / "stages.csv").read_text().splitlines()) == 4, "a heading and each stage once"
    return run_digest(path)


@pytest.mark.parametrize(
    "name", ["podnet", *(pytest.param(name, marks=pytest.mark.soak) for name in METHODS if name != "podnet")]
)
def test_killed_at_random_times_and_places_until_done(place, name):
    source, resolved = random.Random(name), toy_resolved(name)
    began = time.monotonic()
    toy_run(place / "undisturbed", resolved)
    seconds = time.monotonic() - began
    for times in range(40):
        at_place = source.random() < 0.4
        process = start(place / "run", f"{source.choice(PLACES)}:kill" if at_place else "", resolved=resolved)
        time.sleep(source.uniform(0, seconds * (0.4 + 0.1 * times)))  # longer each time: a busy machine gets there too
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM if source.random() < 0.15 else signal.SIGKILL)
        if wait(process) == 0:
            break
    assert finish(place / "run", resolved=resolved) == run_digest(place / "undisturbed")


@pytest.mark.parametrize(
    "step", [step if step in (6, 17) else pytest.param(step, marks=pytest.mark.soak) for step in range(1, 21)]
)
def test_killed_after_a_step_at_most_an_epoch_is_done_again(place, undisturbed, step):
    assert die(place / "run", f"step:{step}:kill") == KILLED
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    done_again = audience.num_batches - (len(STEPS) - step)
    assert 0 <= done_again <= 3, "the longest epoch has 3 steps"


def test_killed_at_every_kind_of_place(place, undisturbed):
    for fault in PLACES:
        assert die(place / "run", f"{fault}:kill") == KILLED, fault
        assert len(left_over(place / "run")) <= 1
        if fault.startswith("append"):
            with open(place / "run" / "metrics.jsonl", "a") as log:
                log.write('{"stage": 1, "phase": "ma')  # as much of the line as reached the disk
    assert finish(place / "run") == undisturbed


@pytest.mark.parametrize("fault", ["step:3", "select:1", "evaluate:1", "report:1"])
def test_no_epoch_of_a_shared_first_stage_is_lost(place, undisturbed, fault):
    for _ in range(2):
        assert die(place / "run", f"{fault}:kill", first_stages=place / "first stages") == KILLED
    assert finish(place / "run", first_stages=place / "first stages") == undisturbed
    assert len(list((place / "first stages").glob("*.safetensors"))) == 1, "other runs find it"


def kill_at(number):
    """Kill this process at its n-th change of the file system that Python can see."""
    count = itertools.count(1)
    changes = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

    def strike():
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, arguments):
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_CREAT | os.O_WRONLY)
        if opens or event in changes:
            strike()

    def fsync(file, real=os.fsync):
        real(file)
        strike()

    os.fsync = fsync
    sys.addaudithook(watch)


def test_killed_at_every_change_of_the_file_system_while_a_checkpoint_is_written(place):
    resolved = toy_resolved()
    network = resolved.method.backbone(3)
    store = begun(place / "run", resolved.config)
    for value in (1, 2):
        store.save_checkpoint(network.state_dict(), {"value": value})
    value, died = 2, 0
    for number in range(1, 100):
        process = started(
            lambda number=number: (kill_at(number), store.save_checkpoint(network.state_dict(), {"value": -number}))
        )
        code = wait(process)
        found = store.load_checkpoint().state["value"]
        assert found in (value, -number), "the previous or the new one, never neither"
        value = found
        with store.entered(resolved.config, {}):
            store.prune_checkpoints()
        assert len(os.listdir(store.path / "checkpoints")) == 2
        died += code == KILLED
        if code == 0:
            break
    assert code == 0
    assert died > 4


def test_each_signal_stops_between_two_steps_and_no_step_is_lost(place, undisturbed):
    codes = {"sigterm": 143, "sigint": 130, "sighup": 129, "sigusr1": 138, "sigusr2": 140}
    for name, code in codes.items():
        assert die(place / "run", f"step:2:{name}", minutes=1000) == code
        assert Run(place / "run").status["state"] == "interrupted"
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    assert audience.num_batches == len(STEPS) - 2 * len(codes)


def test_a_signal_that_is_sent_twice_stops_once(monkeypatch):
    stop, now = Stop(), 100.0
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now))
    stop.heed(signal.SIGINT, None)
    stop.heed(signal.SIGINT, None)
    assert stop.asked() == 130
    now += 2
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            stop.heed(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ("step:3:sigint,write:5:sigint", 130),  # the second Ctrl-C stops at once, while a checkpoint is written
        ("write:11:sigint,write:12:sigint", 130),  # while the tables are written
        ("write:9:sigterm", 143),  # while the checkpoint of a stage is written
        ("pause:4:sigterm", 143),
    ],
)
def test_a_signal_at_another_place_leaves_whole_checkpoints(place, undisturbed, faults, code):
    assert die(place / "run", faults) == code
    assert Run(place / "run").status["state"] == "interrupted"
    assert left_over(place / "run") == []
    assert finish(place / "run") == undisturbed


def test_a_time_limit_stops_again_and_again_and_each_call_continues(place, undisturbed):
    codes = [die(place / "run", "", max_minutes=0) for _ in range(2)]
    assert codes == [75, 75]
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    assert audience.num_batches == len(STEPS) - 2
