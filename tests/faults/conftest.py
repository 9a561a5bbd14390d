"""Fault tests run in memory where there is such a place, since they flush to the disk all the time."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from digests import run_digest
from dying import die
from toy_runs import toy_run

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def place():
    """A new folder."""
    with tempfile.TemporaryDirectory(prefix="ccfa-test-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def session_place():
    with tempfile.TemporaryDirectory(prefix="ccfa-test-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def undisturbed(session_place):
    """The digest of a toy run that is never stopped."""
    toy_run(session_place / "undisturbed")
    return run_digest(session_place / "undisturbed")


@pytest.fixture(scope="session")
def _killed(session_place):
    assert die(session_place / "killed", "step:11:kill") < 0
    return session_place / "killed"


@pytest.fixture
def killed(_killed, place):
    """A copy of a run that was killed at the first step of its third stage."""
    return shutil.copytree(_killed, place / "run")
