"""What can go wrong for a user, each kind with the exit code the command line gives it."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Choice = TypeVar("Choice")


class CcfaError(Exception):
    """A problem the user can act on; shown as one message, without a traceback."""

    exit_code = 1


class UsageError(CcfaError):
    """A name, option or combination that does not exist or does not fit."""

    exit_code = 2


class DataError(CcfaError):
    """Images, labels or archives that are missing, damaged or not what was expected."""

    exit_code = 3


class ModelError(CcfaError):
    """A model or checkpoint that cannot be used."""

    exit_code = 4


class ResourceError(CcfaError):
    """Disk, memory or device not available."""

    exit_code = 5


class DivergedError(CcfaError):
    """The loss became NaN or infinite."""

    exit_code = 6


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UsageError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def choose(kind: str, name: str, choices: Mapping[str, Choice]) -> Choice:
    """The choice of that name, or the error that names the nearest one."""
    if name not in choices:
        raise unknown(kind, name, choices)
    return choices[name]
