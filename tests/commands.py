"""The command line, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ccfa

COMMAND = [sys.executable, "-m", "ccfa.cli"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def environment(**changes: str) -> dict[str, str]:
    """The variables of this process, without those that change what is printed."""
    unset = ("CCFA_DATA", "CCFA_FAIL", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    source = os.pathsep.join([str(Path(ccfa.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **changes}


def command(*arguments: object, cwd: Path, python: tuple[str, ...] = (), **changes: str) -> Any:
    """What the command wrote and how it ended; `python` is for the interpreter."""
    words = [COMMAND[0], *python, *COMMAND[1:], *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=environment(**changes), capture_output=True, timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
