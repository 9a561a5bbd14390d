"""How to repeat a run: the command line and the Python that its configuration stands for."""

import dataclasses
import shlex
from typing import Any

from ccfa.experiments.experiment import Experiment, experiment_of
from ccfa.reporting.rundata import RunData

FLAGS = ("ccfa", "skip_bad")


def command(run: RunData) -> str:
    """The command line; precision and device where they are not what the machine would choose by itself."""
    words = ["ccfa", "run", experiment_of(run.config).method]
    for name, value in _chosen(run).items():
        if name in FLAGS:
            words.append(_option(name))
        elif name == "options":
            words += ["--set", *(f"{option}={text}" for option, text in value.items())]
        elif name != "method":
            words += [_option(name), str(value)]
    acceleration = run.environment.get("acceleration")
    precision = acceleration.get("precision") if isinstance(acceleration, dict) else None
    on_cpu = str(run.environment.get("device", "")).startswith("cpu")
    if precision and precision != ("float32" if on_cpu else "bf16"):
        words += ["--precision", str(precision)]
    if on_cpu:
        words += ["--device", "cpu"]
    return shlex.join([*words, "--out", f"runs/{run.name}-again"])


def python(run: RunData) -> str:
    """The same in Python, printing the accuracy after each stage."""
    chosen = _chosen(run)
    arguments = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    seeds = ", ".join(f"{name}={chosen[name]!r}" for name in ("seed", "batch_seed") if name in chosen)
    return f"""\
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Learner

resolved = resolve(Experiment({arguments}))
learner = Learner(resolved.method, resolved.train{", " + seeds if seeds else ""})
for stage in resolved.stages:
    learner.learn(stage)
    seen = resolved.test.subset(resolved.test.rows(0, stage.num_seen))
    correct = learner.predict(seen.images) == seen.labels
    print(stage.num_seen, float(correct.double().mean()))
"""


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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
