"""Run an experiment: stage by stage, from where it was stopped, writing what it finds into its directory."""

import functools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ccfa
from ccfa.data import ImageSet, Stage
from ccfa.errors import CcfaError, DivergedError, ModelError, Notice, ResourceError, Stopped, UsageError
from ccfa.evaluation import BYTES_PER_MB, Numbers, Report, accuracy, rule_name
from ccfa.experiments.experiment import Resolved, resolve
from ccfa.experiments.first_stage import first_stage_key, learn_first_stage, leave_turn, stored_at
from ccfa.experiments.run_directory import CHECKPOINTS_KEPT, ERRORS, METRICS, Checkpoint, Run, differences, two_columns
from ccfa.files import require_place
from ccfa.kernels import are_left_out
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.acceleration import (
    Acceleration,
    describe_device,
    images_on,
    memory_errors_explained,
    pick_device,
    suit_threads,
)
from ccfa.learning.learner import EVALUATION_BATCH
from ccfa.learning.processes import ALONE, Processes, own_device, require_shareable, several
from ccfa.learning.progress import EVALUATING, SAVING, images_per_second
from ccfa.learning.state import restore, state_of
from ccfa.methods.method import by_logits, by_nearest_mean
from ccfa.methods.parts import is_frozen
from ccfa.models import flattened
from ccfa.models.pretrained import timm_version
from ccfa.plugins import loaded_plugins
from ccfa.settings import Running

DEFAULTS = Running()
PHASE_SECONDS = 10.0  # the end of a phase is stored unless the last checkpoint is younger
NETWORKS_PER_CHECKPOINT = 4  # the network, the previous one, the first one, and momentum
DECIDES_BITS = ("ccfa", "commit", "torch", "timm", "numpy", "device", "threads", "acceleration", "processes")
TIME_LIMIT_CODE = 75
SAME_SIGNAL = 1.0  # seconds in which a second Ctrl-C is not one of its own
# Clusters send SIGUSR1 or SIGUSR2 some time before they end a job.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
HEEDED = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)  # Windows has two


