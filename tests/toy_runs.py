"""Whole runs of tiny methods on tiny images, in a run directory."""

import threading
from pathlib import Path

import torch

from ccfa.evaluation import Report
from ccfa.experiments import Experiment, Run, run
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.running import Audience, Stop
from ccfa.settings import Running
from toys import STAGES, plugged, tiny, toy_images

CPU = torch.device("cpu")


class Silent(Audience):
    """An audience that counts what it is told."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.stages: list[int] = []
        self.activities: list[str] = []

    def on_batch(self, progress, losses):
        self.num_batches += 1

    def on_activity(self, stage, activity):
        self.activities.append(activity)

    def on_stage(self, stage, result):
        self.stages.append(stage.index)


class StopAfter(Stop):
    """Asks all runs to stop, as SIGTERM does, from the n-th time on that any of them looks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number
        self.lock = threading.Lock()

    def asked(self) -> int | None:
        with self.lock:
            self.left -= 1
            self.code = 143 if self.left < 0 else None
        return self.code


def toy_resolved(name: str = "podnet", seed: int = 0, **options) -> Resolved:
    """A toy experiment with its data and its method at hand."""
    method = tiny(name, **options)
    method = method if method.no_old_head else plugged(method, "ccfa")
    order = tuple(range(6))
    return Resolved(Experiment(name, seed=seed), method, toy_images(), toy_images(seed=1), STAGES, order, ())


def toy_run(path: Path, resolved: Resolved | None = None, audience=None, stop=None, **how) -> Report:
    """Run a toy experiment in a directory, or go on running it; `how` are fields of `Running`."""
    return run(resolved or toy_resolved(), Run(path), Running(**{"device": "cpu", **how}), audience, stop)


def begun(path: Path, config: dict, surroundings: dict | None = None) -> Run:
    """A run directory in which nothing has been learned yet."""
    directory = Run(path)
    with directory.entered(config, surroundings or {}):
        pass
    return directory
