"""Filling the paper's tables: what is missing is run here, printed as commands, or submitted to a cluster."""

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ccfa.errors import CcfaError, Stopped, UsageError
from ccfa.experiments.cells import Cell
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.ledger import ORDERS, Result, left_to_run, read_results, store_result
from ccfa.experiments.schedule import Outcome
from ccfa.experiments.stopping import stoppable
from ccfa.experiments.sweep import sweep
from ccfa.experiments.tables import cells
from ccfa.learning.acceleration import Acceleration
from ccfa.reporting.paper_tables import LEGEND, overview_screen, selected, table_screen
from ccfa.reporting.reproduction import write_reproduction
from ccfa.reporting.sweeps import StageLines, failure
from ccfa.reporting.values import counted

MARGIN = 0.25  # minutes kept for saving what runs when the time is up


@dataclass(frozen=True)
class Wanted:
    """Which cells are asked for, and where their reports are; no name means every table."""

    folder: Path
    name: str = ""
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    num_orders: int = len(ORDERS)

    def __post_init__(self) -> None:
        if not self.name and (self.rows or self.columns):
            raise UsageError("Name a table whose rows or columns you want, for example: ccfa table main --rows podnet")
        if not 1 <= self.num_orders <= len(ORDERS):
            raise UsageError(f"--orders must be from 1 to {len(ORDERS)}, got {self.num_orders}.")

    @cached_property
    def results(self) -> list[Result]:
        """The finished runs."""
        return read_results(self.folder)

    def cells(self) -> list[Cell]:
        """The cells that are asked for."""
        if not self.name:
            return cells()
        table = selected(self.name, self.rows, self.columns)
        return [cell for row in table.rows.values() for cell in row if cell]

    def left(self) -> list[Experiment]:
        """The runs that are missing, the most valuable first."""
        return left_to_run(self.cells(), self.results, self.num_orders)


def show_tables(wanted: Wanted, console: Console) -> None:
    """One table with our values beside the paper's, or an overview of all."""
    results = read_results(wanted.folder)
    if not results:
        console.print(f"There are no reports of finished runs in {wanted.folder}.", soft_wrap=True)
    if not wanted.name:
        console.print(overview_screen(results))
        return
    console.print(table_screen(selected(wanted.name, wanted.rows, wanted.columns), results))
    console.print(LEGEND, style="dim")


def write_pages(wanted: Wanted, console: Console) -> None:
    """Write REPRODUCTION.md and the README's table from the reports."""
    for path in write_reproduction(wanted.results, Path.cwd()):
        console.print(f"Written: {path}", soft_wrap=True)


def commands(wanted: Wanted, out: Path, data_dir: Path | None, first_stages: Path | None) -> list[list[str]]:
    """The runs that are missing, each as a command that goes on where it was and does nothing once it is done."""
    shared = ["--first-stages", str(first_stages or out / ".first-stages"), "--results", str(wanted.folder)]
    shared += ["--data-dir", str(data_dir)] if data_dir else []

    def command(experiment: Experiment) -> list[str]:
        method, *options = experiment.arguments()
        return ["ccfa", "run", method, "--out", str(out / experiment.name), "--reuse", *shared, *options]

    return [command(experiment) for experiment in wanted.left()]


def print_plan(wanted: Wanted, out: Path, data_dir: Path | None, first_stages: Path | None, console: Console) -> None:
    """One command a line, for any queue."""
    for words in commands(wanted, out, data_dir, first_stages):
        console.print(shlex.join(words), soft_wrap=True, markup=False, highlight=False)


def submit_jobs(
    wanted: Wanted, out: Path, data_dir: Path | None, first_stages: Path | None, console: Console, **jobs: Any
) -> None:
    """Submit what is missing to Slurm, one job a run."""
    from ccfa.experiments.cluster import submit

    folder = out / "slurm"
    submitted = submit(commands(wanted, out, data_dir, first_stages), folder, **jobs)
    console.print(f"{counted(len(submitted), 'job')} submitted; their logs are in {folder}.", soft_wrap=True)
    for job in submitted:
        console.print(str(job.job_id))


def fill_shown(
    wanted: Wanted,
    out: Path,
    data_dir: Path | None,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    *,
    at_once: int,
    first_stages: Path | None,
    checkpoint_minutes: float,
    minutes: float | None,
) -> None:
    """Run what is missing and keep the report of each run that finishes; an error at the end if some run failed."""
    experiments = wanted.left()
    console.print(f"{counted(len(experiments), 'run')} missing.")

    def on_end(outcome: Outcome) -> None:
        name = outcome.job.directory.path.name
        if outcome.report:
            path = store_result(outcome.report, wanted.folder)
            average = outcome.report.own_metrics["average_incremental_accuracy"]
            console.print(f"{name}  average {average:.2%}  {path}", soft_wrap=True)
        elif isinstance(outcome.error, CcfaError):
            console.print(f"{name}: {outcome.error}", soft_wrap=True)

    limit = None if minutes is None else max(minutes - MARGIN, minutes / 2)
    with stoppable(limit) as stop:
        try:
            swept = sweep(
                experiments,
                out,
                data_dir,
                device,
                acceleration,
                at_once,
                FirstStages(first_stages or out / ".first-stages"),
                lambda resolved, run: StageLines(resolved, console),
                on_end,
                stop,
                checkpoint_minutes,
            )
        except Stopped as stopped:
            left = counted(len(replace(wanted).left()), "run")  # what has finished since does not count
            raise Stopped(f"{stopped} {left} left.", stopped.exit_code) from stopped
    for report in swept.reports.values():
        store_result(report, wanted.folder)
    if swept.errors:
        raise failure(swept.errors)
