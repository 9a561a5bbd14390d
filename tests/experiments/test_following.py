"""Runs shared by several processes: one writer, checkpoints for any number of processes, and one end for all."""

import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import ccfa
from ccfa import files
from ccfa.errors import DataError, ResourceError
from ccfa.experiments import Experiment, Run, run
from ccfa.experiments.following import follow
from ccfa.experiments.running import AgreedStop
from ccfa.learning.processes import joined
from ccfa.settings import Running
from commands import COMMAND, contents, environment
from teams import in_processes
from toy_runs import StopAfter, toy_resolved, toy_run
from toys import STAGES

CPU = Running(device="cpu")


def shared_run(path, first=lambda: None, other=lambda: None, stop=None, resolve=None, asked=CPU):
    """How the processes of a shared toy run end; `first` and `other` are called at their beginning."""
    resolved = toy_resolved()

    def process():
        with joined("cpu") as processes:
            if processes.rank:
                other()
                return follow(asked, processes, resolve or (lambda *_: resolved))
            first()
            return run(resolved, Run(path), CPU, None, stop, processes=processes).overall

    return in_processes(process)


def signalled_after(num_steps, number=signal.SIGKILL):
    """Let this process get a signal when it asks for the n-th time whether to stop."""
    asked, times = AgreedStop.asked, itertools.count()

    def signalled(stop):
        if next(times) == num_steps:
            os.kill(os.getpid(), number)
        return asked(stop)

    AgreedStop.asked = signalled  # in a child, which ends with the test


def resembles(path, other):
    """Whether two finished toy runs have the same exemplars and predictions, and weights that differ by rounding."""
    one, two = Run(path), Run(other)
    for stage in STAGES:
        assert one.read_exemplars(stage.index) == two.read_exemplars(stage.index)
        predictions = two.read_predictions(stage.index)
        assert all((values == predictions[rule]).all() for rule, values in one.read_predictions(stage.index).items())
        weights = two.network_weights(stage.index)
        for name, tensor in one.network_weights(stage.index).items():
            np.testing.assert_allclose(tensor, weights[name], rtol=1e-3, atol=1e-4)
    assert one.report().overall == pytest.approx(two.report().overall)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A finished toy run of one process."""
    path = tmp_path_factory.mktemp("alone") / "run"
    toy_run(path)
    return path


def test_a_shared_run_resembles_one(tmp_path, alone):
    def write_nothing():
        files.os.open = files.os.replace = files.tempfile.mkdtemp = None

    assert [code for code, _ in shared_run(tmp_path / "run", other=write_nothing)] == [0, 0]
    resembles(tmp_path / "run", alone)
    assert Run(tmp_path / "run").environment["processes"] == 2
    assert Run(alone).environment["processes"] == 1


@pytest.mark.parametrize("begun_by", [1, 2])
def test_a_run_continues_with_another_number(tmp_path, alone, begun_by):
    path, stop = tmp_path / "run", StopAfter(12)  # in the second stage
    if begun_by == 1:
        with pytest.raises(SystemExit):
            toy_run(path, stop=stop)
        assert [code for code, _ in shared_run(path)] == [0, 0]
    else:
        assert [code for code, _ in shared_run(path, stop=stop)] == [143, 143]
        assert Run(path).checkpoint_numbers()
        toy_run(path)
    resembles(path, alone)
    (resumed,) = Run(path).environment["resumed"]
    assert resumed["differences"]["processes"] == [begun_by, 3 - begun_by]


def test_all_processes_use_the_device_of_process_0(tmp_path):
    """A run that began on a CPU goes on there, although a GPU machine's processes were asked for any device."""
    elsewhere = Running(device="cuda")
    assert [code for code, _ in shared_run(tmp_path / "run", asked=elsewhere)] == [0, 0]


def test_a_signal_to_one_stops_all(tmp_path):
    ended = shared_run(tmp_path / "run", other=lambda: signalled_after(3, signal.SIGTERM))
    assert [code for code, _ in ended] == [143, 143]
    assert Run(tmp_path / "run").checkpoint_numbers()


def test_a_killed_process_ends_the_run(tmp_path):
    (code, error), (killed, _) = shared_run(tmp_path / "run", other=lambda: signalled_after(3))
    assert (code, killed) == (ResourceError.exit_code, -signal.SIGKILL)
    assert "killed" in str(error)
    assert Run(tmp_path / "run").status["state"] == "failed"


def test_the_others_outlive_process_0_briefly(tmp_path):
    (killed, _), (code, error) = shared_run(tmp_path / "run", first=lambda: signalled_after(3))
    assert (code, killed) == (ResourceError.exit_code, -signal.SIGKILL)
    assert "killed" in str(error)


def test_process_0_reports_what_others_lack(tmp_path):
    def no_data(experiment, data_dir):
        raise DataError("There is no folder of images.")

    (code, error), (other, _) = shared_run(tmp_path / "run", resolve=no_data)
    assert (code, other) == (ResourceError.exit_code, DataError.exit_code)
    assert "process 1: There is no folder of images" in str(error)


def test_an_error_of_process_0_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (code, error), (other, silent) = shared_run(tmp_path / "run")
    assert code == other == 2
    assert "exists already" in str(error)
    assert silent is None


def test_a_finished_run_is_shown_again(tmp_path):
    """`ccfa.run` joins the processes by itself, twice in one script."""
    quick = Experiment("finetune", scenario="9,1", options={"epochs": 0})

    def script():
        path = tmp_path / "run"
        return [ccfa.run(quick, path, CPU).report().finished for _ in range(2)]

    found = in_processes(script)
    assert found == [(0, [True, True])] * 2


def test_a_sweep_is_refused(call, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, error = call("sweep", "finetune", "--device", "cpu")
    assert code == 2
    assert "torchrun" in error


@pytest.mark.slow
def test_torchrun_starts_a_run(tmp_path):
    words = ["finetune", "--set", "epochs=1", "--scenario", "9,1", "--device", "cpu", "--out", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, *COMMAND[1:], "run", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(b"Run directory: run") == 1
    assert b"2 processes" in ended.stdout
    assert Run(tmp_path / "run").is_finished()
    assert not any(name.startswith("checkpoints/damaged") for name in contents(tmp_path / "run"))
