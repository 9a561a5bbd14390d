"""Death and signals: whatever ends a run, it is continued by one command and ends as if nothing had happened."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from ccfa.augmentation.samples import Samples
from ccfa.errors import ModelError, Stopped
from ccfa.experiments.run_directory import Run
from ccfa.files import write_atomically
from ccfa.methods import with_augmentation
from children import in_child, started, wait
from commands import COMMAND, environment
from digests import run_digest
from dying import STEPS, checkpoints, die, left_over, start, status, stoppable_run
from toy_runs import Silent, begun, toy_resolved, toy_run
from toys import tiny

KILLED = -signal.SIGKILL


def finish(path, **options):
    """Continue until done, and hold what is promised afterwards."""
    stoppable_run(path, **options)
    assert status(path)["state"] == "finished"
    assert left_over(path) == []
    return run_digest(path)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_times_until_done(place, undisturbed, seed):
    source = random.Random(seed)
    for _ in range(40):
        process = start(place / "run")
        time.sleep(source.uniform(0, 1.0))
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if wait(process) == 0:
            break
    assert finish(place / "run") == undisturbed


@pytest.mark.parametrize(
    "step", [step if step in (1, 6, 10, 17) else pytest.param(step, marks=pytest.mark.soak) for step in range(1, 21)]
)
def test_killed_after_a_step_at_most_an_epoch_is_done_again(place, undisturbed, step):
    assert die(place / "run", f"step:{step}:kill") == KILLED
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    done_again = audience.num_batches - (len(STEPS) - step)
    assert 0 <= done_again <= 3, "the longest epoch has 3 steps"


@pytest.mark.parametrize(
    "fault", ["phase:3", "select:2", "pause:2", "evaluate:2", "commit:3", "after_commit:4", "report:2", "write:9"]
)
def test_killed_at_any_other_place(place, undisturbed, fault):
    assert die(place / "run", f"{fault}:kill") == KILLED
    if fault.startswith("after_commit"):
        assert len(checkpoints(place / "run")) == 3, "the surplus one is not removed yet"
    assert finish(place / "run") == undisturbed
    assert len(checkpoints(place / "run")) <= 2
    stages = (place / "run" / "stages.csv").read_text().splitlines()
    assert len(stages) == 4, "a heading and each stage once"


def kill_at(number):
    """Kill this process at its n-th change of the file system, of all that Python can see."""
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


def test_killed_at_every_change_while_a_file_is_replaced(place):
    path = place / "report.html"
    for number in range(1, 20):
        path.write_text("old")
        process = started(lambda number=number: (kill_at(number), write_atomically(path, "new" * 1000)))
        code = wait(process)
        assert path.read_text() in ("old", "new" * 1000)
        if code == 0:
            break
    assert code == 0
    assert number > 3


@pytest.mark.parametrize("number", [1, 4, 7])
def test_killed_while_a_line_is_added_to_the_metrics(place, undisturbed, number):
    assert die(place / "run", f"append:{number}:kill") == KILLED
    with open(place / "run" / "metrics.jsonl", "a") as log:
        log.write('{"stage": 1, "phase": "ma')  # as much of the line as reached the disk
    assert finish(place / "run") == undisturbed


def test_killed_five_times_while_resuming(place, undisturbed):
    for fault in ("step:9", "write:1", "step:1", "write:3", "commit:1"):
        assert die(place / "run", f"{fault}:kill") == KILLED
        assert len(left_over(place / "run")) <= 1
    assert finish(place / "run") == undisturbed


def test_a_file_that_is_empty_after_a_power_loss_costs_one_checkpoint(place, undisturbed):
    assert die(place / "run", "step:12:kill") == KILLED
    *_, newest = checkpoints(place / "run")
    newest.write_bytes(b"")
    with pytest.warns(UserWarning, match="the one before it is used"):
        stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_name_is_given_only_to_what_is_on_the_disk_and_is_then_flushed_itself(place, monkeypatch):
    calls = []

    def noted(name, real):
        def call(*arguments, **options):
            named = [os.readlink(f"/proc/self/fd/{arguments[0]}")] if name == "fsync" else arguments
            calls.append((name, *map(str, named)))
            return real(*arguments, **options)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    toy_run(place / "run", checkpoint_minutes=0)
    renames = [index for index, call in enumerate(calls) if call[0] != "fsync"]
    assert len(renames) > 20
    for index in renames:
        _, source, target = calls[index]
        assert any(call[:2] == ("fsync", source) for call in calls[:index]), source
        assert calls[index + 1] == ("fsync", os.path.dirname(target))


@pytest.mark.parametrize(
    ("name", "code"), [("sigterm", 143), ("sigint", 130), ("sighup", 129), ("sigusr1", 138), ("sigusr2", 140)]
)
@pytest.mark.parametrize("fault", ["step:3", "step:9", "pause:4"])
def test_a_signal_stops_between_two_steps(place, undisturbed, name, code, fault):
    assert die(place / "run", f"{fault}:{name}", minutes=1000) == code
    assert status(place / "run")["state"] == "interrupted"
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    if fault.startswith("step"):
        assert audience.num_batches == len(STEPS) - int(fault.removeprefix("step:")), "not a step is lost"


@pytest.mark.parametrize("second", ["step:3:sigint", "write:12:sigint"])
def test_a_second_ctrl_c_stops_at_once_and_the_checkpoint_before_stands(place, undisturbed, second):
    first = "write:11:sigint" if second.startswith("write") else "step:3:sigint"
    both = f"{first},{second}" if first != second else f"{first},write:8:sigint"
    assert die(place / "run", both) == 130
    assert status(place / "run")["state"] == "interrupted"
    assert finish(place / "run") == undisturbed


@pytest.mark.parametrize("number", [7, 8, 9])
def test_sigterm_while_a_checkpoint_is_written_makes_one_checkpoint_whole(place, undisturbed, number):
    assert die(place / "run", f"write:{number}:sigterm") == 143
    assert left_over(place / "run") == []
    assert checkpoints(place / "run")
    assert finish(place / "run") == undisturbed


def test_a_reader_that_leaves_ends_a_run_that_can_be_continued(tmp_path):
    words = ["run", "finetune", "--scenario", "5,5", "--set", "epochs=2", "--out", "run"]
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert status(tmp_path / "run")["state"] in ("interrupted", "failed")

    def resume():
        os.chdir(tmp_path)
        sys.argv = ["ccfa", "resume", "run"]
        from ccfa import cli

        with suppress(SystemExit):
            cli.main()
        return status(tmp_path / "run")["state"]

    assert in_child(resume) == "finished"


def test_a_stopped_process_goes_on_when_it_is_continued(place, undisturbed):
    process = start(place / "run", "step:8:sleep")
    while not checkpoints(place / "run"):
        time.sleep(0.01)
    os.kill(process, signal.SIGSTOP)
    time.sleep(1)
    os.kill(process, signal.SIGCONT)
    assert wait(process) == 0
    assert run_digest(place / "run") == undisturbed
    assert 1 < Run(place / "run").report().seconds < 30


def test_a_time_limit_stops_again_and_again_and_each_call_goes_on(place, undisturbed):
    codes = [die(place / "run", "", max_minutes=0) for _ in range(3)]
    assert codes == [75, 75, 75]
    assert status(place / "run")["state"] == "interrupted"
    audience = Silent()
    assert finish(place / "run", audience=audience) == undisturbed
    assert audience.num_batches == len(STEPS) - 3


class Faulty:
    """A user's own augmentation, with a mistake in it."""

    phases = ("main",)
    needs_old_head = True

    def __init__(self):
        self.calls = 0

    def __call__(self, samples, head, old_head, criterion, generator) -> Samples:
        """Fail at the third step that has an old head."""
        self.calls += old_head is not None
        if self.calls == 3:
            raise ZeroDivisionError("a mistake of mine")
        return samples


def test_a_mistake_in_the_user_s_code_leaves_a_traceback_and_the_last_checkpoint(place):
    augmentation = Faulty()
    resolved = toy_resolved()
    resolved = resolved._replace(method=with_augmentation(tiny("podnet"), augmentation))
    assert die(place / "run", "", resolved=resolved) == 1
    assert status(place / "run")["state"] == "failed"
    told = (place / "run" / "errors.txt").read_text()
    assert "in __call__" in told
    assert "ZeroDivisionError: a mistake of mine" in told
    assert len(checkpoints(place / "run")) == 2
    augmentation.calls = -1000  # mended
    stoppable_run(place / "run", resolved=resolved)
    assert status(place / "run")["state"] == "finished"
    assert (place / "run" / "errors.txt").read_text() == told  # continuing cuts logs, and not this


def test_the_message_says_how_to_go_on(place):
    with pytest.raises(Stopped) as stopped:
        stoppable_run(place / "run", max_minutes=0)
    assert f"Continue with: ccfa resume {place / 'run'}" in stopped.value.message
    with pytest.raises(ModelError, match="not a complete run directory"):
        Run(place / "other").is_finished()
