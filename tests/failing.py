"""Faults on demand: places of a run that fail when a test wants them to.

`install("step:3:kill,write:2:enospc")` makes the third step and the second write fail. Each place is a function of the
package that is wrapped here, so the package itself knows nothing of this. Processes started with this folder's
`processes` on PYTHONPATH install what the variable CCFA_FAIL says.
"""

import builtins
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ccfa import files
from ccfa.experiments.evaluations import Evaluations
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import Recorder
from ccfa.learning.learner import ExemplarMemory

SIGNALS = {
    "kill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sighup": signal.SIGHUP,
    "sigusr1": signal.SIGUSR1,
    "sigusr2": signal.SIGUSR2,
}


@contextmanager
def failing(faults: str) -> Iterator[None]:
    """Make places fail, counted from now."""
    undo = install(faults)
    try:
        yield
    finally:
        undo()


def install(faults: str) -> Callable[[], None]:
    """Wrap all places; the function that is returned takes the wrapping off again."""
    wanted = {}
    for entry in filter(None, faults.split(",")):
        place, number, action = entry.split(":")
        wanted[place, int(number)] = action
    passed: Counter[str] = Counter()
    undo: list[Callable[[], None]] = []

    def point(name: str) -> str:
        passed[name] += 1
        action = wanted.get((name, passed[name]), "")
        if action:
            fail(name, action)
        return action

    def before(owner: Any, name: str, place: str) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            point(place)
            return real(*arguments, **options)

        replace(owner, name, wrapped)

    def replace(owner: Any, name: str, value: Any) -> None:
        real = vars(owner).get(name)
        setattr(owner, name, value)
        undo.append(lambda: setattr(owner, name, real) if real is not None else delattr(owner, name))

    real_on_batch = Recorder.on_batch

    def on_batch(self: Recorder, progress: Any, losses: Any) -> None:
        action = point("step")
        if progress.epoch + 1 == progress.num_epochs and progress.batch + 1 == progress.num_batches:
            action = point("phase") or action
        if action == "nan" and self.learner:
            next(self.learner.network.parameters()).data.fill_(float("nan"))
        real_on_batch(self, progress, losses)

    replace(Recorder, "on_batch", on_batch)
    before(Recorder, "on_pause", "pause")
    before(ExemplarMemory, "update", "select")
    before(Evaluations, "add", "evaluate")
    before(Run, "append", "append")
    before(Run, "write_report", "report")

    real_prune = Run.prune_checkpoints

    def prune(self: Run, *arguments: Any) -> None:
        point("after_commit")
        real_prune(self, *arguments)

    replace(Run, "prune_checkpoints", prune)
    real_replace = os.replace

    def rename(source: Any, target: Any) -> None:
        if "checkpoints" in str(target) and "damaged-" not in str(target):
            point("commit")
        real_replace(source, target)

    replace(os, "replace", rename)

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = builtins.open(path, mode, *arguments, **options)  # noqa: SIM115
        return HalfWritten(file, point) if mode == "xb" else file

    replace(files, "open", opened)
    return lambda: [step() for step in reversed(undo)] and None


class HalfWritten:
    """A file that passes the place `write` when half of its content is written."""

    def __init__(self, file: Any, point: Callable[[str], str]) -> None:
        self.file, self.point = file, point

    def write(self, content: bytes) -> None:
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        self.point("write")
        self.file.write(content[len(content) // 2 :])

    def __enter__(self) -> "HalfWritten":
        self.file.__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        self.file.__exit__(*ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def fail(name: str, action: str) -> None:
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "oom":
        raise MemoryError(f"asked for at {name}")
    elif action == "raise":
        raise RuntimeError(f"asked for at {name}")
    elif action == "sleep":
        time.sleep(1)
