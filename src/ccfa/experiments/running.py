"""Run an experiment: stage by stage, from where it was stopped, writing what it finds into its directory."""

import functools
import json
import math
import os
import shlex
import shutil
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ccfa.data import Stage, data_set
from ccfa.errors import CcfaError, DivergedError, ModelError, Notice, ResourceError, Stopped, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.environment import environment
from ccfa.experiments.evaluations import Evaluations, write_results
from ccfa.experiments.experiment import Resolved, resolve
from ccfa.experiments.first_stage import FirstStages, first_stage_key
from ccfa.experiments.run_directory import CHECKPOINTS_KEPT, ERRORS, Checkpoint, Run
from ccfa.experiments.stopping import Stop
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.acceleration import Acceleration, memory_errors_explained, pick_device, suit_threads
from ccfa.learning.state import restore, state_of
from ccfa.plugins import loaded_plugins
from ccfa.settings import Running

DEFAULTS = Running()
PHASE_SECONDS = 10.0  # the end of a phase is stored unless the last checkpoint is younger
NETWORKS_PER_CHECKPOINT = 4  # the network, the previous one, the first one, and momentum
DECIDES_BITS = ("ccfa", "commit", "torch", "numpy", "device", "threads", "acceleration")


class Audience(Observer, Protocol):
    """Watches a run: the learner's steps, and the result of each stage."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None: ...


class Silent:
    """Watches and shows nothing."""

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None: ...

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None: ...

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None: ...


def run(
    resolved: Resolved,
    directory: Run,
    running: Running = DEFAULTS,
    audience: Audience | None = None,
    stop: Stop | None = None,
    new: bool = False,
) -> Report:
    """Run an experiment in a directory, or what is left of it, and return its report.

    A finished run of the same experiment is not run again. With `new`, the directory must not hold a run.
    """
    device, acceleration = acceleration_of(running)
    if device.type == "cpu":
        suit_threads(resolved.train.images[0].numel())  # before the threads are written down
    begun_in = environment(device, acceleration) | {"at_once": running.at_once}
    recorder = Recorder(directory, audience or Silent(), stop or Stop(), running.checkpoint_minutes)
    with directory.entered(resolved.config, begun_in, new):
        if directory.is_finished():
            directory.set_status("finished")
            return directory.report()
        first_stages = _shared(running.first_stages) if running.first_stages else None
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
        directory.prune_checkpoints(1)
    return report


_shared = functools.cache(FirstStages)  # runs of one process wait for each other


def acceleration_of(running: Running) -> tuple[torch.device, Acceleration]:
    """Return the device, and how fast to be on it."""
    device = pick_device(running.device)
    return device, Acceleration.for_device(device, running.precision, running.compile, running.graph)


def finished(directory: Run, resolved: Resolved, running: Running) -> Report | None:
    """Return the report of a finished run of this experiment, or None if there is something left to do."""
    if not directory.is_begun():
        return None
    directory.require_same(resolved.config)
    if not directory.is_finished():
        return None
    report = directory.report()
    precision = (report.environment.get("acceleration") or {}).get("precision")
    if precision != (wanted := acceleration_of(running)[1].precision):
        raise UsageError(f"{directory.path} was run in {precision}, not in {wanted}. Use another --out.")
    return report


def resolve_again(directory: Run, data_dir: Path | None = None, same_method: bool = True) -> Resolved:
    """Return the experiment of a run with its data, which must be what the run began with.

    Without `same_method`, the method's published values may have changed since; the data may not.
    """
    begun_with = directory.config.get("plugins", {})
    if missing := sorted(begun_with.keys() - loaded_plugins().keys()):
        raise UsageError(f"{directory.path} was begun with plug-ins: add --plugin {' --plugin '.join(missing)}.")
    resolved = resolve(directory.experiment, data_dir)
    found = differences(directory.config, resolved.config)
    if not same_method:
        found = {name: pair for name, pair in found.items() if not name.startswith(("resolved.method", "plugins"))}
    if found:
        raise ModelError(
            f"{directory.path} was begun with other data or another method than those here now. Put them back, name "
            f"the data with --data-dir, or start a new run.\n{two_columns(found)}"
        )
    return resolved


def running_again(directory: Run, running: Running) -> Running:
    """Return how to continue a run: as asked for or, by default, as it began.

    Compilation and graphs that were switched off stay off on the same kind of device.
    """
    try:
        begun = directory.environment
    except ModelError:
        begun = {}  # it is not needed to continue
    before = begun.get("acceleration")
    device = str(begun.get("torch_device", "auto")) if running.device == "auto" else running.device
    same_kind = str(begun.get("torch_device", "")).startswith(pick_device(device).type)
    if not isinstance(before, dict) or not same_kind:
        before = {}
    return replace(
        running,
        device=device,
        precision=running.precision or before.get("precision"),
        compile=running.compile and before.get("compile", True),
        graph=running.graph and before.get("graph", True),
    )


class Recorder:
    """Writes metrics and checkpoints while a learner learns, and ends the run when it is asked to.

    A checkpoint is due at the end of a phase, and when the last one is `minutes` old; 0 means after each epoch.
    """

    def __init__(self, directory: Run, audience: Audience, stop: Stop, minutes: float) -> None:
        self.directory = directory
        self.audience = audience
        self.stop = stop
        self.interval = 60 * minutes
        self.learner: Learner | None = None
        self.rows: list[dict[str, Any]] = []  # the results of the stages that are done
        self.seconds_before = 0.0  # spent on those stages, also by processes that were stopped
        self.stage_began = self.last_saved = time.monotonic()

    @property
    def stage_seconds(self) -> float:
        return time.monotonic() - self.stage_began

    def watch(self, learner: Learner) -> None:
        self.learner = learner
        learner.on_pause = self.on_pause

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self.audience.on_batch(progress, losses)
        try:
            if code := self.stop.asked():
                raise Stopped(f"Stopped at {progress.place}; {self._saved()} {self._how_to_continue}", code)
            if self._is_due(progress):
                self._save_or_warn()
        except DivergedError as error:
            raise self._located(error, progress, losses) from error

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
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
        """End the run between two batches of embedding or evaluation, which are done again, if asked to."""
        if code := self.stop.asked():
            raise Stopped(f"Stopped between two phases; the last checkpoint stands. {self._how_to_continue}", code)

    def begin_stage(self, seconds: float = 0.0) -> None:
        """Start the clock of a stage at so many seconds."""
        self.stage_began = time.monotonic() - seconds

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was spent waiting for another run."""
        self.stage_began += seconds

    def end_stage(self, row: dict[str, Any]) -> None:
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
        self.directory.save_checkpoint(tensors, state)
        self.last_saved = time.monotonic()

    def restore(self, stored: Checkpoint, stages: Sequence[Stage]) -> dict[str, int]:
        """Continue from a checkpoint, and return the lengths that the logs had then; refuse one that does not fit."""
        learner = self.learner
        try:
            if learner is None:
                raise ValueError("there is no learner")
            restore(learner, stored.tensors, stored.state["learner"])
            self.rows = list(stored.state["rows"])
            self.seconds_before = float(stored.state["seconds"])
            self.begin_stage(float(stored.state["stage_seconds"]))
            lengths = {str(name): max(0, int(length)) for name, length in stored.state["log_lengths"].items()}
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ModelError(f"Checkpoint {stored.number} does not hold what it should: {error!r}.") from error
        stage, head = learner.stage, learner.network.head
        fits = {
            "the stage": stage in stages and len(self.rows) == stage.index + (not learner.interrupted),
            "the number of classes": head.num_classes == stage.num_seen + head.num_auxiliary,
            "the exemplars": all(_are_rows_of(label, rows, learner) for label, rows in enumerate(learner.exemplars())),
        }
        if wrong := [name for name, holds in fits.items() if not holds]:
            raise ModelError(f"Checkpoint {stored.number} does not fit this run: {', '.join(wrong)} cannot be right.")
        return lengths

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

    def _located(self, error: DivergedError, progress: Progress, losses: dict[str, Tensor]) -> DivergedError:
        """Add to the error of a checkpoint, which knows tensors only, where training stands."""
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
            details["lr"] = float(at_work[-1].optimiser.param_groups[0]["lr"])
            told += f", at a learning rate of {details['lr']:.3g}"
        return DivergedError(f"{told}.", details)

    @property
    def _how_to_continue(self) -> str:
        may_be_missing = data_set(self.directory.experiment.data).find
        needs_place = may_be_missing and not os.environ.get("CCFA_DATA")
        data_dir = " --data-dir DIR" if needs_place else ""
        return f"Continue with: ccfa resume {shlex.quote(str(self.directory.path))}{data_dir}"


