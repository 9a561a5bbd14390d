"""What a page says repeats a run: read back, it comes to the device and the acceleration that were recorded."""

import ast
import itertools
import shlex
from typing import get_args

import pytest
import torch
import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes

from ccfa.arguments import Verb
from ccfa.experiments.options import plain
from ccfa.learning.acceleration import Acceleration, Precision
from ccfa.reporting.repeating import command, python
from ccfa.reporting.rundata import RunData

ON_GPU = [Acceleration(*way) for way in itertools.product(get_args(Precision), (True, False), (True, False))]
WAYS = [("cpu", Acceleration()), *itertools.product(("cuda", "cuda:3"), ON_GPU)]


def run_in(environment, **experiment):
    config = {"experiment": {"method": "podnet", **experiment}}
    return RunData("a", config, environment, {}, None, [], [], [], None, ())


def recorded(device, acceleration):
    name = "cpu (1 threads)" if device == "cpu" else "NVIDIA H200"
    return run_in({"device": name, "torch_device": device, "acceleration": plain(acceleration)})


def typed(line):
    """What the command line makes of a line."""
    return tyro.cli(Verb, args=shlex.split(line)[1:], config=(FlagCreatePairsOff, OmitSubcommandPrefixes))


def learner_settings(code):
    """The keywords with which the code makes its learner, as values."""
    (call,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Learner"
    ]
    names = {"Acceleration": Acceleration} if "import Acceleration\n" in code else {}
    return {word.arg: eval(ast.unparse(word.value), names) for word in call.keywords}


@pytest.mark.parametrize(("device", "acceleration"), WAYS)
def test_the_command_runs_on_the_same_device_with_the_same_speed(device, acceleration):
    verb = typed(command(recorded(device, acceleration)))
    assert verb.device == device
    chosen = torch.device(verb.device)
    again = Acceleration.for_device(chosen, verb.precision, not verb.no_compile, not verb.no_graph)
    assert again == acceleration


@pytest.mark.parametrize(("device", "acceleration"), WAYS)
def test_so_does_the_python(device, acceleration):
    settings = learner_settings(python(recorded(device, acceleration)))
    chosen = torch.device(settings.get("device", "cpu"))
    assert chosen == torch.device(device)
    assert settings.get("acceleration", Acceleration.for_device(chosen)) == acceleration
    assert settings["seed"] == 0


def test_defaults_are_not_spelled_out():
    assert command(recorded("cuda", Acceleration("bf16", True, True))) == (
        "ccfa run podnet --data digits --seed 0 --device cuda --out runs/a-again"
    )
    assert learner_settings(python(recorded("cpu", Acceleration()))) == {"seed": 0}


@pytest.mark.parametrize(
    ("environment", "device", "options"),
    [
        ({}, None, {}),
        ({"acceleration": {"precision": "tf32"}}, None, {}),
        ({"device": "cpu (2 threads)"}, "cpu", {}),
        ({"device": "NVIDIA H200", "acceleration": {"precision": "tf32"}}, "cuda", {"precision": "tf32"}),
        ({"torch_device": ["x"], "acceleration": [1]}, None, {}),
        ({"torch_device": "cuda", "acceleration": {"precision": [2], "compile": "no", "x": 1}}, "cuda", {}),
        ({"torch_device": "'; rm -rf /", "device": 5}, "cuda", {}),
    ],
)
def test_of_an_older_or_damaged_record_what_is_there_is_said(environment, device, options):
    run = run_in(environment)
    words = shlex.split(command(run))
    assert ("--device" in words) == (device is not None)
    assert device is None or words[words.index("--device") + 1] == device
    assert ("--precision" in words) == ("precision" in options)
    assert learner_settings(python(run)).get("device", "cpu") == (device or "cpu")
