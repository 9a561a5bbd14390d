"""Results as tables for the terminal."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import describe_data_sets, order_names
from ccfa.evaluation import DEFINITIONS, Report
from ccfa.experiments.options import schema
from ccfa.experiments.presets import SCENARIOS
from ccfa.experiments.tables import PAPERS, TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING
from ccfa.models import BACKBONES
from ccfa.reporting.comparison import METRICS, SPREAD, TIME, Comparison
from ccfa.reporting.formats import Grid, summary_grid

MAX_NAME = 28  # letters of a name before it is folded
BETWEEN = 3  # spaces between columns


def metrics_table(report: Report, with_definitions: bool = True) -> Table:
    """Every metric of a run, by logits and by nearest mean, and what it means; earlier reports may lack some."""
    table = Table(title=report.name, title_justify="left")
    table.add_column("percent", no_wrap=True)
    for rule in ("logits", "nearest mean"):
        own = " (own rule)" if rule == report.own_rule else ""
        table.add_column(f"by {rule}{own}", justify="right")
    if with_definitions:
        table.add_column("definition")
    for name, definition in DEFINITIONS.items():
        nearest = report.metrics_by_nearest_mean
        by_mean = percent(nearest.get(name, math.nan)) if nearest else "-"
        meaning = [definition] if with_definitions else []
        table.add_row(name.replace("_", " "), percent(report.metrics.get(name, math.nan)), by_mean, *meaning)
    return table


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table, in parts where the terminal is narrow, and what should be known about it."""
    console.print(f"percent · {comparison.title}", style="italic")
    for part in _parts(summary_grid(comparison), console.width):
        console.print(_grid_table(part))
        console.print()
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in definitions(comparison):
        console.print(line, style="dim")


def definitions(comparison: Comparison) -> list[str]:
    """What each column of the comparison means."""
    lines = [f"{heading}: {DEFINITIONS[name]}" for name, heading in METRICS.items()]
    if any(line.gain for line in comparison.lines):
        lines.insert(1, "gain: average with CCFA minus without, over pairs of runs of the same class order and seeds")
    if any(line.published is not None for line in comparison.lines):
        lines.append("published: the average that the paper prints for this setting, not measured here")
    return [f"± : {SPREAD}", *lines, f"seconds: {TIME}"]


def _parts(grid: Grid, width: int) -> list[Grid]:
    """The grid in parts that fit into so many columns of text, each with the names in front."""
    sizes = [max(map(len, map(str, column))) + BETWEEN for column in zip(grid.headings, *grid.rows, strict=True)]
    first = min(sizes[0], MAX_NAME + BETWEEN)
    parts: list[list[str]] = [[]]
    used = first
    for heading, size in list(zip(grid.headings, sizes, strict=True))[1:]:
        if parts[-1] and used + size > width:
            parts.append([])
            used = first
        parts[-1].append(heading)
        used += size
    narrow = [grid.without([name for name in grid.headings[1:] if name not in part]) for part in parts]
    return [Grid(part.headings, [row for row in part.rows if any(cell != "" for cell in row[1:])]) for part in narrow]


def _grid_table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(grid.headings[0], overflow="fold", max_width=MAX_NAME)  # a name cut short is no name
    for heading in grid.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*map(str, row))
    return table


def percent(value: float) -> str:
    """A fraction as a percentage; a dash where the metric has no value."""
    return "-" if value != value else f"{100 * value:.2f}"


def catalogue(what: str) -> list[Table]:
    """What there is to choose from, of one kind."""
    if what == "methods":
        return [_methods()]
    if what == "options":
        factories: dict[str, Callable[..., Any]] = {**METHODS, "ccfa": CCFA, **MIXES}
        return [_options(name, function) for name, function in factories.items()]
    names: dict[str, Mapping[str, str]] = {
        "datasets": describe_data_sets(),
        "scenarios": SCENARIOS,
        "orders": order_names(),
        "backbones": {name: str(builder) for name, builder in BACKBONES.items()},
        "tables": {name: table.title for name, table in TABLES.items()},
    }
    table = Table(what, "what it is")
    for name, meaning in names[what].items():
        table.add_row(name, meaning)
    return [table]


def _methods() -> Table:
    table = Table("method", "what it is", "paper", "memory")
    for name, function in METHODS.items():
        method = function()
        kept = method.memory.quota(1)
        memory = "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"
        needed = ", needed" if method.needs_memory else ""
        table.add_row(name, _first_line(function), PAPERS.get(name, ""), memory + needed)
    for name in cited_only():
        table.add_row(name, "in tables with its published values only", "", "")
    return table


def _options(name: str, function: Callable[..., Any]) -> Table:
    table = Table("option", "type", "default", title=name, title_justify="left")
    parameters = inspect.signature(function).parameters
    for option, kind in schema(function).items():
        default = parameters[option].default if option in parameters else "as the method it builds on"
        table.add_row(option, inspect.formatannotation(kind), str(default))
    return table


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]
