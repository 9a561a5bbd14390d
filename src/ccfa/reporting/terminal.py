"""Who watches a run: the terminal, a pipe or a file that the command line prints to, and TensorBoard."""

import time
from contextlib import suppress
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import ModelError, printable
from ccfa.evaluation import rule_name
from ccfa.experiments import Run
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.running import Audience
from ccfa.learning import Progress
from ccfa.reporting.tables import duration, percent, plain

BROKEN_PIPE_CODE = 141  # 128 + SIGPIPE, as of a command that knows nothing of pipes
ACCURACIES_SHOWN = 5


class Output(Console):
    """Prints text as it is, without markup, and with control characters written out.

    When the reader has left, as `head` does, the process ends quietly. A run at work is interrupted and can be
    continued.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE_CODE) from None


class StatusLine:
    """Where work stands: on a screen one line that is redrawn in place, elsewhere a plain line every few seconds."""

    def __init__(self, console: Console, several: bool = False) -> None:
        self.console = console
        redraws = console.is_terminal and not console.is_dumb_terminal and not several
        self.live = Live(console=console, auto_refresh=False, transient=True) if redraws else None
        self.pause = 60.0 if several else 0.1 if redraws else 5.0  # seconds between lines
        self.last_shown = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def is_due(self) -> bool:
        return time.monotonic() - self.last_shown >= self.pause

    def show(self, line: str) -> None:
        self.last_shown = time.monotonic()
        if self.live:
            self.live.update(Text(line), refresh=True)
        else:
            self.console.print(line, soft_wrap=True)


class Display(StatusLine):
    """Shows a run: one permanent line after each stage and, in between, where it stands.

    One of several runs at once has its name before each line, and a line once a minute.
    """

    def __init__(self, resolved: Resolved, console: Console, several: bool = False) -> None:
        super().__init__(console, several)
        self.prefix = f"{resolved.experiment.name}  " if several else ""
        self.num_stages = len(resolved.stages)
        self.plan = planned_images(resolved)
        self.other_rule = "nearest_mean" if rule_name(resolved.method.predict) == "logits" else "logits"
        self.done = self.done_here = 0  # images; the speed is that of this process
        self.accuracies: list[float] = []
        self.began = self.last_shown

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self.done += progress.batch_size
        self.done_here += progress.batch_size
        if self.is_due():
            self._show(progress)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        if not self.live and not self.prefix and progress.epoch == progress.num_epochs - 1:
            self._show(progress, f"loss {losses['loss']:.3f}")

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        self.accuracies.append(result["accuracy"])
        self.done = max(self.done, sum(self.plan[: stage.index + 1]))  # another process may have learned it
        self.last_shown = time.monotonic()
        other = result[f"{self.other_rule}_accuracy"]
        parts = [f"stage {stage.index + 1}/{self.num_stages}", f"{stage.num_seen} classes"]
        parts.append(f"accuracy {percent(result['accuracy'])}%")
        if result["old_accuracy"] is not None:
            parts.append(f"(old {percent(result['old_accuracy'])}%, new {percent(result['new_accuracy'])}%)")
        if other is not None:
            parts.append(f"{plain(self.other_rule)} {percent(other)}%")
        self.console.print(self.prefix + "  ".join([*parts, f"{result['seconds']:.1f} s"]), soft_wrap=True)

    def _show(self, progress: Progress, *extra: str) -> None:
        rate = self.done_here / max(time.monotonic() - self.began, 1e-9)
        left = max(sum(self.plan) - self.done, 0) / max(rate, 1e-9)
        parts = [
            f"stage {progress.stage.index + 1}/{self.num_stages}",
            progress.phase,
            f"epoch {progress.epoch + 1}/{progress.num_epochs}",
            f"{rate:,.0f} images/s",
            f"about {duration(left)} left",
            *extra,
        ]
        if self.accuracies:
            parts.append("accuracies " + " ".join(f"{percent(one, 1)}%" for one in self.accuracies[-ACCURACIES_SHOWN:]))
        self.show(self.prefix + " · ".join(parts))


def planned_images(resolved: Resolved) -> list[int]:
    """Estimate how many images each stage trains on: its new images and the exemplars in every epoch."""
    sizes = resolved.train.labels.bincount(minlength=resolved.train.num_classes).tolist()
    plan = []
    for stage in resolved.stages:
        quota = resolved.method.memory.quota(max(stage.num_old, 1))
        images = sum(sizes[stage.num_old : stage.num_seen]) + sum(min(size, quota) for size in sizes[: stage.num_old])
        plan.append(images * sum(phase.epochs for phase in resolved.method.phases(stage)))
    return plan


class TensorBoard:
    """Writes each epoch and each stage as scalars, and passes everything on to another audience.

    The steps are lines of metrics.jsonl and classes seen, so that a continued run replaces what it does again.
    """

    def __init__(self, run: Run, audience: Audience) -> None:
        self.run, self.audience = run, audience
        self.num_epochs = 0
        self.writers: dict[str, Any] = {}

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        if self.num_epochs:
            self.num_epochs += 1
        else:
            with suppress(ModelError):  # a full disk takes no log, and the run goes on
                self.num_epochs = len(self.run.read_epochs())  # this one and those of earlier processes
        speed = progress.num_batches * progress.batch_size / max(seconds, 1e-9)
        self._write("epochs", self.num_epochs, progress.phase, {**losses, "lr": lr, "images_per_second": speed})
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
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
