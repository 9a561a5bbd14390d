"""Numbers that stop being numbers, memory and devices that give out, clocks that jump: said, and survived."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import ccfa
from ccfa.data import split
from ccfa.errors import DivergedError, ResourceError
from ccfa.experiments import Experiment
from ccfa.experiments.environment import environment
from ccfa.experiments.experiment import Resolved
from ccfa.learning.acceleration import Acceleration
from children import in_child, limit_memory
from commands import command
from digests import run_digest
from dying import checkpoints, die, status, stoppable_run
from toy_runs import CPU, Silent, toy_resolved, toy_run
from toys import Shortened, tiny, toy_images


@pytest.mark.parametrize("step", [2, 7, 10, 20])
def test_weights_that_become_nan_end_the_run_and_a_finite_checkpoint_is_kept(place, undisturbed, step):
    assert die(place / "run", f"step:{step}:nan") == 6
    assert status(place / "run")["state"] == "failed"
    for path in checkpoints(place / "run"):
        stored = load(path.read_bytes())
        assert all(tensor.isfinite().all() for tensor in stored.values() if tensor.is_floating_point())
    diagnosis = json.loads((place / "run" / "diagnosis.json").read_text())
    assert "nan" in diagnosis["largest_weights"].values()
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_loss_that_diverges_is_told_with_its_place_and_its_parts(place):
    resolved = toy_resolved()
    phases = resolved.method.phases
    method = replace(resolved.method, phases=lambda stage: tuple(replace(p, lr=1e20) for p in phases(stage)))
    with pytest.raises(DivergedError, match=r"stage 1, phase main, epoch \d.*learning rate of 1e\+20.*smaller"):
        toy_run(place / "run", resolved._replace(method=method))
    diagnosis = json.loads((place / "run" / "diagnosis.json").read_text())
    assert {"stage", "phase", "epoch", "lr", "losses"} <= diagnosis.keys()


@pytest.mark.parametrize("step", [1, 9])
def test_out_of_memory_names_a_smaller_batch_and_can_be_continued(place, undisturbed, step):
    assert die(place / "run", f"step:{step}:oom") == 5
    assert status(place / "run")["state"] == "failed"
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_batch_that_does_not_fit_is_told_with_its_size(place):
    images = toy_images(num_classes=2, per_class=4000)
    method = tiny("finetune")
    method = replace(method, phases=Shortened(method.phases, 1, 8000))
    resolved = Resolved(Experiment("finetune"), method, images, images, split(2, 2, ()), "", (0, 1), ())

    def too_large():
        limit_memory(150_000_000)
        toy_run(place / "run", resolved)

    with pytest.raises(ResourceError, match=r"Out of memory at batch size 8000: .*--set batch_size=4000"):
        in_child(too_large)


def test_an_error_of_the_device_in_the_middle_can_be_continued(place, undisturbed):
    assert die(place / "run", "step:9:raise") == 1
    assert status(place / "run")["state"] == "failed"
    assert "RuntimeError" in (place / "run" / "errors.txt").read_text()
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device to hide")
def test_a_hidden_gpu_is_code_5(tmp_path):
    result = command("run", "podnet", "--device", "cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 5


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0, -time.time()], ids=["back", "ahead", "1970"])
def test_a_clock_that_jumps_changes_nothing(place, undisturbed, monkeypatch, jump):
    real, calls = time.time, []

    def jumping():
        calls.append(None)
        return real() + (jump if len(calls) > 1 else 0)

    monkeypatch.setattr(time, "time", jumping)
    report = toy_run(place / "run")
    assert run_digest(place / "run") == undisturbed
    assert 0 < report.seconds < 60


def test_durations_are_measured_by_a_clock_that_cannot_jump():
    for path in Path(ccfa.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btime\.time\(|datetime\.now|perf_counter\(\) \+", path.read_text(encoding="utf-8")), (
            path
        )


def test_seeds_decide_and_threads_are_told(place, undisturbed):
    toy_run(place / "again")
    toy_run(place / "other", toy_resolved(seed=1))
    assert run_digest(place / "again") == undisturbed
    assert run_digest(place / "other") != undisturbed
    assert environment(CPU, Acceleration())["threads"] == torch.get_num_threads()


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Watcher(Silent):
    """Notes memory, open files and threads after each stage."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_stage(self, stage, result):
        """Note them."""
        self.seen.append((resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))


@pytest.mark.parametrize("num_stages", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_stages_leave_nothing_behind(place, num_stages):
    num_classes = num_stages
    images = toy_images(num_classes, per_class=4)
    method = tiny("podnet", epochs=1)
    resolved = Resolved(Experiment("podnet"), method, images, images, split(num_classes, 1, 1), "", (), ())
    watcher = Watcher()

    def watched():
        toy_run(place / "run", resolved, watcher)
        return watcher.seen

    seen = in_child(watched, timeout=300)
    memory, files, threads = zip(*seen[5:], strict=True)
    assert max(memory) - memory[0] < 40_000_000
    assert len(set(files)) == len(set(threads)) == 1
    assert len(checkpoints(place / "run")) <= 2
