"""The paper's tables with our values beside them: on the terminal, in REPRODUCTION.md, and the runs they lack."""

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Screen

from ccfa.errors import DataError, Stopped, UsageError, unknown
from ccfa.experiments.cells import Cell, Setting, Table, experiment_for
from ccfa.experiments.ledger import (
    ORDERS,
    SEED,
    Result,
    can_run,
    gpu_minutes,
    left_to_run,
    measured,
    orders_left,
    read_results,
)
from ccfa.experiments.tables import TABLES, cell_for, cells
from ccfa.files import write_atomically
from ccfa.methods import METHODS
from ccfa.reporting.comparison import AVERAGE, paired
from ccfa.reporting.showing import sweep
from ccfa.reporting.values import Value, counted
from ccfa.settings import Experiment, Running, command_words

SLURM_MINUTES = 240  # of a job, unless asked otherwise
MARGIN = 0.25  # minutes
CLOSE = 0.6  # points: what counts as reproduced
COST = (
    "~: what the missing runs would cost, in minutes of one H200 that eight runs share; the first stage is counted "
    "with the runs without CCFA."
)
LEGEND = (
    "In each cell: the paper's value (*: re-run by its authors); ours, as mean ± standard deviation over class orders; "
    f"the difference and, in brackets, our number of runs. {COST} no data, no method: it cannot be run here."
)
EXPLANATIONS = (
    "`*`: re-run by the paper's authors. copied: taken by them from another paper.",
    "ours: mean ± standard deviation over class orders, each order's seeds averaged first; the link leads to the "
    "reports, whose `metrics` hold the values of single runs.",
    "The command repeats all runs of a cell. Add `--data-dir DIR` where CIFAR-100 is not in `$CCFA_DATA`, and "
    "`--results DIR` to keep the reports.",
    "GPU min: the runs' time divided by the number of runs at once. Fewer may have been at work at the end, so it is a "
    "lower bound.",
    COST,
    "†: the commit was recorded wrongly and corrected by hand (benchmarks/RESULTS.md).",
)
BEGIN, END = "<!-- main table: written by `ccfa table --write` -->", "<!-- end of the main table -->"


@dataclass(frozen=True)
class Wanted:
    """Which cells are asked for, and where everything is; no name means every table."""

    name: str = ""
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    orders: int = len(ORDERS)
    results: Path = Path("results")
    out: Path = Path("runs/tables")

    def __post_init__(self) -> None:
        if not self.name and (self.rows or self.columns):
            raise UsageError("Name a table whose rows or columns you want, for example: ccfa table main --rows podnet")
        if not 1 <= self.orders <= len(ORDERS):
            raise UsageError(f"--orders must be from 1 to {len(ORDERS)}, got {self.orders}.")

    def cells(self) -> list[Cell]:
        """The cells that are asked for."""
        return _printed(selected(self.name, self.rows, self.columns)) if self.name else cells()

    def measured(self) -> list[Result]:
        """The runs of the class orders that are asked for."""
        return [result for result in read_results(self.results) if result.order in ORDERS[: self.orders]]

    def left(self) -> list[Experiment]:
        """The runs that are missing, the most valuable first."""
        return left_to_run(self.cells(), self.measured(), self.orders)

    def nothing_to_do(self) -> str:
        """What to say where no run is missing."""
        impossible = counted(sum(not can_run(cell.setting) for cell in self.cells()), "cell")
        return f"No run is missing. {impossible} cannot be run here, for want of the data or of the method."


