"""A run as the terminal shows it: a live line or two on a screen, plain lines everywhere else."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from ccfa.data import Stage
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.workload import workload
from ccfa.learning import Progress
from ccfa.methods.method import by_nearest_mean
from ccfa.reporting.values import duration

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_REDRAWS = 0.1
ACCURACIES_SHOWN = 5


class Display:
    """Stage, phase, epoch, speed, time left and the last stages' accuracies; after each stage one permanent line."""

    def __init__(self, resolved: Resolved, console: Console) -> None:
        self.console = console
        self.num_stages = len(resolved.stages)
        self.plan = planned_images(resolved)
        self.total = sum(self.plan)
        # Shown beside the method's own accuracy is the one by the other rule.
        nearest = resolved.method.predict is by_nearest_mean
        self.other_rule = ("logits", "logits_accuracy") if nearest else ("nearest mean", "nearest_mean_accuracy")
        self.done = 0
        self.done_here = 0  # by this process: the speed is its own
        self.accuracies: list[float] = []
        self.began = time.monotonic()
        self.last_shown = self.began
        redraws = console.is_terminal and not console.is_dumb_terminal
        self.live = Live(console=console, auto_refresh=False, transient=True) if redraws else None

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Redraw now and then."""
        self.done += progress.batch_size
        self.done_here += progress.batch_size
        pause = SECONDS_BETWEEN_REDRAWS if self.live else SECONDS_BETWEEN_LINES
        if time.monotonic() - self.last_shown >= pause:
            self._show(progress)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """A line at the end of each phase, also where nobody looks live."""
        if not self.live and progress.epoch == progress.num_epochs - 1:
            self._show(progress, f"loss {losses['loss']:.3f}")

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """The stage's result, for good."""
        self.accuracies.append(result["accuracy"])
        self.done = max(self.done, sum(self.plan[: stage.index + 1]))  # it may have been learned by another process
        parts = [
            f"stage {stage.index + 1}/{self.num_stages}",
            f"{stage.num_seen} classes",
            f"accuracy {result['accuracy']:.2%}",
        ]
        if result["old_accuracy"] is not None:
            parts.append(f"(old {result['old_accuracy']:.2%}, new {result['new_accuracy']:.2%})")
        rule, column = self.other_rule
        if result[column] is not None:
            parts.append(f"{rule} {result[column]:.2%}")
        parts.append(f"{result['seconds']:.1f} s")
        self.console.print("  ".join(parts), soft_wrap=True)

    def _show(self, progress: Progress, *extra: str) -> None:
        self.last_shown = time.monotonic()
        rate = self.done_here / max(self.last_shown - self.began, 1e-9)
        left = max(self.total - self.done, 0) / max(rate, 1e-9)
        parts = [
            f"stage {progress.stage.index + 1}/{self.num_stages}",
            progress.phase,
            f"epoch {progress.epoch + 1}/{progress.num_epochs}",
            f"{rate:,.0f} images/s",
            f"{duration(left)} left",
            *extra,
        ]
        if self.accuracies:
            earlier = " ".join(f"{accuracy:.1%}" for accuracy in self.accuracies[-ACCURACIES_SHOWN:])
            parts.append(f"accuracies {earlier}")
        if self.live:
            self.live.update(Text("\n".join(packed(parts, self.console.width))), refresh=True)
        else:
            self.console.print(" · ".join(parts), soft_wrap=True)


def packed(parts: Sequence[str], width: int) -> list[str]:
    """The parts in as few lines of that width as hold them, none broken that fits."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def planned_images(resolved: Resolved) -> list[int]:
    """How many images each stage will train on, counted with repetition."""
    sizes = resolved.train.labels.bincount(minlength=resolved.train.num_classes).tolist()
    return [work.images for work in workload(resolved.method, resolved.stages, sizes)]
