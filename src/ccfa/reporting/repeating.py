"""How to repeat a run: the command line and the Python that its configuration stands for."""

import dataclasses
import re
import shlex
from typing import Any, NamedTuple, get_args

import torch

from ccfa.experiments.experiment import Experiment, experiment_of
from ccfa.learning.acceleration import Acceleration, Precision
from ccfa.reporting.rundata import RunData


def command(run: RunData) -> str:
    """The command line, with the device that is recorded, and with what speed there is not the default."""
    words = ["ccfa", "run", *experiment_of(run.config).arguments()]
    speed = _recorded(run)
    words += ["--device", speed.device] if speed.device else []
    words += ["--precision", speed.acceleration.precision] if "precision" in speed.unusual else []
    words += [f"--no-{name}" for name in ("compile", "graph") if name in speed.unusual]
    return shlex.join([*words, "--out", f"runs/{run.name}-again"])


def python(run: RunData) -> str:
    """The same in Python, printing the accuracy after each stage."""
    chosen, speed = _chosen(run), _recorded(run)
    settings: dict[str, Any] = {name: chosen[name] for name in ("seed", "batch_seed") if name in chosen}
    imports = "from ccfa.learning import Learner\n"
    if speed.device not in ("", "cpu"):
        settings["device"] = speed.device
    if speed.unusual:
        settings["acceleration"] = speed.acceleration
        imports += "from ccfa.learning.acceleration import Acceleration\n"
    return f"""\
from ccfa.experiments import Experiment, resolve
{imports}
resolved = resolve(Experiment({_arguments(chosen)}))
learner = Learner(resolved.method, resolved.train, {_arguments(settings)})
test = resolved.test.to(learner.device)
for stage in resolved.stages:
    learner.learn(stage)
    seen = test.subset(test.rows(0, stage.num_seen))
    correct = learner.predict(seen.images) == seen.labels
    print(stage.num_seen, float(correct.double().mean()))
"""


class _Speed(NamedTuple):
    device: str  # as torch names it; empty where that is not recorded
    acceleration: Acceleration
    unusual: tuple[str, ...]  # what of the acceleration is not that device's default


def _recorded(run: RunData) -> _Speed:
    """Device and acceleration as far as environment.json says them."""
    device, name = (str(run.environment.get(field) or "") for field in ("torch_device", "device"))
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", device):  # runs of older versions say its name alone
        device = "cpu" if name.startswith("cpu") else "cuda" if name else ""
    usual = Acceleration.for_device(torch.device(device or "cpu"))
    stored = run.environment.get("acceleration")
    found = (
        {name: value for name, value in stored.items() if _is_known(name, value)} if isinstance(stored, dict) else {}
    )
    unusual = tuple(name for name, value in found.items() if value != getattr(usual, name)) if device else ()
    return _Speed(device, dataclasses.replace(usual, **found), unusual)


def _is_known(name: str, value: Any) -> bool:
    return value in get_args(Precision) if name == "precision" else name in ("compile", "graph") and type(value) is bool


def _arguments(named: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _chosen(run: RunData) -> dict[str, Any]:
    """What differs from the defaults, and the method and seed in any case."""
    experiment = experiment_of(run.config)
    default = Experiment(method="")
    fields = [field.name for field in dataclasses.fields(Experiment)]
    always = ("method", "data", "seed")
    return {
        name: getattr(experiment, name)
        for name in fields
        if name in always or getattr(experiment, name) != getattr(default, name)
    }
