"""Filling the paper's tables: what is missing is run here, printed as commands, or submitted to a cluster."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ccfa.errors import CcfaError, DataError, ResourceError, Stopped, UsageError
from ccfa.experiments.cells import Cell
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.ledger import ORDERS, can_run, left_to_run, read_results, store_result
from ccfa.experiments.schedule import Outcome
from ccfa.experiments.stopping import stoppable
from ccfa.experiments.sweep import sweep
from ccfa.experiments.tables import cells
from ccfa.files import require_place
from ccfa.learning.acceleration import Acceleration
from ccfa.reporting.paper_tables import COST, LEGEND, overview_screen, selected, table_screen
from ccfa.reporting.reproduction import write_reproduction
from ccfa.reporting.showing import require_minutes
from ccfa.reporting.sweeps import StageLines, failure, headline
from ccfa.reporting.values import counted

SLURM_MINUTES = 240  # of a job, unless asked otherwise
MARGIN = 0.25  # minutes kept for saving what runs when the time is up


@dataclass(frozen=True)
class Wanted:
    """Which cells are asked for, and where everything is; no name means every table."""

    name: str = ""
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    orders: int = len(ORDERS)
    results: Path = Path("results")
    out: Path = Path("runs/tables")
    first_stages: Path | None = None
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if not self.name and (self.rows or self.columns):
            raise UsageError("Name a table whose rows or columns you want, for example: ccfa table main --rows podnet")
        if not 1 <= self.orders <= len(ORDERS):
            raise UsageError(f"--orders must be from 1 to {len(ORDERS)}, got {self.orders}.")

    def cells(self) -> list[Cell]:
        """The cells that are asked for."""
        if not self.name:
            return cells()
        table = selected(self.name, self.rows, self.columns)
        return [cell for row in table.rows.values() for cell in row if cell]

    def left(self) -> list[Experiment]:
        """The runs that are missing, the most valuable first."""
        return left_to_run(self.cells(), read_results(self.results), self.orders)

    def nothing_to_do(self) -> str:
        """Why no run is missing."""
        impossible = [cell for cell in self.cells() if not can_run(cell.setting)]
        without = f" {counted(len(impossible), 'cell')} cannot be run here, for want of the data or of the method."
        return "No run is missing." + (without if impossible else "")

    @property
    def shared_stages(self) -> Path:
        """Where first stages are kept for all runs."""
        return self.first_stages or self.out / ".first-stages"


def show_tables(wanted: Wanted, console: Console) -> None:
    """One table with our values beside the paper's, or an overview of all."""
    results = read_results(wanted.results)
    if not results:
        console.print(f"There are no reports of finished runs in {wanted.results}.", soft_wrap=True)
    if not wanted.name:
        console.print(overview_screen(results))
        console.print(COST, style="dim")
        return
    console.print(table_screen(selected(wanted.name, wanted.rows, wanted.columns), results))
    console.print(LEGEND, style="dim")


def write_pages(wanted: Wanted, console: Console) -> None:
    """Write REPRODUCTION.md and the README's table from the reports."""
    if wanted.name:
        raise UsageError("--write writes the page of all tables: leave the table's name out.")
    results = read_results(wanted.results)
    if not results:
        raise DataError(f"There are no reports of finished runs in {wanted.results}, so nothing is written.")
    for path in write_reproduction(results, Path.cwd()):
        console.print(f"Written: {path}", soft_wrap=True)


def commands(wanted: Wanted, speed: Sequence[str] = ()) -> list[list[str]]:
    """The missing runs, each as a command that continues its run and does nothing once the run is finished."""
    shared = ["--first-stages", str(wanted.shared_stages), "--results", str(wanted.results)]
    shared += ["--data-dir", str(wanted.data_dir)] if wanted.data_dir else []
    shared += speed

    def command(experiment: Experiment) -> list[str]:
        method, *options = experiment.arguments()
        return ["ccfa", "run", method, "--out", str(wanted.out / experiment.name), "--reuse", *shared, *options]

    return [command(experiment) for experiment in wanted.left()]


def print_plan(wanted: Wanted, speed: Sequence[str], console: Console) -> None:
    """One command per line, for any queue."""
    planned = commands(wanted, speed)
    if not planned:
        print(wanted.nothing_to_do(), file=sys.stderr)
    for words in planned:
        console.print(shlex.join(words), soft_wrap=True, markup=False, highlight=False)


def submit_jobs(
    wanted: Wanted,
    speed: Sequence[str],
    console: Console,
    partition: str | None,
    minutes: float | None,
    at_once: int,
    options: Mapping[str, str],
) -> None:
    """Submit what is missing to Slurm, one job per run."""
    from ccfa.experiments.cluster import submit

    folder = wanted.out / "slurm"
    limit = SLURM_MINUTES if minutes is None else round(minutes)
    jobs = submit(commands(wanted, speed), folder, partition=partition, minutes=limit, at_once=at_once, options=options)
    console.print(f"{counted(len(jobs), 'job')} submitted; their logs are in {folder}.", soft_wrap=True)
    for job in jobs:
        console.print(job.job_id)


def fill_shown(
    wanted: Wanted,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    at_once: int,
    checkpoint_minutes: float,
    minutes: float | None,
) -> None:
    """Run what is missing and keep the report of each run that finishes; an error at the end if some run failed."""
    require_minutes("--checkpoint-minutes", checkpoint_minutes)
    require_minutes("--minutes", minutes)
    require_place(wanted.results)
    experiments = wanted.left()
    if not experiments:
        console.print(wanted.nothing_to_do())
        return
    console.print(headline(len(experiments), at_once, device, wanted.out), soft_wrap=True)

    def on_end(outcome: Outcome) -> None:
        name = outcome.job.directory.path.name
        if outcome.report:
            average = outcome.report.own_metrics["average_incremental_accuracy"]
            try:
                path = store_result(outcome.report, wanted.results)
            except ResourceError as error:  # the other runs go on; repeating the command keeps this report
                console.print(f"{name}  average {average:.2%}, but the report is not kept: {error}", soft_wrap=True)
            else:
                console.print(f"{name}  average {average:.2%}  {path}", soft_wrap=True)
        elif isinstance(outcome.error, CcfaError):
            console.print(f"{name}: {outcome.error}", soft_wrap=True)

    limit = None if minutes is None else max(minutes - MARGIN, minutes / 2)
    with stoppable(limit) as stop:
        try:
            swept = sweep(
                experiments,
                wanted.out,
                wanted.data_dir,
                device,
                acceleration,
                at_once,
                FirstStages(wanted.shared_stages),
                lambda resolved, run: StageLines(resolved, console),
                on_end,
                stop,
                checkpoint_minutes,
            )
        except Stopped as stopped:
            left = counted(len(wanted.left()), "run")
            raise Stopped(f"{stopped} Still missing: {left}.", stopped.exit_code) from stopped
    for report in swept.reports.values():  # also of runs that finished before, but whose report was not kept
        store_result(report, wanted.results)
    if swept.errors:
        raise failure(swept.errors)
