"""A comparison as one table, and that table for the terminal and as CSV, Markdown and LaTeX, with the same numbers."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ccfa.evaluation import DEFINITIONS
from ccfa.files import csv_text
from ccfa.reporting.comparison import COLUMNS, Comparison, Entry, Line
from ccfa.reporting.values import Value, percent

Cell = str | int | Value
SPREAD = "mean ± sample standard deviation (n - 1) over class orders and seeds; the column 'runs' is n"
GAIN = "average with CCFA minus without, in points, over pairs of runs of the same class order and seeds"
SECONDS = "wall-clock time of a run; a first stage reused from another run counts as zero"
PUBLISHED = "the average that the paper prints for this setting, not measured here"
SURROUNDINGS = ("device", "precision", "ccfa", "commit")
MAX_NAME = 28  # letters of a name before it is folded
BETWEEN = 3  # spaces between columns of the terminal's table


class Grid(NamedTuple):
    """Headings and rows; a cell is text, a count, or a value with its spread."""

    headings: list[str]
    rows: list[list[Cell]]

    @classmethod
    def of(cls, headings: Iterable[str], rows: Iterable[dict[str, Cell]]) -> "Grid":
        """The cells of these headings; a cell that a row lacks is empty."""
        headings = list(headings)
        return cls(headings, [[row.get(heading, "") for heading in headings] for row in rows])


def summary_grid(comparison: Comparison) -> Grid:
    """One row per experiment; gain and published values have columns only where there are any."""
    rows = [_summary_row(line) for line in comparison.lines]
    for name, value in comparison.cited.items():
        rows.append({"method": f"{name} (published only)", "published": f"{value:.2f}"})
    average, *others = COLUMNS.values()
    optional = [name for name in ("gain", "pairs", "published") if any(name in row for row in rows)]
    return Grid.of(["method", "runs", average, *optional, *others, "seconds"], rows)


def _summary_row(line: Line) -> dict[str, Cell]:
    row: dict[str, Cell] = {"method": line.name, "runs": len(line.entries), "seconds": line.seconds}
    row |= {heading: line.value(metric) for metric, heading in COLUMNS.items()}
    if line.gain:
        row |= {"gain": line.gain, "pairs": len(line.gains)}
    return row if line.published is None else {**row, "published": f"{line.published:.2f}"}


def runs_grid(comparison: Comparison) -> Grid:
    """One row per run, unfinished ones included."""
    rows = [_run_row(entry, line.name) for line in comparison.lines for entry in line.entries]
    rows += [_run_row(entry, "unfinished, not averaged") for entry in comparison.unfinished]
    facts = ["run", "experiment", "order", "seed", "batch seed", "stages"]
    return Grid.of([*facts, *COLUMNS.values(), "seconds", "rule", *SURROUNDINGS], rows)


def _run_row(entry: Entry, name: str) -> dict[str, Cell]:
    report, (order, seed, batch_seed) = entry.report, entry.key
    order_name = entry.experiment.get("order") or "default"
    return {
        "run": str(entry.path),
        "experiment": name,
        "order": order_name if len(order_name) <= 24 else ",".join(map(str, order[:4])) + ",...",
        "seed": seed,
        "batch seed": batch_seed,
        "stages": f"{len(report.num_seen)} of {len(entry.resolved['stage_sizes'])}",
        **{heading: percent(report.metrics[metric]) for metric, heading in COLUMNS.items()},
        "seconds": f"{report.seconds:.0f}",
        "rule": report.own.replace("_", " "),
        **{name: entry.surroundings[name] for name in SURROUNDINGS},
    }


def definitions(grid: Grid) -> list[str]:
    """What each column of numbers means."""
    meanings = {heading: DEFINITIONS[metric] for metric, heading in COLUMNS.items()}
    meanings |= {"gain": GAIN, "published": PUBLISHED, "seconds": SECONDS}
    return [f"± : {SPREAD}", *(f"{name}: {meanings[name]}" for name in grid.headings if name in meanings)]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, in parts where the terminal is narrow, the notes, and what the columns mean."""
    grid = summary_grid(comparison)
    console.print(f"percent · {comparison.title}", style="italic")
    for part in _parts(grid, console.width):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(part.headings[0], overflow="fold", max_width=MAX_NAME)  # a name cut short is no name
        for heading in part.headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in part.rows:
            table.add_row(*map(str, row))
        console.print(table)
        console.print()
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in definitions(grid):
        console.print(line, style="dim")


def _parts(grid: Grid, width: int) -> list[Grid]:
    """The grid in parts that fit into so many columns of text, each with the names in front."""
    columns = list(zip(grid.headings, *grid.rows, strict=True))
    sizes = [max(map(len, map(str, column))) + BETWEEN for column in columns]
    first = min(sizes[0], MAX_NAME + BETWEEN)
    parts: list[list[int]] = []
    used = width + 1
    for place, size in list(enumerate(sizes))[1:]:
        if used + size > width:
            parts.append([])
            used = first
        parts[-1].append(place)
        used += size
    return [
        Grid(
            [grid.headings[place] for place in (0, *part)],
            [[row[place] for place in (0, *part)] for row in grid.rows if any(row[place] != "" for place in part)],
        )
        for part in parts
    ]


def to_csv(grid: Grid) -> str:
    """Comma-separated, mean and spread in columns of their own."""
    spread = {place for row in grid.rows for place, cell in enumerate(row) if isinstance(cell, Value) and cell.texts[1]}
    rows: list[list[Cell]] = [[]]
    for place, heading in enumerate(grid.headings):
        rows[0] += [heading, f"{heading} spread"] if place in spread else [heading]
    for row in grid.rows:
        rows.append([])
        for place, cell in enumerate(row):
            pair = cell.texts if isinstance(cell, Value) else (cell, "")
            rows[-1] += pair if place in spread else pair[:1]
    return csv_text(rows)


def to_markdown(grid: Grid, title: str) -> str:
    """A table that GitHub and most editors show."""
    rows = [list(map(_markdown, grid.headings)), ["---", *["---:"] * (len(grid.headings) - 1)]]
    rows += [[_markdown(str(cell)) for cell in row] for row in grid.rows]
    lines = [f"**{_markdown(title)}**, percent; {SPREAD}.", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def to_latex(grid: Grid, title: str) -> str:
    """A table for a paper, in the style of booktabs."""
    rows: list[list[Cell]] = [[*grid.headings], *grid.rows]
    heading, *body = (" & ".join(map(_latex, row)) + r" \\" for row in rows)
    lines = [
        f"% {' '.join(title.split())}, percent; {SPREAD}.",
        r"% Needs \usepackage{booktabs}.",
        rf"\begin{{tabular}}{{l{'r' * (len(grid.headings) - 1)}}}",
        r"\toprule",
        heading,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Text in which every sign that Markdown or HTML would read is escaped."""
    return re.sub(r"([\\`*_{}\[\]<>&|#~!])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{sign: "\\" + sign for sign in "{}$&#%_"},
}


def _latex(cell: Cell) -> str:
    if isinstance(cell, Value):
        mean, spread = cell.texts
        return f"${mean} \\pm {spread}$" if spread else f"${mean}$" if mean else "--"
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(str(cell).split()))
