"""The paper's tables on the terminal, ours beside it, with the cost of what is missing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table as Screen

from ccfa.errors import unknown
from ccfa.experiments.cells import Cell, Table
from ccfa.experiments.ledger import Measured, Result, can_run, gpu_minutes, measured, orders_left
from ccfa.experiments.tables import TABLES
from ccfa.methods import METHODS
from ccfa.reporting.values import Value

COST = (
    "~: what the missing runs would cost, in minutes of one H200 that eight runs share; the first stage is counted "
    "with the runs without CCFA."
)
LEGEND = (
    "In each cell: the paper's value (*: re-run by its authors); ours, as mean ± standard deviation over class orders; "
    f"the difference and, in brackets, our number of runs. {COST} no data, no method: it cannot be run here."
)


def selected(name: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Table:
    """A table of the paper, with only the rows of some labels or methods and only some columns.

    >>> list(selected("main", ["podnet"], ["5 tasks"]).rows)
    ['PODNet', 'PODNet*', 'PODNet* + CCFA']
    """
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table = TABLES[name]
    methods = {cell.setting.method for row in table.rows.values() for cell in row if cell}
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


def table_screen(table: Table, results: Sequence[Result]) -> Screen:
    """Paper against ours, a cell of the table each."""
    screen = Screen(title=f"{table.name}: {table.title}, percent", title_justify="left", show_lines=True)
    screen.add_column("", min_width=12)
    for column in table.columns:
        screen.add_column(column, justify="right")
    for label, row in table.rows.items():
        texts = ["\n".join(_lines(cell, results)) if cell else "-" for cell in row]
        copied = all(cell.source == "copied" for cell in row if cell)
        screen.add_row(f"{label}\n(copied)" if copied else label, *texts)
    return screen


def overview_screen(results: Sequence[Result]) -> Screen:
    """Every table: how many of its cells are measured, and what the others would cost."""
    screen = Screen("table", "what it is", "cells", "measured", "to fill", title="The paper's tables")
    for table in TABLES.values():
        printed = [cell for row in table.rows.values() for cell in row if cell]
        done = sum(measured(cell, results) is not None for cell in printed)
        one_each = {cell.setting: cell for cell in printed if can_run(cell.setting)}
        minutes = sum(minutes_left(cell, results) for cell in one_each.values())
        cost = f"~{minutes:,.0f} min" if one_each else "data not here"
        screen.add_row(table.name, table.title, str(len(printed)), str(done), cost)
    return screen


def _lines(cell: Cell, results: Sequence[Result]) -> Iterator[str]:
    ours = measured(cell, results)
    yield _narrow(paper_text(cell))
    if ours:
        yield _narrow(str(Value(ours.mean, ours.spread)))
        yield f"{ours.mean - cell.value:+.2f} ({len(ours.results)})"
    if not cell.is_target:
        yield "misprint"
    elif can_run(cell.setting) and (minutes := minutes_left(cell, results)):
        yield f"~{minutes:.0f} min"
    elif not ours:
        yield "no data" if cell.setting.method in METHODS else "no method"


def _narrow(text: str) -> str:
    return text.replace(" ± ", "±")


def ours_text(ours: Measured) -> str:
    """Our value of a cell, with its spread and the number of runs."""
    return f"{Value(ours.mean, ours.spread)} ({len(ours.results)})"


def paper_text(cell: Cell) -> str:
    """The paper's value of a cell, with its deviation where it has one."""
    return str(Value(cell.value, math.nan if cell.deviation is None else cell.deviation))


def minutes_left(cell: Cell, results: Sequence[Result]) -> float:
    """What the runs that a cell lacks would cost, in GPU minutes."""
    return gpu_minutes(cell.setting) * len(orders_left(cell, results))
