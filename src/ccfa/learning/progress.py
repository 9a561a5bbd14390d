"""Progress: where a learner stands, who watches it, how fast it is, and how long it will take."""

import math
import shutil
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TextIO

from torch import Tensor

from ccfa.data import ImageSet, Stage
from ccfa.learning.acceleration import LossReader
from ccfa.methods import Method, Phase
from ccfa.methods.parts import balanced_exemplars

WINDOW = 30.0  # seconds of training steps that the rate is computed from
SAMPLE = 0.25  # seconds between two readings of the loss
REDRAW, PAUSE = 0.1, 30.0  # seconds between lines: redrawn in place, and added to a file
WAITING = "waiting for a first stage that another run trains"
COMPILING = "compiling (once, up to a minute)"
CAPTURING = "capturing the step"
EXEMPLARS = "choosing exemplars"
EVALUATING = "evaluating"
PREPARING = "preparing"
SAVING = "storing a checkpoint"
CONCLUDING = "concluding the stage"
IDLE = ""


class Progress(NamedTuple):
    """Where training stands. All numbers are counted from 0.

    Args:
        stage: The stage.
        phase: The name of the phase.
        epoch: The epoch, of `num_epochs`.
        num_epochs: The number of epochs of the phase.
        batch: The batch of the last step, of `num_batches`.
        num_batches: The number of batches in an epoch.
        batch_size: The number of images in a batch.
    """

    stage: Stage
    phase: str
    epoch: int
    num_epochs: int
    batch: int
    num_batches: int
    batch_size: int

    @property
    def place(self) -> str:
        """The place in words, counted from 1; files count from 0."""
        return f"stage {self.stage.index + 1}, phase {self.phase}, epoch {self.epoch + 1} of {self.num_epochs}"


def images_per_second(progress: Progress, seconds: float) -> float:
    """The rate of an epoch; 0 if its time is unknown."""
    return progress.num_batches * progress.batch_size / seconds if seconds else 0.0


class Observer(Protocol):
    """Watches a learner. Inherit from it and override what you want to know.

    >>> import ccfa
    >>> class Losses(ccfa.Observer):
    ...     def on_epoch(self, progress, losses, lr, seconds):
    ...         print(progress.phase, progress.epoch, losses["loss"] > 0)
    >>> train, test = ccfa.load("digits")
    >>> learner = ccfa.Learner(ccfa.build_method("finetune", "digits", epochs=2), train, observer=Losses())
    >>> learner.learn(ccfa.split(10, 5, 5)[0])
    main 0 True
    main 1 True
    """

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Called after each step. Reading the losses makes a GPU wait; without a reason, read them in `on_epoch`."""
        return

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Called after each epoch with the mean of each loss, and the seconds it took, also across a resume."""
        return

    def on_activity(self, stage: Stage, activity: str) -> None:
        """Called when the learner begins something else than training steps, such as `choosing exemplars`.

        It lasts until the next call of this method or of `on_batch`. The empty text says that the learner is idle.
        """
        return


