"""The paper's tables with our values beside them: on the terminal, in REPRODUCTION.md, and the runs they lack."""

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path

from rich.console import Console
from rich.table import Table as Screen

from ccfa.errors import DataError, Stopped, UsageError, choose, unknown
from ccfa.evaluation.report import SIZES
from ccfa.experiments.tables import (
    AT_ONCE,
    CIFAR100,
    FURTHER,
    ORDERS,
    SEED,
    TABLES,
    Cell,
    Measured,
    PaperSetting,
    Result,
    Table,
    best_of_paper,
    can_run,
    cell_for,
    cells,
    experiment_for,
    gpu_minutes,
    left_to_run,
    measured,
    needs_imagenet,
    orders_for,
    orders_left,
    read_results,
)
from ccfa.files import write_atomically
from ccfa.reporting.comparison import AVERAGE, paired
from ccfa.reporting.inventory import methods_markdown
from ccfa.reporting.page import render
from ccfa.reporting.showing import require_ready, sweep
from ccfa.reporting.tables import Value, counted
from ccfa.settings import Experiment, Running, Wanted, command_words

SLURM_MINUTES = 240  # the time limit of a job by default
MARGIN = 0.25  # minutes
CLOSE = 0.6  # points: what counts as reproduced
GPU_MINUTES = "GPU minutes: a run's minutes divided by the number of runs that share the device"
ESTIMATE = (
    f"~: estimated for the missing runs, {AT_ONCE} at once on one H200; the first stage is counted with the runs "
    "without CCFA, and not with those that share PODNet's."
)
COST = f"{GPU_MINUTES}. {ESTIMATE}"
LEGEND = (
    "In each cell: the published value (*: re-run by the paper's authors); ours, as mean ± standard deviation over "
    f"class orders; the difference and, in brackets, our number of runs. {COST} needs ImageNet: see docs/imagenet.md. "
    "no method: it cannot be run here."
)
NEEDS_IMAGENET = "needs ImageNet"
MAIN, CATALOGUE = (
    (f"<!-- {name}: written by `ccfa table --write` -->", f"<!-- end of the {name} -->")
    for name in ("main table", "catalogue of methods")
)  # what stands before and after a part of a page that is generated


def wanted_table(wanted: Wanted) -> Table:
    """Return the named table with only its wanted rows and columns."""
    known_tables = TABLES | FURTHER
    table = choose("table", wanted.name, known_tables)
    rows = [*table.rows, *sorted({cell.setting.method for cell in table.cells})]
    for kind, names, known in (("row", wanted.rows, rows), ("column", wanted.columns, table.columns)):
        for name in names:
            if name not in known:
                raise unknown(f"{kind} of {wanted.name}", name, known)
    chosen = [not wanted.columns or column in wanted.columns for column in table.columns]
    kept = {
        label: tuple(compress(row, chosen))
        for label, row in table.rows.items()
        if not wanted.rows or label in wanted.rows or any(cell and cell.setting.method in wanted.rows for cell in row)
    }
    return replace(table, columns=tuple(compress(table.columns, chosen)), rows=kept)


def wanted_cells(wanted: Wanted) -> list[Cell]:
    return wanted_table(wanted).cells if wanted.name else cells()


def wanted_results(wanted: Wanted) -> list[Result]:
    """Return the finished runs of the wanted class orders."""
    if not 1 <= wanted.orders <= len(ORDERS):
        raise UsageError(f"--orders must be from 1 to {len(ORDERS)}, got {wanted.orders}.")
    results = read_results(wanted.results)
    return [one for one in results if one.setting and one.order in orders_for(one.setting)[: wanted.orders]]


def missing_runs(wanted: Wanted) -> list[Experiment]:
    """Return the runs that are missing, the most valuable first; those on ImageNet only if their table is named."""
    chosen = [cell for cell in wanted_cells(wanted) if wanted.name or not needs_imagenet(cell.setting)]
    return left_to_run(chosen, wanted_results(wanted), wanted.orders)


def _nothing_to_do(wanted: Wanted) -> str:
    impossible = counted(sum(not can_run(cell.setting) for cell in wanted_cells(wanted)), "cell")
    return f"No run is missing. {impossible} cannot be run here, because the method is not available."


