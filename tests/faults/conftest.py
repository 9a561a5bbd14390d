"""Where fault tests run: in memory where there is such a place, since they flush to the disk all the time."""

import os
import tempfile
from pathlib import Path

import pytest

from digests import run_digest
from toy_runs import toy_run

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def place():
    """A folder of one's own."""
    with tempfile.TemporaryDirectory(prefix="ccfa-test-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def undisturbed():
    """The digest of a toy run that nothing happened to."""
    with tempfile.TemporaryDirectory(prefix="ccfa-test-", dir=MEMORY) as folder:
        toy_run(Path(folder) / "run")
        return run_digest(Path(folder) / "run")
