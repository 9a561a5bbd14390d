"""The numbers of a run for TensorBoard, an optional extra: event files in the run directory."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import Audience
from ccfa.learning import Progress


def require_tensorboard() -> None:
    """Raise a UsageError, before training, if the package is not installed."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed. "
            "Install it with: pip install 'ccfa[tensorboard]' (or pip install tensorboard), or leave --tensorboard out."
        )


class TensorBoard:
    """Writes each epoch and each stage as scalars, and passes everything on to another audience.

    The steps are lines of metrics.jsonl and classes seen, so that a continued run replaces what it does again.
    """

    def __init__(self, run: Path, audience: Audience) -> None:
        self.run, self.audience = Run(run), audience
        self.num_epochs = 0
        self.writers: dict[str, Any] = {}

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Pass it on."""
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Write losses, learning rate and speed under the name of the phase."""
        if self.num_epochs:
            self.num_epochs += 1
        else:
            with suppress(ModelError):  # a full disk takes no log, and the run goes on
                self.num_epochs = len(self.run.read_epochs())  # this one and those of earlier processes
        speed = progress.num_batches * progress.batch_size / max(seconds, 1e-9)
        self._write("epochs", self.num_epochs, progress.phase, {**losses, "lr": lr, "images_per_second": speed})
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """Write accuracies, exemplars and seconds."""
        values = {name: value for name, value in result.items() if name not in ("stage", "num_seen")}
        self._write("stages", stage.num_seen, "stage", values)
        self.audience.on_stage(stage, result)

    def _write(self, folder: str, step: int, group: str, values: dict[str, float | None]) -> None:
        if folder not in self.writers:  # epochs and stages begin again at different steps, hence two
            from torch.utils.tensorboard import SummaryWriter

            self.writers[folder] = SummaryWriter(str(self.run.path / "tensorboard" / folder), purge_step=step)
        for name, value in values.items():
            if value is not None:
                self.writers[folder].add_scalar(f"{group}/{name}", value, step)
        self.writers[folder].flush()  # a run that is killed loses nothing