def show_tables(wanted: Wanted, console: Console) -> None:
    """Print one table with our values beside the paper's, or an overview of all."""
    results = wanted_results(wanted)
    if not results:
        place = wanted.results.resolve()
        console.print(
            f"There are no reports of finished runs in {place}. Our own are in the repository.", soft_wrap=True
        )
    if wanted.name:
        table = wanted_table(wanted)
        console.print(_table_screen(table, results, wanted.orders))
        console.print(LEGEND, style="dim")
        for label in filter(table.notes.__contains__, table.rows):
            console.print(f"{label}, published: {table.notes[label]}.", style="dim", markup=False, soft_wrap=True)
    else:
        console.print(_overview_screen(results, wanted.orders))
        console.print(COST, style="dim")


def _table_screen(table: Table, results: Sequence[Result], num_orders: int) -> Screen:
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
        yield _ours(ours).replace(" ± ", "±")
        yield f"{_difference(ours.mean, cell.value)} ({len(ours.results)})".lstrip()
    if not cell.is_target:
        yield "misprint"
    elif not can_run(cell.setting):
        yield "no method"
    elif orders_left(cell, results, num_orders):
        yield _cost(cell, results, num_orders)


def _overview_screen(results: Sequence[Result], num_orders: int) -> Screen:
    screen = Screen("table", "what it is", "cells", "measured", "to fill", title="The paper's tables, and further ones")
    for table in (TABLES | FURTHER).values():
        done = sum(measured(cell, results) is not None for cell in table.cells)
        one_each = {cell.setting: cell for cell in table.cells if can_run(cell.setting)}
        if any(map(needs_imagenet, one_each)):
            cost = NEEDS_IMAGENET
        else:
            cost = f"~{sum(_minutes_left(cell, results, num_orders) for cell in one_each.values()):,.0f} GPU min"
        screen.add_row(table.name, table.title, str(len(table.cells)), str(done), cost)
    return screen


def _paper(cell: Cell) -> str:
    if math.isnan(cell.value):
        return "-"
    return str(Value(cell.value, math.nan if cell.deviation is None else cell.deviation))


def _ours(ours: Measured) -> str:
    return str(Value(ours.mean, ours.spread))


def _difference(ours: float, published: float) -> str:
    return "" if math.isnan(published) else f"{ours - published:+.2f}"


def _minutes_left(cell: Cell, results: Sequence[Result], num_orders: int = len(ORDERS)) -> float:
    return gpu_minutes(cell.setting) * len(orders_left(cell, results, num_orders))


def _cost(cell: Cell, results: Sequence[Result], num_orders: int = len(ORDERS)) -> str:
    if needs_imagenet(cell.setting):
        return NEEDS_IMAGENET
    return f"~{_minutes_left(cell, results, num_orders):.0f} GPU min"


def write_pages(wanted: Wanted, console: Console) -> None:
    """Write REPRODUCTION.md, and what is generated in the READMEs, in the current folder, from the reports."""
    if wanted.name or wanted.orders < len(ORDERS):
        raise UsageError("--write writes the page of all tables and class orders: leave the name and --orders out.")
    results = wanted_results(wanted)
    if not results:
        raise DataError(f"There are no reports of finished runs in {wanted.results}, so nothing is written.")
    pages = {Path("REPRODUCTION.md"): reproduction(results)}
    for path in (Path("README.md"), Path("docs/methods/README.md")):
        if path.exists() and (CATALOGUE[0] in (text := path.read_text()) or MAIN[0] in text):
            pages[path] = with_generated(text, results, path)
    for path, text in pages.items():
        write_atomically(path, text)
        console.print(f"Written: {path.absolute()}", soft_wrap=True)


def with_generated(page: str, results: Sequence[Result], path: Path = Path("README.md")) -> str:
    """Return a page with the main table and the catalogue of methods written anew, where it has marks for them."""
    methods = {result.experiment.method for result in results}
    for (begin, end), content in ((MAIN, _main_table(results)), (CATALOGUE, methods_markdown(methods, path.parent))):
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if found and not ended:
            raise UsageError(f"{path} has no line {end!r} after {begin!r}.")
        page = f"{before}{begin}\n{content}\n{end}{after}" if found else page
    return page


