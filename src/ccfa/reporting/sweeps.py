"""Sweeps: a line for each stage of each run, and at the end their comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import CcfaError, UsageError
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.schedule import Outcome
from ccfa.experiments.stopping import stoppable
from ccfa.experiments.sweep import Cell, Key, Plan, sweep
from ccfa.learning import Progress
from ccfa.learning.acceleration import Acceleration
from ccfa.reporting.comparison import Comparison, compare
from ccfa.reporting.comparison_page import show_comparison
from ccfa.reporting.page import report_line
from ccfa.reporting.sameness import Entry
from ccfa.reporting.showing import show_partial_page
from ccfa.reporting.tensorboard import with_tensorboard


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


def sweep_shown(
    plan: Plan,
    out: Path,
    data_dir: Path | None,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    *,
    at_once: int,
    first_stages: Path | None,
    checkpoint_minutes: float,
    max_minutes: float | None,
    tensorboard: bool,
) -> None:
    """Run a sweep and show the comparison of what finished; an error at the end if some run did not."""
    shared = FirstStages(first_stages or out / ".first-stages")
    with stoppable(max_minutes) as stop:
        cells = sweep(
            plan,
            out,
            data_dir,
            device,
            acceleration,
            at_once,
            shared,
            lambda resolved, run: with_tensorboard(tensorboard, run.path, resolved, StageLines(resolved, console)),
            lambda outcome: show_end(outcome, console),
            stop,
            checkpoint_minutes,
        )
    errors = {name: error for cell in cells.values() for name, error in cell.errors.items()}
    if not errors or any(cell.reports for cell in cells.values()):
        show_comparison(sweep_comparison(cells, out), out / "comparison", console)
    console.print(f"Run directories: {out}", soft_wrap=True)
    if errors:
        raise failure(errors)


def show_end(outcome: Outcome, console: Console) -> None:
    """Where a run's page is; and why it failed, if it did."""
    (resolved, directory, _), error = outcome.job, outcome.error
    if isinstance(error, CcfaError):
        console.print(f"{directory.path.name}: {error}", soft_wrap=True)
    if error:
        show_partial_page(directory, resolved, error, console)
    else:
        console.print(report_line(directory.path, resolved), soft_wrap=True)


def failure(errors: Mapping[str, CcfaError]) -> CcfaError:
    """One error for runs that failed, with the exit code of the first."""
    told = "\n".join(f"  {name}: {error}" for name, error in errors.items())
    one = CcfaError(f"Not every run finished; repeat the command to continue those that failed:\n{told}")
    one.exit_code = next(iter(errors.values())).exit_code
    return one


def sweep_comparison(cells: Mapping[Key, Cell], out: Path) -> Comparison:
    """The runs of a sweep side by side; a combination that has no meaning is a note with its reason."""
    entries = [Entry(out / report.name, report) for cell in cells.values() for report in cell.reports.values()]
    refused = [f"{method} + CCFA: {cell.reason}" for (method, _), cell in cells.items() if cell.reason]
    if not entries:
        raise UsageError("Nothing was run. " + " ".join(refused))
    return compare(entries, refused)
