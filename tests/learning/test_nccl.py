"""A group of processes that exchange what they compute, on GPUs by NCCL, trains as a process without a group.

This file is also the program that torchrun starts: `torchrun tests/learning/test_nccl.py FILE`.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.processes import ALONE, Processes
from commands import environment
from teams import in_processes
from toys import STAGES, Double, Recorder, tiny, toy_images


def trained(device, processes=ALONE, precision="float32"):
    """The losses of a toy run and what it predicts; in double precision unless bf16 is asked for."""
    method, recorder = tiny("podnet", epochs=1), Recorder()
    if precision == "float32":
        torch.set_default_dtype(torch.float64)
        method = replace(method, transforms=Double(**asdict(method.transforms)))
    how = {"device": device, "acceleration": Acceleration(precision), "processes": processes}
    try:
        learner = Learner(method, toy_images(), observer=recorder, **how)
        for stage in STAGES[:2]:
            learner.learn(stage)
        return [losses["loss"] for _, losses in recorder.batches], learner.predict(toy_images(seed=1).images).tolist()
    finally:
        torch.set_default_dtype(torch.float32)


def in_group(device):
    """A toy run in the group that was started, also in a group of one; on GPUs in bf16 as well."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    processes = Processes(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    found = [trained(device, processes, precision) for precision in ("float32", "bf16")[: 1 + (device == "cuda")]]
    dist.destroy_process_group()
    return found


def agree(found, alone):
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-7)
    assert found[1] == alone[1]


def test_a_group_of_one_trains_as_one():
    ((code, found),) = in_processes(lambda: in_group("cpu"), 1)
    assert code == 0
    agree(found[0], trained("cpu"))


@pytest.mark.gpu
def test_nccl_trains_as_one_process(tmp_path):
    """NCCL takes one process per GPU. With a single GPU, a group of one sends everything through NCCL all the same."""
    number = str(min(2, torch.cuda.device_count()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", number, "--standalone"]
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    command = [*torchrun, __file__, str(tmp_path / "found.json")]
    ended = subprocess.run(command, env=variables, capture_output=True, timeout=240)
    assert ended.returncode == 0, ended.stderr.decode()
    exact, rounded = json.loads((tmp_path / "found.json").read_text())
    agree(exact, trained("cuda"))
    np.testing.assert_allclose(rounded[0][:3], trained("cuda", precision="bf16")[0][:3], rtol=0.05)


if __name__ == "__main__":
    results = in_group("cuda")
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(results))
