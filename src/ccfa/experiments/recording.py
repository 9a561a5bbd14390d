"""While a run learns: metrics written down, checkpoints stored when they are due, and an end where one is asked for."""

import json
import os
import time
import warnings
from typing import Any, Protocol

import torch

from ccfa.data import Stage
from ccfa.errors import DivergedError, Notice, ResourceError, Stopped
from ccfa.experiments.checkpoint import Checkpoints
from ccfa.experiments.rundir import RunDirectory
from ccfa.experiments.stopping import Stop
from ccfa.failpoints import failpoint
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.state import state_of

PHASE_SECONDS = 10.0  # a phase that ends is stored unless the last checkpoint is younger


class Audience(Observer, Protocol):
    """Who watches a run: the learner's steps, and each stage's result."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """After a stage was evaluated."""
        ...


class Recorder:
    """Writes metrics.jsonl, one line an epoch, and checkpoints: the rows of stages done, and the learner as it stands.

    A checkpoint is due at the end of a phase, and when the last one is `minutes` old; 0 means after each epoch.
    """

    def __init__(
        self, directory: RunDirectory, audience: Audience, checkpoints: Checkpoints, stop: Stop, minutes: float
    ) -> None:
        self.directory = directory
        self.audience = audience
        self.checkpoints = checkpoints
        self.stop = stop
        self.interval = 60 * minutes
        self.learner: Learner | None = None
        self.rows: list[dict[str, Any]] = []
        self.seconds_before = 0.0  # spent on stages done, also by processes that were stopped
        self.stage_began = self.last_saved = time.monotonic()

    @property
    def stage_seconds(self) -> float:
        """Seconds spent on the present stage so far."""
        return time.monotonic() - self.stage_began

    def watch(self, learner: Learner) -> None:
        """Record this learner."""
        self.learner = learner
        learner.on_pause = self.on_pause

    def on_batch(self, progress: Progress, losses: dict[str, torch.Tensor]) -> None:
        """Pass it on; store the run if that is due, and end it if that was asked for."""
        self.audience.on_batch(progress, losses)
        self._fail_on_demand(progress)
        try:
            if code := self.stop.asked():
                raise Stopped(f"Stopped at {progress.place}; {self._saved()} {self._how_to_continue}", code)
            if self._is_due(progress):
                self._save_or_warn()
        except DivergedError as error:
            raise self._located(error, progress, losses) from error

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Write the epoch down and pass it on."""
        images = progress.num_batches * progress.batch_size
        record = {
            "stage": progress.stage.index,
            "phase": progress.phase,
            "epoch": progress.epoch,
            "lr": lr,
            "images_per_second": round(images / max(seconds, 1e-9), 1) or None,
            **losses,
        }
        self.directory.append("metrics.jsonl", json.dumps(record))
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_pause(self) -> None:
        """Between batches that are no steps - embedding, evaluating - end the run if asked to: they are done again."""
        failpoint("pause")
        if code := self.stop.asked():
            raise Stopped(f"Stopped between two phases; the last checkpoint stands. {self._how_to_continue}", code)

    def begin_stage(self, seconds: float = 0.0) -> None:
        """Start the stage's clock, which stood at so many seconds when it was stored."""
        self.stage_began = time.monotonic() - seconds

    def leave_out(self, seconds: float) -> None:
        """Take time that was spent waiting for another run out of the stage's."""
        self.stage_began += seconds

    def end_stage(self, row: dict[str, Any]) -> None:
        """Write down a stage that is done; an error if that is not possible."""
        self.rows.append(row)
        self.seconds_before += self.stage_seconds
        self.begin_stage()
        self.directory.append("log.txt", json.dumps(row))
        self.save()

    def save(self) -> None:
        """Store a checkpoint."""
        if self.learner is None:
            return
        tensors, facts = state_of(self.learner)
        state = {
            "learner": facts,
            "rows": self.rows,
            "log_lengths": self.directory.log_lengths(),
            "seconds": self.seconds_before,
            "stage_seconds": self.stage_seconds,
        }
        self.checkpoints.save(tensors, state)
        self.last_saved = time.monotonic()

    def _is_due(self, progress: Progress) -> bool:
        age = time.monotonic() - self.last_saved
        ends_epoch = progress.batch + 1 == progress.num_batches
        if self.interval == 0:
            return ends_epoch
        ends_phase = ends_epoch and progress.epoch + 1 == progress.num_epochs
        return age >= self.interval or (ends_phase and age >= PHASE_SECONDS)

    def _save_or_warn(self) -> None:
        try:
            self.save()
        except ResourceError as error:
            self.last_saved = time.monotonic()  # try again when the next one is due
            warnings.warn(Notice(f"{error} The run goes on and tries again later."), stacklevel=2)

    def _saved(self) -> str:
        try:
            self.save()
        except ResourceError as error:
            return f"not saved: {error}"
        return "saved."

    def _located(self, error: DivergedError, progress: Progress, losses: dict[str, torch.Tensor]) -> DivergedError:
        """The error of a checkpoint, which knows tensors only, with the place where training stands."""
        at_work = self.learner.at_work if self.learner else []
        details: dict[str, Any] = {
            "stage": progress.stage.index,
            "phase": progress.phase,
            "epoch": progress.epoch,
            "batch": progress.batch,
            "losses": {name: float(loss) for name, loss in losses.items()},
        }
        told = f"{error} It was found in {progress.place}"
        if at_work:
            details["lr"] = float(at_work[-1].prepared.optimiser.param_groups[0]["lr"])
            told += f", at a learning rate of {details['lr']:.3g}"
        return DivergedError(f"{told}.", details)

    @property
    def _how_to_continue(self) -> str:
        asked = self.directory.read_json("config.json").get("experiment", {})
        data_dir = " --data-dir DIR" if asked.get("data") == "cifar100" and not os.environ.get("CCFA_DATA") else ""
        return f"Continue with: ccfa resume {self.directory.path}{data_dir}"

    def _fail_on_demand(self, progress: Progress) -> None:
        action = failpoint("step")
        if progress.epoch + 1 == progress.num_epochs and progress.batch + 1 == progress.num_batches:
            action = failpoint("phase") or action
        if action == "nan" and self.learner:
            next(self.learner.network.parameters()).data.fill_(float("nan"))
