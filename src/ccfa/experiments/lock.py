"""One process owns a run directory: the kernel's lock decides, and lets go when its holder dies."""

import errno
import fcntl
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ccfa.errors import LockedError, Notice, ResourceError

NAME = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory; what the lock file says is information for people only."""
    try:
        file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ResourceError(f"Could not open {directory / NAME}: {error.strerror}.") from error
    try:
        _take(file, directory)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk costs the information alone
            os.truncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(file)  # lets go of the lock


@contextmanager
def left_alone(directory: Path) -> Iterator[None]:
    """Hold a run directory that has been written, and leave no trace in it; refused where somebody is at work."""
    with _opened(directory / NAME) as file:  # where there is none, nobody was ever at work
        if file is not None:
            _take(file, directory)
        yield


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until nobody else is in here for the same folder; without a trace, and where there are no locks, at once."""
    with _opened(folder) as file:
        if file is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor for locks; None where the path cannot be opened."""
    file = None
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def _take(file: int, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"{directory} is being written by another process{_holder(file)}. Wait for it, or use another --out."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise ResourceError(f"Could not lock {directory}: {error.strerror}.") from error
        warnings.warn(
            Notice(f"The file system of {directory} has no locks: start no second run there meanwhile."), stacklevel=2
        )


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f" ({holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
