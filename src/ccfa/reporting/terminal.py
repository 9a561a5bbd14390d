"""Who watches a run: the terminal, a pipe or a file that the command line prints to, and TensorBoard."""

import heapq
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
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
from ccfa.learning.progress import (
    COMPILING,
    PAUSE,
    REDRAW,
    WAITING,
    Watch,
    Work,
    images_per_second,
    planned_work,
    roughly,
)
from ccfa.methods.parts import is_frozen
from ccfa.reporting.tables import percent, plain

BROKEN_PIPE_CODE = 141  # 128 + SIGPIPE, as of a command that knows nothing of pipes
ESTIMATE_AFTER = 5.0  # seconds of training steps
WORTH_TELLING, TOO_LONG = 60.0, 8 * 3600.0  # seconds


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


class StatusLines:
    """Where work stands: on a screen lines that are redrawn in place, elsewhere plain lines every half minute.

    There is one line for each name. What is printed on the console stands above them.

    Args:
        console: Where to show it.
        on_cpu: Whether the work is done by a CPU, which can be much too slow for it.
    """

    def __init__(self, console: Console, on_cpu: bool = False) -> None:
        self.console, self.on_cpu = console, on_cpu
        self.is_estimated = False
        self.redraws = console.is_terminal and not console.is_dumb_terminal
        self.live: Live | None = None
        self.pause = REDRAW if self.redraws else PAUSE
        self.last_shown = time.monotonic()
        self.lines: dict[str, tuple[str, float | None]] = {}  # by name, and when an activity began
        self.lock = threading.RLock()  # runs at once are threads; not held while printing, which has a lock of its own

    def __enter__(self) -> Self:
        if self.redraws:
            self.live = Live(console=self.console, get_renderable=self._rendered, transient=True)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def put(self, name: str, line: str, is_activity: bool = False, at_once: bool = False) -> None:
        """Replace the line of a name, and show all lines if it is time to; show this one in any case if `at_once`."""
        now = time.monotonic()
        with self.lock:
            self.lines[name] = line, now if is_activity else None
            is_due = now - self.last_shown >= self.pause
            if is_due:
                self.last_shown = now
        if self.live and (is_due or at_once):
            self.live.refresh()
        elif is_due and not self.redraws:
            self._print(self.texts())
        elif at_once and not self.redraws:
            self._print([_named(name, line)])

    def remove(self, name: str) -> None:
        with self.lock:
            self.lines.pop(name, None)

    def texts(self) -> list[str]:
        """The lines as they are shown."""
        with self.lock:
            lines = list(self.lines.items())
        now = time.monotonic()
        lasted = {name: f" · {now - since:.0f} s" for name, (_, since) in lines if since and now - since >= 1}
        return [_named(name, line) + lasted.get(name, "") for name, (line, _) in lines]

    def estimate(self, seconds: float, bound: str) -> None:
        """Say once how long it will take, about or at least, unless it is a matter of seconds."""
        with self.lock:
            if self.is_estimated:
                return
            self.is_estimated = True
        if self.on_cpu and seconds >= TOO_LONG:
            self._print([too_long(seconds, bound)])
        elif seconds >= WORTH_TELLING:
            self._print([f"At this speed it will take {bound} {roughly(seconds)}."])

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True)

    def _rendered(self) -> Text:
        return Text("\n".join(self.texts()))


def _named(name: str, line: str) -> str:
    return f"{name}  {line}" if name else line


class Shown(Watch):
    """Shows where a learner stands, as a line of `StatusLines`."""

    def __init__(self, work: Sequence[Mapping[str, Work]], lines: StatusLines, name: str = "") -> None:
        super().__init__(work)
        self.lines, self.name = lines, name
        self.pause = REDRAW if lines.redraws else 1.0
        self.last_put = -math.inf

    def is_due(self) -> bool:
        return time.monotonic() - self.last_put >= self.pause

    def show(self, line: str, activity: str = "") -> None:
        self.last_put = time.monotonic()
        at_once = bool(activity) and (self.lines.redraws or activity.startswith((COMPILING, WAITING)))
        self.lines.put(self.name, line, bool(activity), at_once)


class Display(Shown):
    """Shows a run: one permanent line after each stage and, in between, where it stands.

    Args:
        resolved: The run's experiment.
        lines: Where to show it.
        name: The name of the run, if it is one of several.
    """

    def __init__(self, resolved: Resolved, lines: StatusLines, name: str = "") -> None:
        work = [planned_work(resolved.method, resolved.train, stage) for stage in resolved.stages]
        super().__init__(work, lines, name)
        self.later_are_slower = not is_frozen(resolved.method, resolved.stages[0])
        self.told: tuple[int, str] | None = None  # the stage and phase whose end was shown
        self.other_rule = "nearest_mean" if rule_name(resolved.method.predict) == "logits" else "logits"

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        super().on_batch(progress, losses)
        if not self.lines.is_estimated and self.pace.measured >= ESTIMATE_AFTER:
            self.lines.estimate(self.seconds_left(), self.bound)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        super().on_epoch(progress, losses, lr, seconds)
        place = progress.stage.index, progress.phase  # told once: a phase may follow each epoch of another
        is_last = progress.epoch == progress.num_epochs - 1 and place != self.told
        if not self.lines.redraws and not self.name and is_last:
            self.told = place
            self.lines.put(self.name, self.words(progress), at_once=True)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        self.pace.end_stage()
        self.num_done = stage.index + 1
        other = result[f"{self.other_rule}_accuracy"]
        parts = [self.stage_words(stage), f"{stage.num_seen} classes"]
        parts.append(f"accuracy {percent(result['accuracy'])}%")
        if result["old_accuracy"] is not None:
            parts.append(f"(old {percent(result['old_accuracy'])}%, new {percent(result['new_accuracy'])}%)")
        if other is not None:
            parts.append(f"{plain(self.other_rule)} {percent(other)}%")
        line = "  ".join([*parts, f"{result['seconds']:.1f} s"])
        self.lines.console.print(_named(self.name, line), soft_wrap=True)

    def state(self) -> dict[str, Any]:
        return self.pace.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.pace.restore(state)
        if self.pace.stage < self.num_done:  # stored when that stage was over
            self.pace.end_stage()


