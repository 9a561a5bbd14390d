"""Sweeps: a line for each stage of each run, and at the end their comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.sweep import Cell, Key
from ccfa.learning import Progress
from ccfa.reporting.comparison import Comparison, compare
from ccfa.reporting.sameness import Entry


class StageLines:
    """Tells of each stage of one run among several, a line each."""

    def __init__(self, resolved: Resolved, console: Console) -> None:
        self.name = resolved.experiment.name
        self.num_stages = len(resolved.stages)
        self.console = console

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Nothing: several runs would talk at once."""

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Nothing."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """The stage's accuracy."""
        self.console.print(
            f"{self.name}  stage {stage.index + 1}/{self.num_stages}  accuracy {result['accuracy']:.2%}  "
            f"{result['seconds']:.1f} s",
            soft_wrap=True,
        )


def sweep_comparison(cells: Mapping[Key, Cell], out: Path) -> Comparison:
    """The runs of a sweep side by side; a combination that has no meaning is a note with its reason."""
    entries = [Entry(out / report.name, report) for cell in cells.values() for report in cell.reports.values()]
    refused = [f"{method} + CCFA: {cell.reason}" for (method, _), cell in cells.items() if cell.reason]
    if not entries:
        raise UsageError("Nothing was run. " + " ".join(refused))
    return compare(entries, refused)
