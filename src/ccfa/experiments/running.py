"""Run an experiment: stage by stage, writing what it finds, from where it was stopped."""

import json
import math
import time
import traceback
from contextlib import suppress
from typing import Any

import torch

from ccfa.data import Stage
from ccfa.errors import CcfaError, DivergedError, ResourceError
from ccfa.evaluation import Report
from ccfa.experiments.checkpoint import Checkpoints
from ccfa.experiments.evaluations import Evaluations, write_results
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.files import write_atomically
from ccfa.experiments.first_stage import FirstStages, first_stage_key
from ccfa.experiments.lock import locked
from ccfa.experiments.recording import Audience, Recorder
from ccfa.experiments.resuming import note_surroundings, take_up
from ccfa.experiments.rundir import ERRORS, RunDirectory
from ccfa.experiments.space import warn_if_short
from ccfa.experiments.stopping import Stop
from ccfa.failpoints import failpoint
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration, memory_errors_explained

CHECKPOINT_MINUTES = 5.0


def run(
    resolved: Resolved,
    directory: RunDirectory,
    audience: Audience,
    device: torch.device,
    acceleration: Acceleration | None = None,
    first_stages: FirstStages | None = None,
    stop: Stop | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
) -> Report:
    """Learn all stages, or those left, evaluate after each, and leave everything in the run directory."""
    acceleration = acceleration or Acceleration.for_device(device)
    checkpoints = Checkpoints(directory.path / "checkpoints", resolved.config)
    recorder = Recorder(directory, audience, checkpoints, stop or Stop(), checkpoint_minutes)
    with locked(directory.path):
        directory.sweep()
        try:
            with memory_errors_explained(resolved.method.phases(resolved.stages[0])[0].batch_size):
                report = _learn_all(resolved, directory, recorder, device, acceleration, first_stages)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C twice; a signal or the time limit
            _end(recorder, "interrupted")
            raise
        except Exception as error:
            if isinstance(error, DivergedError):
                _diagnose(directory, error, recorder.learner)
            _end(recorder, "failed", error)
            raise
        directory.set_status("finished")
        checkpoints.prune(1)
    return report


def _learn_all(
    resolved: Resolved,
    directory: RunDirectory,
    recorder: Recorder,
    device: torch.device,
    acceleration: Acceleration,
    first_stages: FirstStages | None,
) -> Report:
    experiment, stages = resolved.experiment, resolved.stages
    learner = Learner(
        resolved.method,
        resolved.train,
        seed=experiment.seed,
        batch_seed=experiment.batch_seed,
        device=device,
        observer=recorder,
        acceleration=acceleration,
    )
    recorder.watch(learner)
    warn_if_short(directory.path, learner.network, len(stages))
    test = resolved.test.to(device)
    evaluations = Evaluations(resolved.method)
    _take_up(learner, resolved, recorder, evaluations)
    for stage in stages[len(recorder.rows) :]:
        if stage.index == 0 and first_stages:
            first_stages.learn(learner, stage, first_stage_key(resolved, acceleration, device), recorder.leave_out)
        else:
            learner.learn(stage)
        _require_finite(learner.network, stage)
        failpoint("evaluate")
        evaluations.add(learner, test.subset(test.rows(0, stage.num_seen)), stage)
        directory.write_predictions(stage.index, evaluations.arrays())
        directory.write_network(stage.index, learner.network)
        directory.write_exemplars(stage.index, learner.memory.classes)
        seconds = round(recorder.stage_seconds, 2)
        recorder.end_stage({**evaluations.row(stage), "exemplars": len(learner.memory), "seconds": seconds})
        write_results(directory, evaluations, recorder.rows, len(stages), recorder.seconds_before)
        recorder.audience.on_stage(stage, recorder.rows[-1])
    return directory.report()


def _take_up(learner: Learner, resolved: Resolved, recorder: Recorder, evaluations: Evaluations) -> None:
    """Make the run stand where its last checkpoint left it, if there is one."""
    directory, stored = recorder.directory, recorder.checkpoints.load()
    directory.truncate_logs(take_up(stored, learner, recorder, resolved.stages) if stored else {})
    directory.set_status("running", num_stages=len(resolved.stages))
    if stored is None:
        return
    note_surroundings(directory, learner.device, learner.acceleration, stored.number)
    done = resolved.stages[: len(recorder.rows)]
    for stage, row in zip(done, recorder.rows, strict=True):
        evaluations.add_stored(directory, stage)
        recorder.audience.on_stage(stage, row)
    if done:
        write_results(directory, evaluations, recorder.rows, len(resolved.stages), recorder.seconds_before)


def _require_finite(network: torch.nn.Module, stage: Stage) -> None:
    """The last step of a stage can break the weights unseen: no loss is computed after it."""
    broken = [name for name, tensor in network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise DivergedError(
            f"After stage {stage.index + 1} the weights {broken[0]} are no longer finite numbers; "
            f"the stage is not kept. Try a smaller learning rate.",
            {"stage": stage.index},
        )


def _end(recorder: Recorder, state: str, error: Exception | None = None) -> None:
    """Write down how the run ended, if the disk takes it."""
    directory = recorder.directory
    with suppress(ResourceError):
        directory.set_status(state, stages_done=len(recorder.rows), **({"error": str(error)} if error else {}))
        if error:
            told = f"error: {error}" if isinstance(error, CcfaError) else traceback.format_exc()
            directory.append(ERRORS, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {told}")


def _diagnose(directory: RunDirectory, error: DivergedError, learner: Learner | None) -> None:
    """Write down what was seen when training diverged: where, the parts of the loss, the largest weights."""
    weights = learner.network.state_dict() if learner else {}
    largest = {name: float(tensor.abs().max()) for name, tensor in weights.items() if tensor.numel()}
    details = {"error": str(error), **error.details, "largest_weights": largest}
    with suppress(ResourceError):
        write_atomically(directory.path / "diagnosis.json", json.dumps(_printable(details), indent=2) + "\n")


def _printable(value: Any) -> Any:
    """The value with NaN and infinity as text: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {name: _printable(item) for name, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