class Unobserved(Observer):
    """An observer that does nothing."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        for observer in self.observers:
            observer.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        for observer in self.observers:
            observer.on_epoch(progress, losses, lr, seconds)

    def on_activity(self, stage: Stage, activity: str) -> None:
        for observer in self.observers:
            observer.on_activity(stage, activity)


class Work(NamedTuple):
    """What a phase has to do: passes over rows of the training set."""

    passes: int
    rows: int


def planned_work(method: Method, train: ImageSet, stage: Stage) -> dict[str, Work]:
    """Estimate the work of each phase of a stage; what a phase sees can be known only when it begins."""
    sizes = train.labels.bincount(minlength=train.num_classes).tolist()
    balanced = sum(min(size, method.memory.quota(stage.num_seen)) for size in sizes[: stage.num_seen])
    quota = method.memory.quota(max(stage.num_old, 1))
    rows = sum(sizes[stage.num_old : stage.num_seen]) + sum(min(size, quota) for size in sizes[: stage.num_old])
    found: dict[str, Work] = {}
    for phase in method.phases(stage):
        passes = 1
        inner: Phase | None = phase
        while inner:
            passes *= inner.epochs
            before = found[inner.name].passes if inner.name in found else 0
            found[inner.name] = Work(before + passes, balanced if inner.rows is balanced_exemplars else rows)
            inner = inner.after_epoch
    return found


class Window:
    """The images of recent training steps, and the seconds they took."""

    def __init__(self, images: float = 0.0, seconds: float = 0.0) -> None:
        self.images, self.seconds = images, seconds
        self._parts = deque([(images, seconds)])

    def add(self, images: float, seconds: float) -> None:
        """Add steps, and drop the oldest ones as far as the others are enough."""
        self._parts.append((images, seconds))
        while sum(part[1] for part in self._parts) - self._parts[0][1] >= WINDOW:
            self._parts.popleft()
        self.images, self.seconds = (sum(numbers) for numbers in zip(*self._parts, strict=True))


class Pace:
    """How fast training is, and what a stage costs beside its training steps.

    The rate is that of recent steps which the device has finished. A GPU is given steps long before it takes them, so
    a step counts when a loss that was asked for after it has arrived. The first step after a break is not counted: it
    may compile. A phase has a rate of its own, and another one in the first stage, where there is no old network.
    """

    def __init__(self) -> None:
        self.loss = math.nan  # the last one that was read
        self.stage = -1  # of the last step
        self.speeds: dict[tuple[bool, str], Window] = {}  # by phase, in the first stage and later
        self.shares: dict[str, float] = {}  # rows that a phase sees, for each row that was planned
        self.done: dict[str, int] = {}  # images of this stage, by phase
        self.beside = 0.0  # seconds of this stage for exemplars, evaluation and the like
        self.usual_beside = 0.0  # the same of the stage before
        self.measured = 0.0  # seconds of training in this process
        self._activity, self._began = IDLE, time.monotonic()
        self._reader = LossReader()
        self._queued = 0  # images given to the device
        self._asked: int | None = None  # images that the device has finished when the loss arrives
        self._asked_at = -math.inf
        self._finished: tuple[int, float] | None = None  # images, and the time then; None after a break

    def on_step(self, progress: Progress, losses: Mapping[str, Tensor], planned: Work | None) -> None:
        """Count a step that was given to the device."""
        self._end_activity()
        now, phase = time.monotonic(), progress.phase
        if progress.stage.index != self.stage:
            self.stage, self.done = progress.stage.index, {}
        self._queued += progress.batch_size
        self.done[phase] = self.done.get(phase, 0) + progress.batch_size
        if planned and planned.rows:
            self.shares[phase] = progress.num_batches * progress.batch_size / planned.rows
        if self._asked is None and (self._finished is None or now - self._asked_at >= SAMPLE):
            self._reader.ask(losses["loss"])
            self._asked, self._asked_at = self._queued, now
        if self._asked is not None and (loss := self._reader.answer()) is not None:
            self.loss = loss
            self._finish(phase, self._asked)

    def on_epoch(self, progress: Progress, loss: float) -> None:
        """Count all steps as finished: the epoch's losses have been read."""
        self.loss = loss
        self._finish(progress.phase, self._queued)

    def on_activity(self, activity: str) -> None:
        """Something else than training begins."""
        self._end_activity()
        self._activity, self._began = activity, time.monotonic()
        self._asked = self._finished = None

    def end_stage(self) -> None:
        """A stage is over, and the next one will cost about as much beside its steps."""
        self.on_activity(IDLE)
        self.usual_beside, self.beside, self.done = self.beside, 0.0, {}

    def seconds_per_image(self, is_first: bool, phase: str) -> float:
        """The time for an image, or of the most similar steps that were measured; NaN if there are none."""
        found = self.speeds.get((is_first, phase))
        alike = [found] if found else [speed for (_, name), speed in self.speeds.items() if name == phase]
        alike = alike or list(self.speeds.values())
        return sum(one.seconds for one in alike) / sum(one.images for one in alike) if alike else math.nan

    def rate(self, progress: Progress) -> float:
        """Images per second in this phase; NaN as long as it is unknown."""
        return 1 / self.seconds_per_image(progress.stage.index == 0, progress.phase)

    def images_left(self, work: Sequence[Mapping[str, Work]]) -> float:
        """Estimate the images that the steps of these stages will see; the first stage is the one at work."""
        return sum(images for stage in self._images_left(work) for images in stage.values())

    def seconds_left(self, work: Sequence[Mapping[str, Work]], index: int = 0) -> float:
        """Estimate the time that stages need, from the one at work on; NaN as long as it is unknown.

        Args:
            work: The planned work of these stages.
            index: The index of the first of them.
        """
        total = self.usual_beside * len(work) - min(self.beside, self.usual_beside)
        for number, stage in enumerate(self._images_left(work), start=index):
            total += sum(
                images * self.seconds_per_image(number == 0, phase) for phase, images in stage.items() if images
            )
        return total if self.speeds or self.usual_beside else math.nan

    def state(self) -> dict[str, Any]:
        """What a continued run should know, as plain values."""
        names = ("stage", "shares", "done", "beside", "usual_beside")
        speeds = [[*kind, speed.images, speed.seconds] for kind, speed in self.speeds.items()]
        return {"speeds": speeds, **{name: getattr(self, name) for name in names}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned. An estimate is no reason to stop, so anything else is passed over."""
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            speeds = {(bool(first), str(name)): Window(float(n), float(s)) for first, name, n, s in state["speeds"]}
            shares = {str(name): float(share) for name, share in state["shares"].items()}
            done = {str(name): int(images) for name, images in state["done"].items()}
            beside, usual, stage = float(state["beside"]), float(state["usual_beside"]), int(state["stage"])
            self.speeds = {kind: speed for kind, speed in speeds.items() if speed.images > 0}
            self.shares, self.done, self.beside, self.usual_beside, self.stage = shares, done, beside, usual, stage

    def _images_left(self, work: Sequence[Mapping[str, Work]]) -> Iterator[dict[str, float]]:
        done = self.done
        for stage in work:
            images = {phase: passes * rows * self.shares.get(phase, 1.0) for phase, (passes, rows) in stage.items()}
            yield {phase: max(number - done.get(phase, 0), 0.0) for phase, number in images.items()}
            done = {}

    def _finish(self, phase: str, images: int) -> None:
        now = time.monotonic()
        if self._finished and images > self._finished[0] and now > self._finished[1]:
            kind, seconds = (self.stage == 0, phase), now - self._finished[1]
            self.speeds.setdefault(kind, Window()).add(images - self._finished[0], seconds)
            self.measured += seconds
        self._finished, self._asked = (images, now), None

    def _end_activity(self) -> None:
        if self._activity not in (IDLE, WAITING, COMPILING):  # the next stage does not need these
            self.beside += time.monotonic() - self._began
        self._activity = IDLE


class Watch(Observer):
    """Follows a learner and says where it stands. Subclasses decide when, and where to.

    Args:
        work: The planned work of all stages, or of those that are known.
    """

    def __init__(self, work: Sequence[Mapping[str, Work]] = ()) -> None:
        self.work = work
        self.pace = Pace()
        self.num_done = 0  # stages
        self.later_are_slower = False  # as where they train the backbone beside the old one

    @abstractmethod
    def is_due(self) -> bool:
        """Whether it is time to show another line."""

    @abstractmethod
    def show(self, line: str, activity: str = "") -> None:
        """Show where the learner stands, or what else it does."""

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        index = progress.stage.index
        self.pace.on_step(progress, losses, self.work[index].get(progress.phase) if index < len(self.work) else None)
        if self.is_due():
            self.show(self.words(progress))

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        self.pace.on_epoch(progress, losses["loss"])

    def on_activity(self, stage: Stage, activity: str) -> None:
        self.pace.on_activity(activity)
        if activity:
            self.show(" · ".join(filter(None, [self.stage_words(stage), activity, *self.left_words()])), activity)

    def words(self, progress: Progress) -> str:
        """Where training stands, counted from 1, with the loss, the rate and the time left as far as they are known."""
        parts = [
            self.stage_words(progress.stage),
            progress.phase,
            f"epoch {progress.epoch + 1}/{progress.num_epochs}",
            f"batch {progress.batch + 1}/{progress.num_batches}",
        ]
        if not math.isnan(self.pace.loss):
            parts.append(f"loss {self.pace.loss:.3f}")
        if not math.isnan(rate := self.pace.rate(progress)):
            parts.append(f"{rate:,.0f} images/s")
        return " · ".join(filter(None, [*parts, *self.left_words()]))

    def seconds_left(self) -> float:
        """The time that is left; NaN as long as it is unknown."""
        return self.pace.seconds_left(self.work[self.num_done :], self.num_done)

    def stage_words(self, stage: Stage) -> str:
        return f"stage {stage.index + 1}/{len(self.work)}"

    def left_words(self) -> list[str]:
        left = self.seconds_left()
        return [] if math.isnan(left) else [f"{self.bound} {roughly(left)} left"]

    @property
    def bound(self) -> str:
        """How to read an estimate: slower stages may be ahead that are not measured yet."""
        is_measured = len(self.work) - self.num_done < 2 or not all(is_first for is_first, _ in self.pace.speeds)
        return "at least" if self.later_are_slower and not is_measured else "about"


class ProgressLine(Watch):
    """Shows progress in Python: one line that is redrawn in a terminal or a notebook, elsewhere one every half minute.

    `Learner(..., progress=True)` uses it. It knows the stage at work and no later one, so the time left is the stage's.

    Args:
        method: The learner's method.
        train: The training images.
        file: Where to write; by default the standard error stream.
    """

    def __init__(self, method: Method, train: ImageSet, file: TextIO | None = None) -> None:
        super().__init__()
        self.method, self.train, self.file = method, train, file
        out = self.file or sys.stderr
        self.redraws = out.isatty() or "ipykernel" in sys.modules
        self.last_shown, self.width = time.monotonic(), 0

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        self._begin(progress.stage)
        super().on_batch(progress, losses)

    def on_activity(self, stage: Stage, activity: str) -> None:
        self._begin(stage)
        super().on_activity(stage, activity)
        if not activity and self.width:
            self._write("\r" + " " * self.width + "\r")  # the line goes, and what is printed next stands in its place
            self.width = 0

    def stage_words(self, stage: Stage) -> str:
        return f"stage {stage.index + 1}"

    def is_due(self) -> bool:
        return time.monotonic() - self.last_shown >= (REDRAW if self.redraws else PAUSE)

    def show(self, line: str, activity: str = "") -> None:
        if activity and not self.redraws and not self.is_due():
            return
        self.last_shown = time.monotonic()
        if not self.redraws:
            self._write(line + "\n")
            return
        line = line[: shutil.get_terminal_size().columns - 1]  # a longer one could not be written over
        self._write("\r" + line.ljust(self.width))
        self.width = len(line)

    def _begin(self, stage: Stage) -> None:
        if stage.index >= len(self.work):
            self.pace.end_stage()
            self.num_done = stage.index
            self.work = [*({} for _ in range(stage.index)), planned_work(self.method, self.train, stage)]

    def _write(self, text: str) -> None:
        out = self.file or sys.stderr
        out.write(text)
        out.flush()


def roughly(seconds: float) -> str:
    """Format an estimate, which is not known to a tenth of a second.

    >>> roughly(33.4), roughly(200)
    ('33 s', '3 min 20 s')
    """
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


def duration(seconds: float) -> str:
    """Format a length of time for people.

    >>> duration(59.4), duration(200), duration(3661), duration(9.2 * 86400), duration(math.nan)
    ('59.4 s', '3 min 20 s', '1 h 01 min', '9 days', 'unknown time')
    """
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 3 * 24 * 60:
        return f"{round(minutes / 60 / 24)} days"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
