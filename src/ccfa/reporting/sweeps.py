"""Sweeps: a line for each stage of each run, and at the end their comparison."""

import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import CcfaError, UsageError
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.ledger import store_result
from ccfa.experiments.plan import Plan
from ccfa.experiments.schedule import Outcome
from ccfa.experiments.stopping import stoppable
from ccfa.experiments.sweep import Swept, sweep
from ccfa.learning import Progress
from ccfa.learning.acceleration import Acceleration, describe_device
from ccfa.reporting.comparison import Comparison, compare
from ccfa.reporting.comparison_page import show_comparison
from ccfa.reporting.page import report_line
from ccfa.reporting.sameness import Entry, hashed, setting
from ccfa.reporting.showing import show_partial_page
from ccfa.reporting.tensorboard import with_tensorboard
from ccfa.reporting.values import counted

SECONDS_BETWEEN_LINES = 60.0


class StageLines:
    """Prints one line for each stage of one run among several, and one per minute in between."""

    def __init__(self, resolved: Resolved, console: Console) -> None:
        self.name = resolved.experiment.name
        self.num_stages = len(resolved.stages)
        self.console = console
        self.last_shown = time.monotonic()

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Where the run stands, once a minute: several runs would talk at once."""
        if time.monotonic() - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = time.monotonic()
            self.console.print(f"{self.name}  {progress.place}", soft_wrap=True)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Nothing."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """The stage's accuracy."""
        self.last_shown = time.monotonic()
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
    results: Path | None,
) -> None:
    """Run a sweep and show the comparison of what finished; an error at the end if some run did not."""
    shared = FirstStages(first_stages or out / ".first-stages")
    experiments = plan.experiments()
    console.print(headline(len(experiments), at_once, device, out), soft_wrap=True)
    with stoppable(max_minutes) as stop:
        swept = sweep(
            experiments,
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
    if results:
        for report in swept.reports.values():
            store_result(report, results)
    if swept.reports or not swept.errors:
        for folder, comparison in comparisons(swept, out).items():
            show_comparison(comparison, folder, console)
    console.print(f"Run directories: {out}", soft_wrap=True)
    if swept.errors:
        raise failure(swept.errors)


def headline(num_runs: int, at_once: int, device: torch.device, out: Path) -> str:
    """What is about to happen, for whoever waits."""
    return f"{counted(num_runs, 'run')}, {at_once} at a time, on {describe_device(device)}, in {out}"


def show_end(outcome: Outcome, console: Console) -> None:
    """Where a run's page is; and why it failed, if it did."""
    (resolved, directory, *_), error = outcome.job, outcome.error
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


def comparisons(swept: Swept, out: Path) -> dict[Path, Comparison]:
    """The runs of a sweep side by side, by the folder for the page: one for all, or one for each scenario.

    A method that was not run with CCFA is a note with the reason.
    """
    refused = [f"{method} + CCFA: {reason}" for method, reason in swept.refused.items()]
    if not swept.reports:
        raise UsageError("Nothing was run. " + " ".join(refused))
    settings: dict[Hashable, list[Entry]] = {}
    for name, report in swept.reports.items():
        entry = Entry(out / name, report)
        settings.setdefault(hashed(setting(entry)), []).append(entry)
    compared = [compare(entries, refused) for entries in settings.values()]
    folder = out / "comparison"
    return {folder / one.scenario if len(compared) > 1 else folder: one for one in compared}