def _main_table(results: Sequence[Result]) -> str:
    """The rows of the main table that we have measured, in Markdown: the paper's value, then ours."""
    table = TABLES["supplement"]
    lines = [["CIFAR-100, percent", *table.columns], ["---"] * (1 + len(table.columns))]
    for label, row in table.rows.items():
        both = [(cell, measured(cell, results)) for cell in row if cell]
        texts = [f"{cell.value:.2f} / {f'{_ours(ours)} ({len(ours.results)})' if ours else '-'}" for cell, ours in both]
        if any(ours for _, ours in both):
            lines.append([label.replace("*", ""), *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reproduction(results: Sequence[Result]) -> str:
    """Return REPRODUCTION.md: every cell of the paper and ours beside it."""
    distinct = cells()
    found = {cell: ours for cell in distinct if (ours := measured(cell, results))}
    of_paper = {cell.setting for cell in distinct}
    results_of_paper = [result for result in results if result.setting in of_paper]
    targets = [cell for cell in found if cell.is_target]
    close = [cell for cell in targets if _is_close(cell, found[cell])]
    return render(
        "reproduction.md",
        num_cells=len(distinct),
        num_measured=len(found),
        settings=counted(len({cell.setting for cell in found}), "setting"),
        runs=counted(len(results_of_paper), "run"),
        minutes=round(sum(result.gpu_minutes for result in results_of_paper)),
        points=CLOSE,
        num_close=len(close),
        num_missed=len(targets) - len(close),
        gpu_minutes=GPU_MINUTES,
        estimate=ESTIMATE,
        main_table=_main_table(results),
        gains=list(_gains(results)),
        tables=[(table, list(_page_rows(table, results))) for table in TABLES.values()],
        best=[best_of_paper(CIFAR100, f"B50-inc{number}") for number in (1, 2, 5, 10)],
        further=[(table, list(_further_rows(table, results))) for table in FURTHER.values()],
    )


def _gains(results: Sequence[Result]) -> Iterator[list[str]]:
    """What CCFA adds, paired by class order and seed, beside the gain that the paper's own two runs have."""
    for plugged in cells():
        setting = plugged.setting
        alone = cell_for(replace(setting, ccfa=False))
        if not setting.ccfa or setting.options or plugged.metric != AVERAGE or not alone:
            continue
        before, after = ([one for one in results if one.setting == side] for side in (alone.setting, setting))
        if gains := paired(before, after):
            memory = "" if setting.memory in (20, None) else f", {setting.memory} exemplars"
            name = f"{setting.method}{f' + {setting.mix}' if setting.mix else ''}{memory}"
            gain = f"{plugged.value - alone.value:+.2f}"
            yield [name, setting.scenario, gain, str(Value.of(gains, sign="+")), str(len(gains))]


def _page_rows(table: Table, results: Sequence[Result]) -> Iterator[list[str]]:
    for label, row in table.rows.items():
        for column, cell in zip(table.columns, row, strict=True):
            if cell:
                yield [label.replace("*", "\\*"), column, *_page_cell(cell, results)]


def _further_rows(table: Table, results: Sequence[Result]) -> Iterator[list[str]]:
    """As `_page_rows`, with the distance to the paper's best number of the scenario beside that to the published."""
    for label, row in table.rows.items():
        for column, cell in zip(table.columns, row, strict=True):
            if not cell:
                continue
            ours = measured(cell, results)
            above = _difference(ours.mean, best_of_paper(cell.setting.data, cell.setting.scenario)) if ours else ""
            published, value, difference, *rest = _page_cell(cell, results)
            yield [label, column, published, value, difference.strip("*"), above, _kept(ours), *rest]


def _kept(ours: Measured | None) -> str:
    """The megabytes of a model: parameters, what else is remembered, and exemplars; nothing if a report lacks them."""
    totals = [sum(result.report.costs[size] for size in SIZES) for result in ours.results] if ours else [math.nan]
    return "" if any(map(math.isnan, totals)) else f"{max(totals):.1f}"


def _is_close(cell: Cell, ours: Measured) -> bool:
    return abs(ours.mean - cell.value) <= CLOSE


def _page_cell(cell: Cell, results: Sequence[Result]) -> list[str]:
    ours, setting = measured(cell, results), cell.setting
    paper = _paper(cell) + (", copied" if cell.source == "copied" else "") + (f" ({cell.slip})" if cell.slip else "")
    command = f"`{_cell_command(setting)}`" if can_run(setting) else ""
    if ours is None:
        cost = _cost(cell, results).removesuffix(" GPU min") if can_run(setting) else ""
        return [paper, "", "", "", cost, "", "", command]
    difference = _difference(ours.mean, cell.value)
    if difference and cell.is_target and not _is_close(cell, ours):
        difference = f"**{difference}**"
    runs = ours.results
    value = f"[{_ours(ours)}](results/{min(result.path.parent.name for result in runs)})"
    if cell.metric == "forgetting_inclearn":  # the paper cites Lee et al., whose equation cannot give its numbers
        by_lee = measured(replace(cell, metric="forgetting_lee2019"), results)
        value += f" (by Lee et al. 2019: {_ours(by_lee)})" if by_lee else ""
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


def _cell_command(setting: PaperSetting) -> str:
    """The command that runs a cell again, on the paper's class orders."""
    experiment = replace(experiment_for(setting, None, SEED), ccfa=False)
    method, data, name, _, _, *rest = experiment.arguments()  # without --seed
    orders = orders_for(setting)
    words = ["ccfa", "sweep", method, "--ccfa", "on" if setting.ccfa else "off", "--orders", *orders]
    sharing = ["--at-once", str(AT_ONCE)] if len(orders) > 1 else []
    return shlex.join([*words, "--seeds", str(SEED), data, name, *rest, *sharing])


def _commands(wanted: Wanted, running: Running) -> list[list[str]]:
    """Return the missing runs, each as a command that continues its run and does nothing once the run is finished."""
    running = replace(running, first_stages=running.first_stages or wanted.out / ".first-stages")
    shared = ["--results", str(wanted.results), *command_words(running, never=("at_once", "max_minutes"))]
    found = []
    for experiment in missing_runs(wanted):
        method, *options = experiment.arguments()
        place = str(wanted.out / experiment.name)
        found.append(["ccfa", "run", method, "--out", place, "--reuse", *shared, *options])
    return found


def print_plan(wanted: Wanted, running: Running, console: Console) -> None:
    """Print the missing runs as one command per line, for any queue."""
    planned = _commands(wanted, running)
    if not planned:
        print(_nothing_to_do(wanted), file=sys.stderr)
    for words in planned:
        console.print(shlex.join(words), soft_wrap=True, markup=False, highlight=False)


def submit_jobs(
    wanted: Wanted, running: Running, console: Console, partition: str | None, options: Mapping[str, str]
) -> None:
    """Submit what is missing to Slurm, one job per run."""
    from ccfa.experiments.cluster import submit

    folder = wanted.out / "slurm"
    limit = SLURM_MINUTES if running.max_minutes is None else round(running.max_minutes)
    planned, at_once = _commands(wanted, running), running.at_once
    jobs = submit(planned, folder, partition=partition, minutes=limit, at_once=at_once, options=options)
    console.print(f"{counted(len(jobs), 'job')} submitted; their logs are in {folder}.", soft_wrap=True)
    for job in jobs:
        console.print(job.job_id)


def fill_shown(wanted: Wanted, running: Running, console: Console) -> None:
    """Run what is missing and keep the report of each run that finishes; an error at the end if some run failed."""
    require_ready(running)
    experiments = missing_runs(wanted)
    if not experiments:
        console.print(_nothing_to_do(wanted))
        return
    minutes = running.max_minutes
    if minutes is not None:  # the runs at work when the time is up need some for being saved
        running = replace(running, max_minutes=max(minutes - MARGIN, minutes / 2))
    try:
        sweep(experiments, wanted.out, running, results=wanted.results, compared=False, console=console)
    except Stopped as stopped:
        left = counted(len(missing_runs(wanted)), "run")
        raise Stopped(f"{stopped} Still missing: {left}.", stopped.exit_code) from stopped
