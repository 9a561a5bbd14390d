"""Follow process 0 through a run that several processes share: learn what it learns, and write nothing."""

import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ccfa.errors import ModelError, Notice, Stopped
from ccfa.experiments.experiment import Resolved, experiment_of, resolve
from ccfa.experiments.run_directory import differences, two_columns
from ccfa.experiments.running import AgreedStop, Evaluator, stoppable
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.acceleration import Acceleration, images_on
from ccfa.learning.processes import Processes, own_device
from ccfa.learning.state import restore
from ccfa.settings import Experiment, Running


class Follower(Observer):
    """Watches a learner for the one thing that all processes do together: they stop."""

    def __init__(self, stop: AgreedStop) -> None:
        self.stop = stop

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self.on_pause()

    def on_pause(self) -> None:
        """End this process if the run is to stop."""
        if code := self.stop.asked():
            raise Stopped("Stopped.", code)


def follow(
    running: Running, processes: Processes, resolve: Callable[[Experiment, Path | None], Resolved] = resolve
) -> None:
    """Do the part of this process in the run that process 0 runs.

    Args:
        running: How to run. The experiment, the device and the precision are those of process 0.
        processes: The processes. This one is not the first.
        resolve: Finds the data and the method of an experiment.
    """
    task, _ = processes.told()
    if not task:  # the run was finished before
        return
    with warnings.catch_warnings(), stoppable(running.max_minutes) as stop:
        warnings.simplefilter("ignore", Notice)  # process 0 prints them
        resolved = resolve(experiment_of(task["config"]), running.data_dir)
        if found := differences(task["config"], resolved.config):
            raise ModelError(f"It has other data or another method than process 0.\n{two_columns(found)}")
        experiment = resolved.experiment
        learner = Learner(
            resolved.method,
            resolved.train,
            seed=experiment.seed,
            batch_seed=experiment.batch_seed,
            device=own_device(task["device"]),
            acceleration=Acceleration(**task["acceleration"]),
            processes=processes,
        )
        follower = Follower(AgreedStop(stop, processes))
        learner.observer, learner.on_pause = follower, follower.on_pause
        place, tensors = processes.told()
        if tensors:
            restore(learner, tensors, place["learner"])
        evaluator = Evaluator(images_on(learner.device, resolved.test), resolved.stages)
        for stage in resolved.stages[place["num_done"] :]:
            learner.learn(stage)
            evaluator.evaluate(learner)
