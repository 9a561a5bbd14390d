"""The numbers of a run for TensorBoard, an optional extra: event files in the run directory."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.running import Audience
from ccfa.learning import Progress

FOLDER = "tensorboard"


def require_tensorboard() -> None:
    """Refuse before training what could not be written later."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed. "
            "Install it with: pip install 'ccfa[tensorboard]' (or pip install tensorboard), or leave --tensorboard out."
        )


def with_tensorboard(wanted: bool, run: Path, resolved: Resolved, audience: Audience) -> Audience:
    """The audience, and event files beside it where they are wanted."""
    return TensorBoard(run / FOLDER, resolved, audience) if wanted else audience


class TensorBoard:
    """Writes each epoch and each stage as scalars, and passes everything on.

    Steps are epochs done, counted from the plan, and classes seen. What a continued run does again, or tells again,
    replaces what was written before; epochs and stages begin again at different places, hence a folder for each.
    """

    def __init__(self, folder: Path, resolved: Resolved, audience: Audience) -> None:
        self.folder = folder
        self.audience = audience
        self.starts = planned_epochs(resolved)
        self.num_classes = resolved.stages[-1].num_seen
        self.step = 0
        self.writers: dict[str, Any] = {}

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Pass it on."""
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Losses, learning rate and speed, under the name of the phase."""
        start = self.starts.get((progress.stage.index, progress.phase))
        # A phase inside another's epochs: the last of its own epochs counts for the whole.
        inner = start is None
        if start is not None:
            self.step = start + progress.epoch + 1
        if not inner or (self.step and progress.epoch == progress.num_epochs - 1):
            speed = progress.num_batches * progress.batch_size / max(seconds, 1e-9)
            values = {**losses, "lr": lr, "images_per_second": speed}
            self._write("epochs", self.step, {f"{progress.phase}/{name}": value for name, value in values.items()})
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """Accuracies, exemplars and seconds."""
        unwanted = ("stage", "num_seen")
        values = {name: value for name, value in result.items() if name not in unwanted and value is not None}
        self._write("stages", stage.num_seen, {f"stage/{name}": value for name, value in values.items()})
        if stage.num_seen == self.num_classes:
            self.close()
        self.audience.on_stage(stage, result)

    def close(self) -> None:
        """Finish the files; more can still be told, in further ones."""
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if kind not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            self.writers[kind] = SummaryWriter(str(self.folder / kind), purge_step=step)
        for name, value in values.items():
            self.writers[kind].add_scalar(name, value, step)
        self.writers[kind].flush()  # a run that is killed loses nothing it has told


def planned_epochs(resolved: Resolved) -> dict[tuple[int, str], int]:
    """How many epochs come before each phase of each stage."""
    starts: dict[tuple[int, str], int] = {}
    done = 0
    for stage in resolved.stages:
        for phase in resolved.method.phases(stage):
            starts[stage.index, phase.name] = done
            done += phase.epochs
    return starts