def selected(name: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Table:
    """A table of the paper, with only the rows of some labels or methods and only some columns.

    >>> list(selected("main", ["podnet"], ["5 tasks"]).rows)
    ['PODNet', 'PODNet*', 'PODNet* + CCFA']
    """
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table = TABLES[name]
    methods = {cell.setting.method for cell in _printed(table)}
    for row in rows:
        if row not in table.rows and row not in methods:
            raise unknown(f"row of {name}", row, [*table.rows, *sorted(methods)])
    for column in columns:
        if column not in table.columns:
            raise unknown(f"column of {name}", column, table.columns)
    places = [place for place, column in enumerate(table.columns) if not columns or column in columns]
    kept = {
        label: tuple(row[place] for place in places)
        for label, row in table.rows.items()
        if not rows or label in rows or any(cell and cell.setting.method in rows for cell in row)
    }
    return replace(table, columns=tuple(table.columns[place] for place in places), rows=kept)


def _printed(table: Table) -> list[Cell]:
    return [cell for row in table.rows.values() for cell in row if cell]


def show_tables(wanted: Wanted, console: Console) -> None:
    """Print one table with our values beside the paper's, or an overview of all."""
    results = wanted.measured()
    if not results:
        console.print(f"There are no reports of finished runs in {wanted.results}.", soft_wrap=True)
    if wanted.name:
        table = selected(wanted.name, wanted.rows, wanted.columns)
        console.print(table_screen(table, results, wanted.orders))
        console.print(LEGEND, style="dim")
    else:
        console.print(overview_screen(results, wanted.orders))
        console.print(COST, style="dim")


def table_screen(table: Table, results: Sequence[Result], num_orders: int = len(ORDERS)) -> Screen:
    """Each cell of a table: the paper's value and ours."""
    screen = Screen(title=f"{table.name}: {table.title}, percent", title_justify="left", show_lines=True)
    screen.add_column("", min_width=12)
    for column in table.columns:
        screen.add_column(column, justify="right")
    for label, row in table.rows.items():
        texts = ["\n".join(_screen_lines(cell, results, num_orders)) if cell else "-" for cell in row]
        copied = all(cell.source == "copied" for cell in row if cell)
        screen.add_row(f"{label}\n(copied)" if copied else label, *texts)
    return screen


def _screen_lines(cell: Cell, results: Sequence[Result], num_orders: int) -> Iterator[str]:
    ours = measured(cell, results)
    yield _paper(cell).replace(" ± ", "±")
    if ours:
        yield str(Value(ours.mean, ours.spread)).replace(" ± ", "±")
        yield f"{ours.mean - cell.value:+.2f} ({len(ours.results)})"
    if not cell.is_target:
        yield "misprint"
    elif can_run(cell.setting) and (minutes := _minutes_left(cell, results, num_orders)):
        yield f"~{minutes:.0f} min"
    elif not ours:
        yield "no data" if cell.setting.method in METHODS else "no method"


def overview_screen(results: Sequence[Result], num_orders: int = len(ORDERS)) -> Screen:
    """Every table: how many of its cells are measured, and what the others would cost."""
    screen = Screen("table", "what it is", "cells", "measured", "to fill", title="The paper's tables")
    for table in TABLES.values():
        done = sum(measured(cell, results) is not None for cell in _printed(table))
        one_each = {cell.setting: cell for cell in _printed(table) if can_run(cell.setting)}
        minutes = sum(_minutes_left(cell, results, num_orders) for cell in one_each.values())
        cost = f"~{minutes:,.0f} min" if one_each else "data not here"
        screen.add_row(table.name, table.title, str(len(_printed(table))), str(done), cost)
    return screen


def _paper(cell: Cell) -> str:
    return str(Value(cell.value, math.nan if cell.deviation is None else cell.deviation))


def _minutes_left(cell: Cell, results: Sequence[Result], num_orders: int = len(ORDERS)) -> float:
    """What the runs that a cell lacks would cost, in GPU minutes."""
    return gpu_minutes(cell.setting) * len(orders_left(cell, results, num_orders))


def write_pages(wanted: Wanted, console: Console) -> None:
    """Write REPRODUCTION.md and the README's table, in the current folder, from the reports."""
    if wanted.name or wanted.orders < len(ORDERS):
        raise UsageError("--write writes the page of all tables and class orders: leave the name and --orders out.")
    results = wanted.measured()
    if not results:
        raise DataError(f"There are no reports of finished runs in {wanted.results}, so nothing is written.")
    pages = {Path("REPRODUCTION.md"): reproduction(results)}
    if Path("README.md").exists() and BEGIN in (readme := Path("README.md").read_text()):
        pages[Path("README.md")] = with_main_table(readme, results)
    for path, text in pages.items():
        write_atomically(path, text)
        console.print(f"Written: {path.absolute()}", soft_wrap=True)


def with_main_table(readme: str, results: Sequence[Result]) -> str:
    """The README with its table written anew between the marks."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UsageError(f"README.md has no line {END!r} after {BEGIN!r}.")
    return f"{before}{BEGIN}\n{main_table(results)}\n{END}{after}"


def main_table(results: Sequence[Result]) -> str:
    """The rows of the main table that we have measured, in Markdown: the paper's value, then ours."""
    table = TABLES["supplement"]
    lines = [*_heading("CIFAR-100, percent", *table.columns)]
    for label, row in table.rows.items():
        if any(cell and measured(cell, results) for cell in row):
            lines.append(_line(label.replace("*", ""), *(_short(cell, results) for cell in row)))
    return "\n".join(lines)


def _short(cell: Cell | None, results: Sequence[Result]) -> str:
    if not cell:
        return ""
    ours = measured(cell, results)
    return f"{cell.value:.2f} / " + (f"{Value(ours.mean, ours.spread)} ({len(ours.results)})" if ours else "-")


def reproduction(results: Sequence[Result]) -> str:
    """Every cell of the paper, ours beside it, as a Markdown page."""
    distinct = cells()
    found = {cell: ours for cell in distinct if (ours := measured(cell, results))}
    targets = [cell for cell in found if cell.is_target]
    close = [cell for cell in targets if abs(found[cell].mean - cell.value) <= CLOSE]
    minutes = sum(result.gpu_minutes for result in results)
    lines = [
        "# Reproduction",
        "",
        "Every number of the paper beside ours. This page is written by `ccfa table --write` from the reports under "
        "`results/`; a test checks that it is current.",
        "",
        f"{len(found)} of {len(distinct)} different cells are measured (some are printed in several tables), by "
        f"{counted(len({cell.setting for cell in found}), 'setting')} and {counted(len(results), 'run')} of about "
        f"{minutes:.0f} GPU minutes in all. {len(close)} of them are within {CLOSE} points of the paper, "
        f"{len(targets) - len(close)} are not and are printed bold.",
        "",
        *(f"- {line}" for line in EXPLANATIONS),
        "",
        "The measured rows of methods with and without CCFA, the paper's value / ours (number of runs):",
        "",
        main_table(results),
        "",
        "## The gain of CCFA",
        "",
        "Paired: each run with CCFA minus the run without it of the same class order and seed.",
        "",
        *_heading("method", "scenario", "paper", "ours, paired", "pairs"),
        *_gains(results),
    ]
    columns = (
        "row",
        "column",
        "paper",
        "ours",
        "difference",
        "orders; seeds",
        "GPU min",
        "device",
        "commit",
        "command",
    )
    for table in TABLES.values():
        lines += ["", f"## {table.name}: {table.title}", "", *_heading(*columns)]
        for label, row in table.rows.items():
            for column, cell in zip(table.columns, row, strict=True):
                if cell:
                    lines.append(_line(label.replace("*", "\\*"), column, *_page_cell(cell, results)))
    return "\n".join(lines) + "\n"


def _gains(results: Sequence[Result]) -> Iterator[str]:
    """What CCFA adds, paired by class order and seed, beside the gain that the paper's own two runs have."""
    for plugged in cells():
        setting = plugged.setting
        alone = cell_for(replace(setting, ccfa=False, options=()))
        if not setting.ccfa or setting.options or not alone or alone.metric != plugged.metric:
            continue
        gains = paired(_averages(alone.setting, results), _averages(setting, results))
        if gains and plugged.is_target:
            memory = "" if setting.memory in (20, None) else f", {setting.memory} exemplars"
            name = f"{setting.method}{f' + {setting.mix}' if setting.mix else ''}{memory}"
            gain = f"{plugged.value - alone.value:+.2f}"
            yield _line(name, setting.scenario, gain, str(Value.of(gains, sign="+")), str(len(gains)))


def _averages(setting: Setting, results: Sequence[Result]) -> dict[tuple[str, int], float]:
    return {
        (result.order, result.experiment.seed): 100 * result.report.metrics[AVERAGE]
        for result in results
        if result.setting == setting
    }


def _page_cell(cell: Cell, results: Sequence[Result]) -> list[str]:
    ours, setting = measured(cell, results), cell.setting
    paper = _paper(cell) + (", copied" if cell.source == "copied" else "") + (f" ({cell.slip})" if cell.slip else "")
    command = f"`{cell_command(setting)}`" if can_run(setting) else ""
    if ours is None:
        cost = f"~{_minutes_left(cell, results):.0f}" if can_run(setting) else ""
        return [paper, "", "", "", cost, "", "", command]
    difference = f"{ours.mean - cell.value:+.2f}"
    if cell.is_target and abs(ours.mean - cell.value) > CLOSE:
        difference = f"**{difference}**"
    runs = ours.results
    folders = sorted({result.path.parent.name for result in runs})
    value = f"[{Value(ours.mean, ours.spread)}](results/{folders[0]})"
    if cell.metric == "forgetting_inclearn":  # the paper cites Lee et al., whose equation cannot give its numbers
        by_lee = measured(replace(cell, metric="forgetting_lee2019"), results)
        value += f" (by Lee et al. 2019: {Value(by_lee.mean, by_lee.spread)})" if by_lee else ""
    environments = [result.report.environment for result in runs]
    return [
        paper,
        value,
        difference,
        f"{_all(result.order for result in runs)}; {_all(result.experiment.seed for result in runs)}",
        f"{sum(result.gpu_minutes for result in runs):.1f}",
        _all(each.get("device") for each in environments),
        _all(f"{each.get('commit')}{'†' if 'commit_note' in each else ''}" for each in environments),
        command,
    ]


def _all(values: Iterator[object]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def cell_command(setting: Setting) -> str:
    """The command that runs a cell again, on the paper's three class orders."""
    method, *rest = experiment_for(setting, None, SEED).arguments()
    rest = [word for word in rest if word != "--ccfa"]
    place = rest.index("--seed")
    rest[place : place + 2] = []
    words = ["ccfa", "sweep", method, "--ccfa", "on" if setting.ccfa else "off", "--orders", *ORDERS]
    return shlex.join([*words, "--seeds", str(SEED), *rest])


def _heading(*texts: str) -> list[str]:
    return [_line(*texts), _line(*["---"] * len(texts))]


def _line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def commands(wanted: Wanted, running: Running) -> list[list[str]]:
    """Return the missing runs, each as a command that continues its run and does nothing once the run is finished."""
    running = replace(running, first_stages=running.first_stages or wanted.out / ".first-stages")
    shared = ["--results", str(wanted.results), *command_words(running, never=("at_once", "max_minutes"))]
    found = []
    for experiment in wanted.left():
        method, *options = experiment.arguments()
        place = str(wanted.out / experiment.name)
        found.append(["ccfa", "run", method, "--out", place, "--reuse", *shared, *options])
    return found


def print_plan(wanted: Wanted, running: Running, console: Console) -> None:
    """Print the missing runs as one command per line, for any queue."""
    planned = commands(wanted, running)
    if not planned:
        print(wanted.nothing_to_do(), file=sys.stderr)
    for words in planned:
        console.print(shlex.join(words), soft_wrap=True, markup=False, highlight=False)


def submit_jobs(
    wanted: Wanted, running: Running, console: Console, partition: str | None, options: Mapping[str, str]
) -> None:
    """Submit what is missing to Slurm, one job per run."""
    from ccfa.experiments.cluster import submit

    folder = wanted.out / "slurm"
    limit = SLURM_MINUTES if running.max_minutes is None else round(running.max_minutes)
    planned, at_once = commands(wanted, running), running.at_once
    jobs = submit(planned, folder, partition=partition, minutes=limit, at_once=at_once, options=options)
    console.print(f"{counted(len(jobs), 'job')} submitted; their logs are in {folder}.", soft_wrap=True)
    for job in jobs:
        console.print(job.job_id)


def fill_shown(wanted: Wanted, running: Running, console: Console) -> None:
    """Run what is missing and keep the report of each run that finishes; an error at the end if some run failed."""
    experiments = wanted.left()
    if not experiments:
        console.print(wanted.nothing_to_do())
        return
    minutes = running.max_minutes
    if minutes is not None:  # the runs at work when the time is up need some for being saved
        running = replace(running, max_minutes=max(minutes - MARGIN, minutes / 2))
    try:
        sweep(experiments, wanted.out, running, results=wanted.results, compared=False, console=console)
    except Stopped as stopped:
        left = counted(len(wanted.left()), "run")
        raise Stopped(f"{stopped} Still missing: {left}.", stopped.exit_code) from stopped
