"""Trackers of experiments that speak wandb's calls: `init`, `log` and `finish`."""

import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import ModelError, Notice, UsageError, installing
from ccfa.experiments import Run
from ccfa.experiments.running import Audience
from ccfa.learning import Progress
from ccfa.learning.progress import images_per_second
from ccfa.reporting.terminal import TensorBoard
from ccfa.settings import Running

STATE = "tracking.json"  # in a run directory: which run of the tracker it is, and how far it was told
NOT_NUMBERS = ("stage", "phase")  # of a line of metrics.jsonl


class Tracker(Audience):
    """Tells a tracker each epoch and each stage, and passes everything on to another audience.

    A step is an epoch or the end of a stage, counted from the beginning of the run, so that a continued run tells
    nothing twice. It goes on in the same run of the tracker. What was logged before a tracker was asked for is told as
    well. If the tracker fails, the run goes on without it.

    Args:
        run: The run. Its file tracking.json says which run of the tracker it is.
        audience: Who else watches.
        name: "trackio", "wandb", "swanlab", or another module with their functions.
        project: The tracker's project.
    """

    def __init__(self, run: Run, audience: Audience, name: str, project: str) -> None:
        self.run, self.audience = run, audience
        self.name, self.project = name, project
        self.session: Any = None  # what `init` returned; None before it is called
        self.place: dict[str, Any] = {}  # which run of the tracker, and how far it was told
        self.num_epochs, self.has_caught_up = 0, False  # lines of the log that were told; whether these are all
        self.works = True

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        if self.session is None and self.works:  # with the first batch, so that a missing login is seen at once
            with self._forgiven():
                self._begin()
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        with self._forgiven():
            speed = images_per_second(progress, seconds) or None
            place = {"stage": progress.stage.index, "phase": progress.phase, "epoch": progress.epoch}
            latest = {**place, "lr": lr, "images_per_second": speed, **losses}
            self._tell_epochs([latest] if self.has_caught_up else self._logged()[self.num_epochs :])
            self.has_caught_up = True
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        with self._forgiven():
            if not self.has_caught_up:
                before = [record for record in self._logged() if record["stage"] <= stage.index]
                self._tell_epochs(before[self.num_epochs :])
            values = {f"stage/{name}": value for name, value in result.items() if name != "stage"}
            self._log(self.num_epochs + stage.index + 1, values)
        self.audience.on_stage(stage, result)

    def on_activity(self, stage: Stage, activity: str) -> None:
        self.audience.on_activity(stage, activity)

    def state(self) -> dict[str, Any]:
        return self.audience.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.audience.restore(state)

    def finish(self) -> None:
        """End the tracker's run, which a continued run opens again."""
        with self._forgiven():
            if self.session is not None:
                self.session.finish()

    def _tell_epochs(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self.num_epochs += 1
            values = {f"{record['phase']}/{name}": value for name, value in record.items() if name not in NOT_NUMBERS}
            self._log(self.num_epochs + record["stage"], values)

    def _logged(self) -> list[dict[str, Any]]:
        with suppress(ModelError):  # a full disk takes no log, and a method that trains nothing writes none
            return self.run.read_epochs()
        return []

    def _begin(self) -> None:
        """Begin a run of the tracker, or go on with the one that this run began before."""
        with suppress(ModelError):
            self.place = self.run.read_json(STATE)
        if (self.place.get("tracker"), self.place.get("project")) != (self.name, self.project):
            self.place = {"tracker": self.name, "project": self.project, "id": uuid.uuid4().hex[:12], "step": 0}
        config = {**self.run.config["experiment"], "environment": self.run.environment}
        name, identity = self.run.path.resolve().name, self.place["id"]
        same: dict[str, Any] = {"name": name, "id": identity}
        if self.name == "trackio":  # which finds a run by its name alone
            same = {"name": f"{name}-{identity[:6]}"}
        elif self.name == "wandb":
            same["reinit"] = "create_new"  # runs at once are told apart
        module: Any = import_module(self.name)
        self.session = module.init(project=self.project, config=config, resume="allow", **same)
        self.run.write_json(STATE, self.place)

    def _log(self, step: int, values: dict[str, float | None]) -> None:
        if not self.works:
            return
        if self.session is None:
            self._begin()
        if step > self.place["step"]:
            self.session.log({name: value for name, value in values.items() if value is not None}, step=step)
            self.place["step"] = step
            self.run.write_json(STATE, self.place)

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a dashboard is not worth a run
            if self.works:
                told = f"{self.name} failed and is told nothing more; the run goes on. {type(error).__name__}: {error}"
                warnings.warn(Notice(told), stacklevel=3)
            self.works = False


@contextmanager
def watched(run: Run, running: Running, display: Audience) -> Iterator[Audience]:
    """Put the asked-for observers before a display: TensorBoard, and a tracker, which is finished at the end."""
    audience: Audience = TensorBoard(run, display) if running.tensorboard else display
    if not running.track:
        yield audience
        return
    tracker = Tracker(run, audience, running.track, running.project)
    try:
        yield tracker
    finally:
        tracker.finish()


def require_tracker(running: Running) -> None:
    """Refuse a tracker that is not installed, or that cannot do what is asked for."""
    if running.track and find_spec(running.track) is None:
        how = installing("trackio") if running.track == "trackio" else f"pip install {running.track}"
        raise UsageError(
            f"--track {running.track} needs the package {running.track}, which is not installed. "
            f"Install it with: {how}, or leave --track out."
        )
    if running.track == "swanlab" and running.at_once > 1:
        raise UsageError("swanlab tracks one run at a time: use --at-once 1, or another tracker.")
