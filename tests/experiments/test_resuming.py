"""A continued run keeps the device, precision and acceleration it began with."""

import pytest
import torch

from ccfa.errors import ResourceError
from ccfa.experiments.options import plain
from ccfa.experiments.running import speed_again
from ccfa.learning.acceleration import Acceleration
from toy_runs import CPU, begun, toy_resolved


def test_a_run_goes_on_with_the_device_and_precision_it_began_with(tmp_path):
    resolved = toy_resolved()
    directory = begun(
        tmp_path / "run", resolved.config, {"torch_device": "cpu", "acceleration": {"precision": "float32"}}
    )
    assert speed_again(directory, "auto", None, True, True)[0] == CPU
    directory.write_json("environment.json", {"torch_device": "cuda:7", "acceleration": {"precision": "bf16"}})
    with pytest.raises(ResourceError, match="cuda:7 was asked for"):
        speed_again(directory, "auto", None, True, True)
    assert speed_again(directory, "cpu", None, True, True)[1].precision == "float32"


@pytest.mark.parametrize("off", [{}, {"compile": False}, {"graph": False}, {"compile": False, "graph": False}], ids=str)
def test_what_was_switched_off_stays_off(tmp_path, monkeypatch, off):
    monkeypatch.setattr("ccfa.experiments.running.pick_device", lambda name: torch.device(name))
    first = Acceleration("bf16", **{"compile": True, "graph": True, **off})
    surroundings = {"torch_device": "cuda", "acceleration": plain(first)}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert speed_again(directory, "auto", None, True, True)[1] == first
    assert speed_again(directory, "auto", None, False, False)[1] == Acceleration("bf16", False, False)
    directory.write_json("environment.json", {"torch_device": "cpu", "acceleration": plain(Acceleration())})
    assert speed_again(directory, "cuda", None, True, True)[1] == Acceleration("bf16", True, True)