class Audience(Observer, Protocol):
    """Watches a run: the learner's steps, and the result of each stage."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """Called after each stage and, when a run is continued, for those that are done."""
        return

    def state(self) -> dict[str, Any]:
        """What to store in a checkpoint, as plain values, for `restore`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Called when a run is continued, after `on_stage`, with what was stored."""
        return


class Silent(Audience):
    """Watches and shows nothing."""


def run(
    resolved: Resolved,
    directory: Run,
    running: Running = DEFAULTS,
    audience: Audience | None = None,
    stop: "Stop | None" = None,
    new: bool = False,
    processes: Processes = ALONE,
) -> Report:
    """Run an experiment in a directory, or what is left of it, and return its report.

    A finished run of the same experiment is not run again. With `new`, the directory must not hold a run. Of several
    processes, the first one calls this function and the others call `follow`.
    """
    experiment, (device, acceleration) = resolved.experiment, acceleration_of(running)
    acceleration = acceleration.shared_by(processes.number)
    if device.type == "cpu":
        suit_threads(math.prod(resolved.train.shape))  # before the threads are written down
    if processes.number > 1:
        require_shareable(resolved.method)
    begun_in = environment(device, acceleration, processes.number, timm_version(resolved.method.backbone))
    begun_in["at_once"] = running.at_once
    with directory.entered(resolved.config, begun_in, new):
        if directory.is_finished():
            processes.tell({})
        else:
            try:
                directory.set_status("running")
                task = {"config": directory.config, "device": device.type, "acceleration": asdict(acceleration)}
                processes.tell(task)
                phases = resolved.method.phases(resolved.stages[0])
                with memory_errors_explained(phases[0].batch_size if phases else EVALUATION_BATCH):
                    learner = Learner(
                        resolved.method,
                        resolved.train,
                        seed=experiment.seed,
                        batch_seed=experiment.batch_seed,
                        device=device,
                        acceleration=acceleration,
                        processes=processes,
                    )
                    stop = AgreedStop(stop or Stop(), processes)
                    recorder = Recorder(directory, learner, audience or Silent(), stop, running)
                    _learn_all(resolved, recorder, running.first_stages)
            except BaseException as error:
                _write_end(directory, error)
                raise
        directory.prune_checkpoints(1)
        directory.set_status("finished")
        return directory.report()


def acceleration_of(running: Running) -> tuple[torch.device, Acceleration]:
    """Return the device, and how fast to be on it."""
    device = own_device(running.device)
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
    if found and all(name.startswith("plugins.") for name in found):
        names = ", ".join(name.removeprefix("plugins.") for name in found)
        raise ModelError(
            f"{directory.path} was begun with another version of {names}. Put it back, or start a new run."
        )
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
    device = running.device
    if device == "auto":
        device = str(begun.get("torch_device", "auto"))
        device = device.partition(":")[0] if several() else device  # each of several has its own number
    same_kind = str(begun.get("torch_device", "")).startswith(pick_device(device).type)
    eager = begun.get("processes", 1) > 1  # whatever was asked for
    if not isinstance(before, dict) or not same_kind:
        before = {}
    return replace(
        running,
        device=device,
        precision=running.precision or before.get("precision"),
        compile=running.compile and (eager or before.get("compile", True)),
        graph=running.graph and (eager or before.get("graph", True)),
    )


class Recorder:
    """Watches a learner: writes metrics and checkpoints, and ends the run when it is asked to.

    A checkpoint is due at the end of a phase, and when the last one is `checkpoint_minutes` old; 0 means after each
    epoch. After a stage that trains nothing it is due by its age alone: such stages are short, and what read-outs
    remember is large.
    """

    def __init__(self, directory: Run, learner: Learner, audience: Audience, stop: "Stop", running: Running) -> None:
        self.directory = directory
        self.learner = learner
        self.audience = audience
        self.stop = stop
        self.interval = 60 * running.checkpoint_minutes
        self.running = running
        self.rows: list[dict[str, Any]] = []  # the results of the stages that are done
        self.seconds_before = 0.0  # spent on those stages, also by processes that were stopped
        self.stage_began = self.last_saved = time.monotonic()
        learner.observer, learner.on_pause = self, self.on_pause

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self.audience.on_batch(progress, losses)
        code = self.stop.asked()
        if not code and not self._is_due(progress):
            return
        outcome = "saved."
        self.audience.on_activity(progress.stage, SAVING)
        try:
            self.save()
        except DivergedError as error:
            # A checkpoint knows tensors only, not where training stands.
            lr = float(self.learner.at_work[-1].optimiser.param_groups[0]["lr"])
            values = {name: float(loss) for name, loss in losses.items()}
            details = {**_place(progress), "batch": progress.batch, "lr": lr, "losses": values}
            told = f"{error} It was found in {progress.place}, at a learning rate of {lr:.3g}."
            raise DivergedError(told, details) from error
        except ResourceError as error:
            outcome = f"not saved: {error}"
            self.last_saved = time.monotonic()
            if not code:
                warnings.warn(Notice(f"{error} The run goes on and tries again later."), stacklevel=2)
        if code:
            raise Stopped(f"Stopped at {progress.place}; {outcome} {self._how_to_continue}", code)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        speed = round(images_per_second(progress, seconds), 1) or None
        record = {**_place(progress), "lr": lr, "images_per_second": speed, **losses}
        self.directory.append(METRICS, json.dumps(record))
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_activity(self, stage: Stage, activity: str) -> None:
        self.audience.on_activity(stage, activity)

    def on_pause(self) -> None:
        """End the run between two batches of embedding or evaluation, which are done again, if asked to."""
        if code := self.stop.asked():
            kept = "the last checkpoint is kept" if self.directory.checkpoint_numbers() else "nothing is stored yet"
            text = "Stopped outside of a training step, in evaluation for example. That part will be done again"
            raise Stopped(f"{text}; {kept}. {self._how_to_continue}", code)

    def spent(self) -> float:
        """The seconds of this stage so far, also by processes that were stopped."""
        return time.monotonic() - self.stage_began

    def leave_out(self, seconds: float) -> None:
        """Count this many seconds less."""
        self.stage_began += seconds

    def end_stage(self, results: dict[str, Any], is_last: bool) -> None:
        seconds = self.spent()
        self.rows.append({**results, "seconds": round(seconds, 2)})
        self.seconds_before += seconds
        self.stage_began = time.monotonic()
        trains = any(phase.epochs for phase in self.learner.method.phases(self.learner.stage))
        if trains or is_last or self.stage_began - self.last_saved >= self.interval:
            self.save()

    def save(self) -> None:
        """Store a checkpoint."""
        tensors, facts = state_of(self.learner)
        state = {
            "learner": facts,
            "rows": self.rows,
            "log_lengths": {METRICS: self.directory.log_length()},
            "seconds": self.seconds_before,
            "stage_seconds": self.spent(),
            "audience": self.audience.state(),
        }
        self.directory.save_checkpoint(tensors, state)
        self.last_saved = time.monotonic()

    def restore(self, stored: Checkpoint, stages: tuple[Stage, ...]) -> None:
        """Continue from a checkpoint; refuse one that does not fit."""
        learner, state = self.learner, stored.state
        try:
            restore(learner, stored.tensors, state["learner"])
            self.rows = list(state["rows"])
            self.seconds_before = float(state["seconds"])
            self.stage_began = time.monotonic() - float(state["stage_seconds"])
            log_length = max(0, int(state["log_lengths"].get(METRICS, 0)))
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
        self.directory.cut_log(log_length)

    def _is_due(self, progress: Progress) -> bool:
        age = time.monotonic() - self.last_saved
        ends_epoch = progress.batch + 1 == progress.num_batches
        if self.interval == 0:
            return ends_epoch
        ends_phase = ends_epoch and progress.epoch + 1 == progress.num_epochs
        return age >= self.interval or (ends_phase and age >= PHASE_SECONDS)

    @property
    def _how_to_continue(self) -> str:
        folders = {"--data-dir": self.running.data_dir, "--first-stages": self.running.first_stages}
        options = [word for name, folder in folders.items() if folder for word in (name, str(folder))]
        options += [word for name in loaded_plugins() for word in ("--plugin", name)]
        return "Continue with: " + shlex.join(["ccfa", "resume", str(self.directory.path), *options])


def _place(progress: Progress) -> dict[str, Any]:
    return {"stage": progress.stage.index, "phase": progress.phase, "epoch": progress.epoch}


def _are_rows_of(label: int, rows: Tensor, learner: Learner) -> bool:
    if rows.dtype != torch.int64 or rows.dim() != 1 or ((rows < 0) | (rows >= len(learner.train))).any():
        return False
    return bool((learner.train.labels[rows] == label).all())


class Evaluator:
    """The test images of a run, and their embeddings for as long as the backbone stays as it is."""

    def __init__(self, test: ImageSet, stages: Sequence[Stage]) -> None:
        self.test, self.stages = test, stages
        self.backbone: Tensor | None = None  # its weights, when the embeddings were computed
        self.embeddings, self.num_done = torch.empty(0), 0

    def evaluate(self, learner: Learner) -> dict[str, NDArray[np.int64]]:
        """Return the labels of the seen classes' images, and predictions by logits, nearest mean and the own rule."""
        rows = self.test.rows(0, learner.stage.num_seen)
        embeddings = self._embeddings(learner, rows)
        predictions = {"logits": learner.class_by_logits(embeddings)}
        if len(learner.memory):
            predictions["nearest_mean"] = learner.class_by_nearest_mean(embeddings)
        if learner.method.predict not in (by_logits, by_nearest_mean):
            predictions[rule_name(learner.method.predict)] = learner.predict(self.test.subset(rows).images)
        labels = self.test.labels[rows].cpu().numpy()
        return {"labels": labels, **{f"by_{name}": found.cpu().numpy() for name, found in predictions.items()}}

    def _embeddings(self, learner: Learner, rows: Tensor) -> Tensor:
        """Embeddings of these rows. If the backbone is frozen, those of new classes alone are computed."""
        if not is_frozen(learner.method, learner.stage):
            return learner.embed(self.test.subset(rows).images)
        backbone = flattened(learner.network.backbone.state_dict())
        if self.backbone is None or not torch.equal(backbone, self.backbone):
            self.backbone, self.num_done = backbone, 0
        # One stage after the other, also in a run that is continued: other batches would be rounded differently.
        for stage in self.stages[self.num_done : learner.stage.index + 1]:
            new = self.test.rows(stage.num_old, stage.num_seen)
            found = learner.embed(self.test.subset(new).images)
            if not self.num_done:
                self.embeddings = found.new_empty(len(self.test), found.shape[1])
            self.embeddings[new] = found
            self.num_done += 1
        return self.embeddings[rows]


