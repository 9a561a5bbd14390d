"""Several processes at once: one writes a run directory, others read it whole."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ccfa.errors import LockedError
from ccfa.experiments import Run
from children import wait
from commands import environment
from digests import run_digest
from dying import checkpoints, start, status, stoppable_run
from toy_runs import toy_run


def until(condition, timeout=20):
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def writing(place):
    """A run under way in another process, which sleeps for a second inside its second stage."""
    process = start(place / "run", "step:6:sleep")
    until(lambda: checkpoints(place / "run"))
    yield place / "run", process
    try:
        os.kill(process, signal.SIGKILL)
        wait(process)
    except (ProcessLookupError, ChildProcessError):
        pass


@pytest.mark.parametrize("text", [None, b"", b"{", b'{"pid": 1}', b"\xff" * 5000])
def test_a_second_run_in_a_directory_is_refused_at_once(writing, text):
    path, process = writing
    if text is not None:
        (path / ".lock").write_bytes(text)  # it is information only: the kernel's lock decides
    with pytest.raises(LockedError, match=r"is being written by another process") as error:
        stoppable_run(path)
    assert error.value.exit_code == 7
    assert f"({process} on {socket.gethostname()})" in str(error.value)


def test_the_lock_of_a_dead_process_is_taken_at_once(writing, undisturbed):
    path, process = writing
    os.kill(process, signal.SIGKILL)
    wait(process)
    assert status(path)["pid"] == process
    stoppable_run(path)
    assert run_digest(path) == undisturbed


def test_readers_never_see_half_a_file(place):
    path = place / "run"
    process = start(path)
    until((path / "config.json").exists)
    directory, read = Run(path), 0
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if (path / "status.json").exists():
            assert directory.status["state"] in ("running", "finished")
        directory.read_json("config.json")
        if (path / "report.json").exists():
            assert directory.report().overall
        for stage in range(3):
            if (path / "exemplars" / f"stage-{stage:03d}.json").exists():
                directory.read_exemplars(stage)
                directory.read_predictions(stage)
        read += 1
    assert wait(process) == 0
    assert read > 50


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_runs_in_processes_however_they_are_started(place, undisturbed, method):
    process = multiprocessing.get_context(method).Process(target=toy_run, args=(place / "run",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert run_digest(place / "run") == undisturbed


def test_runs_in_threads_and_one_after_the_other(place, undisturbed):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    threads = [threading.Thread(target=stoppable_run, args=(place / name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stoppable_run(place / "c")
    assert {run_digest(place / name) for name in "abc"} == {undisturbed}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_importing_does_nothing(tmp_path):
    code = """
import random, socket, sys, threading, os
state = random.getstate()
def refuse(*arguments): raise AssertionError("network")
socket.socket.connect = refuse
written = []
sys.addaudithook(lambda event, a: written.append(a) if event == "open" and isinstance(a[2], int) and a[2] & 3 else None)
import torch
before = torch.random.get_rng_state()
num_threads = threading.active_count()
written.clear()
import ccfa, ccfa.cli, ccfa.experiments
assert random.getstate() == state
assert torch.equal(torch.random.get_rng_state(), before)
assert threading.active_count() == num_threads
assert not [path for path, *_ in written if not str(path).startswith("/dev/")], written
"""
    options = {"cwd": tmp_path, "env": environment(PYTHONDONTWRITEBYTECODE="1"), "timeout": 60}
    subprocess.run([sys.executable, "-c", code], check=True, **options)
    assert not list(tmp_path.iterdir())
