"""What a process may use up, and what it leaves alone."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ccfa.data import split
from ccfa.errors import ResourceError
from ccfa.experiments import Experiment
from ccfa.experiments.experiment import Resolved
from children import in_child, limit_memory
from commands import environment
from dying import checkpoints
from toy_runs import Silent, toy_run
from toys import Shortened, tiny, toy_images


def test_a_batch_that_does_not_fit_is_named_with_its_size(place):
    images = toy_images(num_classes=2, per_class=4000)
    method = tiny("finetune")
    method = replace(method, phases=Shortened(method.phases, 1, 8000))
    resolved = Resolved(Experiment("finetune"), method, images, images, split(2, 2, ()), (0, 1), ())

    def too_large():
        limit_memory(150_000_000)
        toy_run(place / "run", resolved)

    with pytest.raises(ResourceError, match=r"batch size 8000: .*--set batch_size=4000"):
        in_child(too_large)


class Watcher(Silent):
    """Notes memory, open files and threads after each stage."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_stage(self, stage, result):
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        self.seen.append((resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))


@pytest.mark.parametrize("num_stages", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_stages_leave_nothing_behind(place, num_stages):
    images, watcher = toy_images(num_stages, per_class=4), Watcher()
    stages = split(num_stages, 1, 1)
    resolved = Resolved(Experiment("podnet"), tiny("podnet", epochs=1), images, images, stages, (), ())

    def watched():
        toy_run(place / "run", resolved, watcher)
        return watcher.seen

    memory, files, threads = zip(*in_child(watched, timeout=300)[4:], strict=True)
    allowed = 40_000_000 + 1_000_000 * num_stages  # oneDNN keeps what it compiles for each new shape
    assert max(memory) - memory[0] < allowed
    assert len(set(files)) == len(set(threads)) == 1
    assert len(checkpoints(place / "run")) == 1


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