def _learn_all(resolved: Resolved, recorder: Recorder, first_stages: Path | None) -> None:
    """Learn the stages that are left."""
    learner, stages = recorder.learner, resolved.stages
    evaluator = Evaluator(images_on(learner.device, resolved.test), stages)
    _warn_if_short_of_space(recorder.directory.path, learner, len(stages))
    if first_stages:
        require_place(first_stages)
        first_stages = stored_at(first_stages, first_stage_key(resolved, learner.acceleration, learner.device))
    _continue(resolved, recorder)
    if recorder.rows:
        leave_turn()  # it has its first stage
    try:
        for stage in stages[len(recorder.rows) :]:
            end = functools.partial(_end_stage, resolved, recorder, stage, evaluator)
            if stage.index == 0 and first_stages:
                learn_first_stage(learner, stage, first_stages, end, recorder.spent, recorder.leave_out)
            else:
                learner.learn(stage)
                end()
            _write_results(resolved, recorder)
            recorder.audience.on_stage(stage, recorder.rows[-1])
    except DivergedError as error:
        _diagnose(recorder, error)
        raise


def _continue(resolved: Resolved, recorder: Recorder) -> None:
    """Continue from the last checkpoint, if there is one."""
    stored, processes = recorder.directory.load_checkpoint(), recorder.learner.processes
    if stored is None:
        recorder.directory.cut_log(0)
        processes.tell({"num_done": 0})
        return
    recorder.restore(stored, resolved.stages)
    processes.tell({"num_done": len(recorder.rows), "learner": stored.state["learner"]}, stored.tensors)
    _note_surroundings(recorder, stored.number)
    for stage, row in zip(resolved.stages, recorder.rows, strict=False):
        recorder.audience.on_stage(stage, row)
    recorder.audience.restore(stored.state.get("audience") or {})
    if recorder.rows:
        _write_results(resolved, recorder)


