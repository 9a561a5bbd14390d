"""Short runs on the digits: unlike toys, what they leave can be resolved again from its configuration."""

from pathlib import Path
from typing import Any

import torch

from ccfa.experiments import Experiment, Run, resolve, run
from ccfa.settings import Running
from toy_runs import begun

CPU = torch.device("cpu")
SHORT = {"epochs": "1", "balanced_epochs": "1"}


def created(path: Path, experiment: Experiment) -> Run:
    """The directory of a run that has not begun."""
    return begun(path, resolve(experiment).config, {"device": "cpu"})


def digit_run(path: Path, method: str = "podnet", **choices: Any) -> Run:
    """A finished run of three stages, one epoch a phase unless asked otherwise."""
    experiment = Experiment(method, **{"scenario": "4,3,3", "options": SHORT, **choices})
    directory = created(path, experiment)
    run(resolve(experiment), directory, Running(device="cpu"))
    return directory
