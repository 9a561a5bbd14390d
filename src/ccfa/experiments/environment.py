"""The environment of a run, as environment.json stores it."""

import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ccfa
from ccfa.learning.acceleration import Acceleration, describe_device


def environment(device: torch.device, acceleration: Acceleration) -> dict[str, Any]:
    """Return versions, commit, device, precision and threads as plain values.

    >>> environment(torch.device("cpu"), Acceleration())["torch_device"]
    'cpu'
    """
    return {
        "ccfa": ccfa.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": describe_device(device),
        "torch_device": str(device),
        "acceleration": asdict(acceleration),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def _commit() -> str:
    """Return the commit of the source if the package runs from a checkout; `+` marks uncommitted changes.

    The variable CCFA_COMMIT takes precedence, for copies of a checkout that have no history or another one.
    """
    if commit := os.environ.get("CCFA_COMMIT"):
        return commit
    try:
        # In a virtual environment inside another project's checkout, this file is not tracked: that commit is not ours.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
