"""Toy runs in processes that are killed, stopped or run out of something, and what they leave behind."""

from pathlib import Path
from typing import Any

from ccfa.evaluation import Report
from ccfa.experiments.running import stoppable
from children import started, wait
from failing import install
from toy_runs import toy_run

# The steps of a toy run: (stage, phase) of each.
STEPS = [(0, "main")] * 4 + [(1, "main")] * 4 + [(1, "balanced")] * 2 + [(2, "main")] * 6 + [(2, "balanced")] * 4


def stoppable_run(path: Path, max_minutes: float | None = None, minutes: float = 0, **options: Any) -> Report:
    """A toy run, or what is left of it, that is stopped by signals and stores a checkpoint after each epoch."""
    with stoppable(max_minutes) as stop:
        return toy_run(path, stop=stop, checkpoint_minutes=minutes, **options)


def start(path: Path, faults: str = "", **options: Any) -> int:
    """The process number of a toy run in a child, in which these places fail."""

    def body() -> None:
        install(faults)
        stoppable_run(path, **options)

    return started(body)


def die(path: Path, faults: str, **options: Any) -> int:
    """How such a run ended: its exit code, or minus the signal that killed it."""
    return wait(start(path, faults, **options))


def left_over(path: Path) -> list[str]:
    """Temporary files and folders in a run directory."""
    hidden = (file for file in path.rglob("*") if file.name.startswith(".") and file.name != ".lock")
    return [str(file.relative_to(path)) for file in hidden]


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((path / "checkpoints").glob("0*.safetensors"))