def _learn_all(
    resolved: Resolved,
    directory: Run,
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
    _warn_if_short_of_space(directory.path, learner, len(stages))
    test = resolved.test.to(device)
    evaluations = Evaluations(resolved.method)
    _continue(learner, resolved, recorder, evaluations)
    for stage in stages[len(recorder.rows) :]:
        if stage.index == 0 and first_stages:
            first_stages.learn(learner, stage, first_stage_key(resolved, acceleration, device), recorder.leave_out)
        else:
            learner.learn(stage)
        evaluations.add(learner, test.subset(test.rows(0, stage.num_seen)), stage)
        directory.write_predictions(stage.index, evaluations.arrays())
        directory.write_network(stage.index, learner.network)
        directory.write_exemplars(stage.index, learner.memory.classes)
        seconds = round(recorder.stage_seconds, 2)
        recorder.end_stage({**evaluations.row(stage), "exemplars": len(learner.memory), "seconds": seconds})
        write_results(directory, evaluations, recorder.rows, len(stages), recorder.seconds_before)
        recorder.audience.on_stage(stage, recorder.rows[-1])
    return directory.report()


def _continue(learner: Learner, resolved: Resolved, recorder: Recorder, evaluations: Evaluations) -> None:
    """Continue from the last checkpoint, if there is one."""
    directory = recorder.directory
    stored = directory.load_checkpoint()
    directory.truncate_logs(recorder.restore(stored, resolved.stages) if stored else {})
    directory.set_status("running", num_stages=len(resolved.stages))
    if stored is None:
        return
    _note_surroundings(directory, learner, stored.number)
    done = resolved.stages[: len(recorder.rows)]
    for stage, row in zip(done, recorder.rows, strict=True):
        evaluations.add_stored(directory, stage)
        recorder.audience.on_stage(stage, row)
    if done:
        write_results(directory, evaluations, recorder.rows, len(resolved.stages), recorder.seconds_before)


def _note_surroundings(directory: Run, learner: Learner, number: int) -> None:
    """Warn about, and write down, what may change the last bits of the results of a continued run."""
    now = environment(learner.device, learner.acceleration)
    try:
        begun = directory.environment
    except ModelError:
        begun = now  # lost, and not needed to continue
    known = [name for name in DECIDES_BITS if name in begun]
    found = differences({name: begun[name] for name in known}, {name: now[name] for name in known})
    if found:
        resumed = [*begun.get("resumed", []), {"checkpoint": number, "differences": found}]
        begun = {**begun, "resumed": resumed}
        text = f"The surroundings changed, so the result may differ in its last bits:\n{two_columns(found)}"
        warnings.warn(Notice(text), stacklevel=2)
    if found or begun is now:
        directory.write_json("environment.json", begun)


def _are_rows_of(label: int, rows: Tensor, learner: Learner) -> bool:
    if rows.dtype != torch.int64 or rows.dim() != 1 or ((rows < 0) | (rows >= len(learner.train))).any():
        return False
    return bool((learner.train.labels[rows] == label).all())


def _warn_if_short_of_space(folder: Path, learner: Learner, num_stages: int) -> None:
    one = sum(tensor.nbytes for tensor in learner.network.state_dict().values())
    needed = one * (num_stages + NETWORKS_PER_CHECKPOINT * (CHECKPOINTS_KEPT + 1))
    free = shutil.disk_usage(folder).free
    if free < needed:
        warnings.warn(
            f"The run needs about {needed:,} bytes in {folder}, where {free:,} are free. If the disk becomes full, "
            f"the run ends and can be continued when there is room.",
            Notice,
            stacklevel=2,
        )


def _end(recorder: Recorder, state: str, error: Exception | None = None) -> None:
    """Write down how the run ended, if the disk takes it."""
    directory = recorder.directory
    with suppress(ResourceError):
        directory.set_status(state, stages_done=len(recorder.rows), **({"error": str(error)} if error else {}))
        if error:
            told = f"error: {error}" if isinstance(error, CcfaError) else traceback.format_exc()
            directory.append(ERRORS, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {told}")


def _diagnose(directory: Run, error: DivergedError, learner: Learner | None) -> None:
    """Write down what was seen when training diverged: where, the parts of the loss, the largest weights."""
    weights = learner.network.state_dict() if learner else {}
    largest = {name: float(tensor.abs().max()) for name, tensor in weights.items() if tensor.numel()}
    details = {"error": str(error), **error.details, "largest_weights": largest}
    with suppress(ResourceError):
        directory.write_json("diagnosis.json", _printable(details))


def _printable(value: Any) -> Any:
    """Return the value with NaN and infinity as text: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {name: _printable(item) for name, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
