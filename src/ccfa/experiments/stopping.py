"""Stopping a run from outside: signals and a time limit set a flag, which the run reads between two steps."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TIME_LIMIT_CODE = 75
# Clusters send SIGUSR1 or SIGUSR2 some time before they end a job.
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stop:
    """Whether runs should stop, and with which exit code; shared by all runs of a process."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self.code: int | None = None
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes is not None else None

    def asked(self) -> int | None:
        """The exit code if it is time to stop."""
        if self.code is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.code = TIME_LIMIT_CODE
        return self.code

    def heed(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the first one asks to stop, a second Ctrl-C aborts, a third ends the process."""
        if self.code is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.code = 128 + number


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