class Board(StatusLines):
    """Shows a sweep: how many runs are done, how long the others will take, and what each run at work does.

    Args:
        console: Where to show it.
        at_once: How many runs are at work at a time.
        on_cpu: Whether they run on a CPU.
    """

    def __init__(self, console: Console, at_once: int, on_cpu: bool) -> None:
        super().__init__(console, on_cpu)
        self.at_once = at_once
        self.num_runs = self.num_done = self.num_failed = 0
        self.images: dict[str, float] = {}  # that each run which has not ended will train on
        self.left: dict[str, float] = {}  # seconds, of the runs at work
        self.bounds: dict[str, str] = {}  # whether that is "about" or "at least" so long
        self.seconds_per_image = math.nan

    def plan(self, runs: Sequence[tuple[str, float]], num_done: int) -> None:
        """Take the names of the runs that are left with the images they train on, and how many are done."""
        self.images, self.num_done, self.num_runs = dict(runs), num_done, num_done + len(runs)

    def at_work(self, name: str, images: float, seconds: float, bound: str) -> None:
        """Take the images and the seconds that are left to a run; NaN if the time is unknown yet."""
        with self.lock:
            self.left[name], self.bounds[name] = seconds, bound
            if images > 0 and seconds > 0:
                self.seconds_per_image = seconds / images

    def end(self, name: str, is_finished: bool, has_failed: bool) -> None:
        """A run has ended. One that was stopped is neither finished nor failed."""
        with self.lock:
            self.remove(name)
            self.left.pop(name, None)
            self.bounds.pop(name, None)
            self.images.pop(name, None)
            self.num_done += is_finished
            self.num_failed += has_failed

    def seconds_left(self) -> float:
        """Estimate when the last run will end, each one beginning as soon as another has ended; NaN if unknown."""
        with self.lock:
            each = {name: images * self.seconds_per_image for name, images in self.images.items()}
            each |= {name: seconds for name, seconds in self.left.items() if not math.isnan(seconds)}
            busy = sorted(each.pop(name) for name in list(self.left) if name in each)
        ends = [0.0] * max(self.at_once - len(busy), 0) + busy
        for seconds in each.values():
            heapq.heapreplace(ends, ends[0] + seconds)
        return math.nan if any(map(math.isnan, ends)) else max(ends, default=0.0)

    def estimate(self, seconds: float, bound: str) -> None:
        """Say once how long all runs will take."""
        super().estimate(self.seconds_left(), self.bound)

    @property
    def bound(self) -> str:
        """How to read the estimate of all runs."""
        with self.lock:
            return "at least" if "at least" in self.bounds.values() else "about"

    def texts(self) -> list[str]:
        seconds = self.seconds_left()
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        left = "" if math.isnan(seconds) else f", {self.bound} {roughly(seconds)} left"
        head = [f"{self.num_done}/{self.num_runs} runs done{failed}{left}"] if self.num_runs else []
        return [*head, *super().texts()]


class SweepDisplay(Display):
    """Shows one run of a sweep."""

    def __init__(self, resolved: Resolved, board: Board) -> None:
        super().__init__(resolved, board, name=resolved.experiment.name)
        self.board = board

    def show(self, line: str, activity: str = "") -> None:
        work = self.work[self.num_done :]
        left = self.pace.images_left(work), self.pace.seconds_left(work, self.num_done)
        self.board.at_work(self.name, *left, self.bound)
        super().show(line, activity)


def too_long(seconds: float, bound: str) -> str:
    """Return a warning that this takes very long, and what to do."""
    return (
        f"warning: this will take {bound} {roughly(seconds)} on this CPU. Use a GPU (see 'PyTorch for your machine' in "
        f"docs/start.md), or train for fewer epochs, for example with --epochs 10."
    )


class TensorBoard(Audience):
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
        speed = images_per_second(progress, seconds) or None
        self._write("epochs", self.num_epochs, progress.phase, {**losses, "lr": lr, "images_per_second": speed})
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_activity(self, stage: Stage, activity: str) -> None:
        self.audience.on_activity(stage, activity)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        values = {name: value for name, value in result.items() if name not in ("stage", "num_seen")}
        self._write("stages", stage.num_seen, "stage", values)
        self.audience.on_stage(stage, result)

    def state(self) -> dict[str, Any]:
        return self.audience.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.audience.restore(state)

    def _write(self, folder: str, step: int, group: str, values: Mapping[str, float | None]) -> None:
        if folder not in self.writers:  # epochs and stages begin again at different steps, hence two
            from torch.utils.tensorboard import SummaryWriter

            self.writers[folder] = SummaryWriter(str(self.run.path / "tensorboard" / folder), purge_step=step)
        for name, value in values.items():
            if value is not None:
                self.writers[folder].add_scalar(f"{group}/{name}", value, step)
        self.writers[folder].flush()  # a run that is killed loses nothing
