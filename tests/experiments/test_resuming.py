"""A continued run keeps the device, precision and acceleration it began with."""

from dataclasses import asdict

import pytest
import torch

from ccfa.errors import ResourceError
from ccfa.experiments.running import acceleration_of, running_again
from ccfa.learning.acceleration import Acceleration
from ccfa.settings import Running
from toy_runs import CPU, begun, toy_resolved


def again(directory, **how):
    return acceleration_of(running_again(directory, Running(**how)))


def test_a_run_goes_on_with_the_device_and_precision_it_began_with(tmp_path):
    resolved = toy_resolved()
    directory = begun(
        tmp_path / "run", resolved.config, {"torch_device": "cpu", "acceleration": {"precision": "float32"}}
    )
    assert again(directory, device="auto")[0] == CPU
    directory.write_json("environment.json", {"torch_device": "cuda:7", "acceleration": {"precision": "bf16"}})
    with pytest.raises(ResourceError, match="cuda:7"):
        again(directory, device="auto")
    assert again(directory, device="cpu")[1].precision == "float32"


@pytest.mark.parametrize("off", [{}, {"compile": False}, {"graph": False}, {"compile": False, "graph": False}], ids=str)
def test_what_was_switched_off_stays_off(tmp_path, monkeypatch, off):
    monkeypatch.setattr("ccfa.experiments.running.pick_device", lambda name: torch.device(name))
    first = Acceleration("bf16", **{"compile": True, "graph": True, **off})
    surroundings = {"torch_device": "cuda", "acceleration": asdict(first)}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert again(directory, device="auto")[1] == first
    assert again(directory, device="auto", compile=False, graph=False)[1] == Acceleration("bf16", False, False)
    directory.write_json("environment.json", {"torch_device": "cpu", "acceleration": asdict(Acceleration())})
    assert again(directory, device="cuda")[1] == Acceleration("bf16", True, True)