def _end_stage(resolved: Resolved, recorder: Recorder, stage: Stage, evaluator: Evaluator) -> None:
    """Evaluate a learned stage and write down what it leaves; the tables are made of it after its checkpoint."""
    directory, learner = recorder.directory, recorder.learner
    learner.tell(EVALUATING)
    predictions = evaluator.evaluate(learner)
    directory.write_predictions(stage.index, predictions)
    directory.write_network(stage.index, learner.network)
    directory.write_exemplars(stage.index, learner.memory.classes)
    row = _accuracies(stage, predictions, rule_name(resolved.method.predict))
    row |= {"exemplars": len(learner.memory), **sizes(learner)}
    recorder.end_stage(row, is_last=stage == resolved.stages[-1])


def sizes(learner: Learner) -> dict[str, float]:
    """Return the megabytes of what a learner keeps between stages: its network, its terms' memory, its exemplars."""
    remembered = [tensor.nbytes for term in learner.terms for tensor in term.state_dict().values()]
    return {
        "parameters_mb": sum(tensor.nbytes for tensor in learner.network.state_dict().values()) / BYTES_PER_MB,
        "remembered_mb": sum(remembered) / BYTES_PER_MB,
        "exemplars_mb": len(learner.memory) * math.prod(learner.train.shape) / BYTES_PER_MB,
    }


def _accuracies(stage: Stage, predictions: dict[str, NDArray[np.int64]], own: str) -> dict[str, Any]:
    """Return a line of stages.csv: accuracies as fractions, by the method's own rule first."""
    labels, predicted, nearest = predictions["labels"], predictions[f"by_{own}"], predictions.get("by_nearest_mean")
    old = labels < stage.num_old
    return {
        "stage": stage.index,
        "num_seen": stage.num_seen,
        "accuracy": accuracy(predicted, labels),
        "new_accuracy": accuracy(predicted[~old], labels[~old]),
        "old_accuracy": accuracy(predicted[old], labels[old]) if stage.num_old else None,
        "logits_accuracy": accuracy(predictions["by_logits"], labels),
        "nearest_mean_accuracy": None if nearest is None else accuracy(nearest, labels),
    }


def _write_results(resolved: Resolved, recorder: Recorder) -> None:
    """Write the report and the tables of the stages that are done, from their stored predictions."""
    directory, own = recorder.directory, rule_name(resolved.method.predict)
    done = resolved.stages[: len(recorder.rows)]
    stored, num_seen = [directory.read_predictions(stage.index) for stage in done], [stage.num_seen for stage in done]
    labels, last = [arrays["labels"] for arrays in stored], recorder.rows[-1]
    rules = [rule for rule in dict.fromkeys(("logits", "nearest_mean", own)) if f"by_{rule}" in stored[-1]]
    report = Report(
        name=directory.path.name,
        config=directory.config,
        num_seen=num_seen,
        own=own,
        rules={rule: Numbers.of([arrays[f"by_{rule}"] for arrays in stored], labels, num_seen) for rule in rules},
        environment=directory.environment,
        seconds=recorder.seconds_before,
        finished=len(done) == len(resolved.stages),
        parameters_mb=last.get("parameters_mb"),  # an earlier version's stages have none
        remembered_mb=last.get("remembered_mb"),
        exemplars_mb=last.get("exemplars_mb"),
    )
    directory.write_results(report, recorder.rows)


