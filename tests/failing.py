"""Faults on demand: places of a run that fail when a test wants them to.

`install("step:3:kill,write:2:enospc")` makes the third step and the second write fail. Each place is a function of the
package that is wrapped here, so the package itself has no code for tests. Processes started with this folder's
`processes` on PYTHONPATH install what the variable CCFA_FAIL says.
"""

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ccfa.experiments import running
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import Recorder
from ccfa.learning.learner import ExemplarMemory

SIGNALS = {f"sig{name}": getattr(signal, f"SIG{name.upper()}") for name in ("term", "int", "hup", "usr1", "usr2")}
SIGNALS["kill"] = signal.SIGKILL


def install(faults: str) -> Callable[[], None]:
    """Wrap all places; the function that is returned takes the wrapping off again."""
    wanted = {}
    for entry in filter(None, faults.split(",")):
        place, number, action = entry.split(":")
        wanted[place, int(number)] = action
    passed: Counter[str] = Counter()
    patch = pytest.MonkeyPatch()

    def point(place: str) -> str:
        passed[place] += 1
        action = wanted.get((place, passed[place]), "")
        fail(place, action)
        return action

    def before(owner: Any, name: str, places: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            places(*arguments)
            return real(*arguments, **options)

        patch.setattr(owner, name, wrapped)

    def step(recorder: Recorder, progress: Any, losses: Any) -> None:
        action = point("step")
        if progress.epoch + 1 == progress.num_epochs and progress.batch + 1 == progress.num_batches:
            point("phase")
        if action == "nan":
            next(recorder.learner.network.parameters()).data.fill_(float("nan"))

    def commit(source: Any, target: Any) -> None:
        if "checkpoints" in str(target) and "damaged-" not in str(target):
            point("commit")

    def flush(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".tmp"):
            point("write")

    patch.setattr(running, "SAME_SIGNAL", 0.0)  # signals at two places are two
    before(Recorder, "on_batch", step)
    before(Recorder, "on_pause", lambda *_: point("pause"))
    before(ExemplarMemory, "update", lambda *_: point("select"))
    before(running.Evaluator, "evaluate", lambda *_: point("evaluate"))
    before(Run, "append", lambda *_: point("append"))
    before(Run, "write_results", lambda *_: point("report"))
    before(Run, "prune_checkpoints", lambda *_: point("after_commit"))
    before(os, "replace", commit)
    before(os, "fsync", flush)
    return patch.undo


def fail(place: str, action: str) -> None:
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "oom":
        raise MemoryError(f"wanted at {place}")
    elif action == "raise":
        raise RuntimeError(f"wanted at {place}")
    elif action == "sleep":
        time.sleep(1)
