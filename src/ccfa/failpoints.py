"""Faults on demand, for tests: CCFA_FAIL=name:n:action[,...] makes the n-th passing of a named place fail.

The places are step, pause, phase, select, evaluate, commit, after_commit, write, append and report. Unset, nothing
happens.
"""

import errno
import os
import signal
import time
from collections import Counter

_passed: Counter[str] = Counter()
_SIGNALS = {
    "kill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sighup": signal.SIGHUP,
    "sigusr1": signal.SIGUSR1,
    "sigusr2": signal.SIGUSR2,
}


def failpoint(name: str) -> str:
    """Fail here if this passing was asked to; returns the action where the caller has to carry it out (nan)."""
    asked = os.environ.get("CCFA_FAIL")
    if not asked:
        return ""
    _passed[name] += 1
    for place, number, action in (entry.split(":") for entry in asked.split(",")):
        if (place, int(number)) == (name, _passed[name]):
            return _fail(name, action)
    return ""


def _fail(name: str, action: str) -> str:
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "oom":
        raise MemoryError(f"asked for at {name}")
    elif action == "raise":
        raise RuntimeError(f"asked for at {name}")
    elif action == "sleep":
        time.sleep(1)
    return action


def reset() -> None:
    """Count from the beginning again."""
    _passed.clear()