def _note_surroundings(recorder: Recorder, number: int) -> None:
    """Warn about, and write down, what may change the last bits of the results of a continued run."""
    directory, learner = recorder.directory, recorder.learner
    timm = timm_version(learner.method.backbone)
    now = environment(learner.device, learner.acceleration, learner.processes.number, timm)
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


def _diagnose(recorder: Recorder, error: DivergedError) -> None:
    """Write down what was seen when training diverged: where, the parts of the loss, the largest weights."""
    weights = recorder.learner.network.state_dict()
    largest = {name: float(tensor.abs().max()) for name, tensor in weights.items() if tensor.numel()}
    seen = json.dumps({"error": str(error), **error.details, "largest_weights": largest})
    with suppress(ResourceError):  # NaN and infinity become text: JSON has no numbers for them
        recorder.directory.write_json("diagnosis.json", json.loads(seen, parse_constant=str))


def _write_end(directory: Run, error: BaseException) -> None:
    """Write down how the run ended, if the disk takes it."""
    with suppress(ResourceError):
        if not isinstance(error, Exception):  # Ctrl-C twice; a signal or the time limit
            directory.set_status("interrupted")
            return
        directory.set_status("failed", error=str(error))
        told = f"error: {error}" if isinstance(error, CcfaError) else traceback.format_exc()
        directory.append(ERRORS, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {told}")
        if not isinstance(error, CcfaError):
            error.add_note(f"The traceback is in {directory.path / ERRORS}; the last checkpoint is kept.")


def environment(
    device: torch.device, acceleration: Acceleration, num_processes: int = 1, timm: str | None = None
) -> dict[str, Any]:
    """Return versions, commit, device, precision, threads and processes as plain values, for environment.json."""
    return {
        "ccfa": ccfa.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **({"timm": timm} if timm else {}),  # of a run whose backbone is a model of timm
        "numpy": np.__version__,
        "device": describe_device(device),
        "torch_device": str(device),
        "acceleration": asdict(acceleration),
        **({"kernels": "off"} if are_left_out() else {}),
        "threads": torch.get_num_threads(),
        "processes": num_processes,
        "platform": platform.platform(),
    }


def _commit() -> str:
    """Return the commit of the source if the package runs from a checkout; `+` marks uncommitted changes.

    The variable CCFA_COMMIT takes precedence, for copies of a checkout that have no history or another one.
    """
    if commit := os.environ.get("CCFA_COMMIT"):
        return commit
    try:
        # In a virtual environment inside another project's checkout, this file is not tracked: that commit is not ours.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


class Stop:
    """Whether runs should stop, and with which exit code; shared by all runs of a process."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self.code: int | None = None
        self.heeded_at = -math.inf
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes is not None else None

    def asked(self) -> int | None:
        """The exit code if it is time to stop."""
        if self.code is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.code = TIME_LIMIT_CODE
        return self.code

    def heed(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the first one asks to stop, a second Ctrl-C aborts, a third ends the process.

        A Ctrl-C that follows another at once is the same: some programs send it to a process and to its group.
        """
        is_same = self.code == 128 + number and time.monotonic() - self.heeded_at < SAME_SIGNAL
        if self.code is not None and number == signal.SIGINT and not is_same:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.code, self.heeded_at = 128 + number, time.monotonic()


class AgreedStop(Stop):
    """Stops all processes of a run at the same step, as soon as one of them should stop."""

    def __init__(self, own: Stop, processes: Processes) -> None:
        super().__init__()
        self.own = own
        self.processes = processes

    def asked(self) -> int | None:
        """The exit code if it is time to stop; every process asks equally often."""
        return self.processes.largest(self.own.asked() or 0) or None


@contextmanager
def stoppable(max_minutes: float | None = None) -> Iterator[Stop]:
    """Let signals and the time limit stop runs; handlers are as before afterwards."""
    stop = Stop(max_minutes)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # A signal that is ignored, as SIGHUP is under nohup, stays so.
    before = {number: signal.getsignal(number) for number in HEEDED}
    heeded = [number for number in HEEDED if before[number] != signal.SIG_IGN]
    try:
        for number in heeded:
            signal.signal(number, stop.heed)
        yield stop
    finally:
        for number in heeded:
            signal.signal(number, before[number])
