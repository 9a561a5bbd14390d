"""What can go wrong for a user, each kind with the exit code the command line gives it."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Choice = TypeVar("Choice")
ALSO_CALLED = {  # what other programs call a command or an option
    "train": "run",
    "eval": "evaluate",
    "test": "evaluate",
    "arch": "backbone",
    "model": "backbone",
    "buffer-size": "memory",
    "memory-size": "memory",
    "cuda": "device cuda",
    "gpu": "device cuda",
    "learning-rate": "lr",
    "wandb": "track wandb",
}


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


class DamagedError(ModelError):
    """A file whose content is not what was written into it."""


class ResourceError(CcfaError):
    """Disk, memory or device not available."""

    exit_code = 5


class DivergedError(CcfaError):
    """The loss or the weights became NaN or infinite; `details` says where, and what was seen."""

    exit_code = 6

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class LockedError(CcfaError):
    """Another process is at work in the directory."""

    exit_code = 7


class Stopped(SystemExit):
    """The end of a run that was asked to stop and can be continued; the code is the command line's exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(exit_code)
        self.message = message
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message


class Notice(UserWarning):
    """Something about the user's data that is no error, and that they would want to know."""


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as the terminal shows it; where in the source it arose matters for those of others only."""
    where = "" if issubclass(category, Notice) else f"{category.__name__} ({filename}:{lineno}): "
    return printable(f"note: {where}{message}\n")


def printable(text: str) -> str:
    """The text with control characters written out: those of a foreign file must not reach the terminal.

    >>> printable("a name\\x1b[2J")
    'a name\\\\x1b[2J'
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    meant = nearest(name, known)
    hint = f" Did you mean {meant!r}?" if meant else ""
    listed = ", ".join(repr(one) if "," in one else one for one in known[:60])
    if len(known) > 60:
        listed += f", and {len(known) - 60} more"
    own = f" A {kind} of your own needs --plugin FILE (load_plugin)." if kind in ("method", "backbone") else ""
    return UsageError(f"Unknown {kind} {name!r}.{hint} Known: {listed}.{own}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is probably meant, in any case, if there is one.

    >>> nearest("PDNet", ["podnet", "afc"]), nearest("gpu", ["plugin", "device"]), nearest("gpu", ["plugin"])
    ('podnet', 'device cuda', None)
    """
    in_lower_case = {one.lower(): one for one in known}
    meant = ALSO_CALLED.get(name.lower().replace("_", "-"))
    if meant and meant.split()[0] in in_lower_case:
        return meant
    close = difflib.get_close_matches(name.lower(), in_lower_case, n=1, cutoff=0.65)
    return in_lower_case[close[0]] if close else None


def matching(name: str, known: Iterable[str]) -> str | None:
    """The known name that is written like this one, or else the only one that differs from it in case alone.

    >>> matching("PODNet", ["podnet", "afc"])
    'podnet'
    """
    known = list(known)
    if name in known:
        return name
    alike = [one for one in known if one.casefold() == str(name).casefold()]
    return alike[0] if len(alike) == 1 else None


def chosen_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The known name that matches in any case, or the error that names the nearest one."""
    known = list(known)
    found = matching(name, known)
    if found is None:
        raise unknown(kind, name, known)
    return found


def choose(kind: str, name: str, choices: Mapping[str, Choice]) -> Choice:
    """The choice of that name, in any case, or the error that names the nearest one."""
    return choices[chosen_name(kind, name, choices)]


def installing(extra: str) -> str:
    """The command that installs an extra: from the checkout if this file is in one, else from the package index."""
    root = Path(__file__).parents[2]
    if not (root / "constraints.txt").exists():
        return f"pip install 'ccfa[{extra}]'"
    return shlex.join(["pip", "install", "-c", f"{root}/constraints.txt", "-e", f"{root}[{extra}]"])
