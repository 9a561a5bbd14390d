"""A comparison for people: one table on the terminal, as CSV, Markdown and LaTeX, and in a page with charts."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as Screen

import ccfa
from ccfa.errors import UsageError
from ccfa.evaluation import DEFINITIONS
from ccfa.files import csv_text, make_folder, write_atomically
from ccfa.reporting.charts import NUM_COLOURS, Curve, Figure, Table, bar_chart, line_figure
from ccfa.reporting.comparison import COLUMNS, SURROUNDINGS, Comparison, Entry, Line
from ccfa.reporting.page import render
from ccfa.reporting.values import Value, percent

Cell = str | int | Value
PAGE = "index.html"
SPREAD = "mean ± sample standard deviation (n - 1) over class orders and seeds; the column 'runs' is n"
MEANINGS = {heading: DEFINITIONS[metric] for metric, heading in COLUMNS.items()} | {
    "gain": "average with CCFA minus without, in points, over pairs of runs of the same class order and seeds",
    "published": "the average that the paper prints for this setting, not measured here",
    "seconds": "wall-clock time of a run; a first stage reused from another run counts as zero",
}
MAX_NAME = 28  # letters of a name before it is folded
BETWEEN = 3  # spaces between columns of the terminal's table
MAX_METHODS_IN_ONE_FIGURE = 4  # with and without CCFA that is as many lines as there are colours


class Grid(NamedTuple):
    """Headings and rows; a cell is text, a count, or a value with its spread."""

    headings: list[str]
    rows: list[list[Cell]]

    @classmethod
    def of(cls, headings: Iterable[str], rows: Iterable[dict[str, Cell]]) -> "Grid":
        """Take the cells of these headings; a cell that a row lacks is empty."""
        headings = list(headings)
        return cls(headings, [[row.get(heading, "") for heading in headings] for row in rows])

    @property
    def texts(self) -> Table:
        """The same with every cell as text."""
        return self.headings, [[str(cell) for cell in row] for row in self.rows]

    @property
    def definitions(self) -> list[str]:
        """What each column of numbers means."""
        return [f"± : {SPREAD}", *(f"{name}: {MEANINGS[name]}" for name in self.headings if name in MEANINGS)]


def summary_grid(comparison: Comparison) -> Grid:
    """Make one row per experiment; gain and published values have columns only where there are any."""
    rows: list[dict[str, Cell]] = []
    for line in comparison.lines:
        rows.append({"method": line.name, "runs": len(line.entries), "seconds": line.seconds})
        rows[-1] |= {heading: line.value(metric) for metric, heading in COLUMNS.items()}
        if line.gain:
            rows[-1] |= {"gain": line.gain, "pairs": len(line.gains)}
        if line.published is not None:
            rows[-1]["published"] = f"{line.published:.2f}"
    for name, value in comparison.cited.items():
        rows.append({"method": f"{name} (published only)", "published": f"{value:.2f}"})
    average, *others = COLUMNS.values()
    optional = [name for name in ("gain", "pairs", "published") if any(name in row for row in rows)]
    return Grid.of(["method", "runs", average, *optional, *others, "seconds"], rows)


def runs_grid(comparison: Comparison) -> Grid:
    """Make one row per run, unfinished ones included."""
    rows = [_run_row(entry, line.name) for line in comparison.lines for entry in line.entries]
    rows += [_run_row(entry, "unfinished, not averaged") for entry in comparison.unfinished]
    facts = ["run", "experiment", "order", "seed", "batch seed", "stages"]
    return Grid.of([*facts, *COLUMNS.values(), "seconds", "rule", *SURROUNDINGS], rows)


def _run_row(entry: Entry, name: str) -> dict[str, Cell]:
    report, (order, seed, batch_seed) = entry.report, entry.key
    order_name = entry.experiment.order or "default"
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
        **entry.surroundings,
    }


def show_comparison(comparison: Comparison, folder: Path, console: Console) -> None:
    """Print a comparison, write its files, and print where they are."""
    try:
        print_comparison(comparison, console)
    finally:  # the reader of the output, such as `head`, may have left
        page = write_comparison(comparison, folder)
    console.print(f"Comparison: {page}; table.csv, table.md and table.tex lie beside it.", soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, in parts where the terminal is narrow, the notes, and what the columns mean."""
    grid = summary_grid(comparison)
    console.print(f"percent · {comparison.title}", style="italic")
    for part in _parts(grid, console.width):
        table = Screen(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(grid.headings[0], overflow="fold", max_width=MAX_NAME)
        for place in part[1:]:
            table.add_column(grid.headings[place], justify="right", no_wrap=True)
        for row in grid.rows:
            if any(row[place] != "" for place in part[1:]):
                table.add_row(*(str(row[place]) for place in part))
        console.print(table)
        console.print()
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in grid.definitions:
        console.print(line, style="dim")


def _parts(grid: Grid, width: int) -> list[list[int]]:
    """Divide the columns so that each part, with the names in front, fits into so many letters."""
    columns = zip(grid.headings, *grid.texts[1], strict=True)
    names, *sizes = (max(map(len, column)) + BETWEEN for column in columns)
    parts: list[list[int]] = []
    used = width
    for place, size in enumerate(sizes, start=1):
        if used + size > width:
            parts.append([0])
            used = min(names, MAX_NAME + BETWEEN)
        parts[-1].append(place)
        used += size
    return parts


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write a comparison into a folder: the page index.html, table.csv, table.md, table.tex and runs.csv.

    Args:
        comparison: What `compare` returns.
        folder: The folder, which is made if it does not exist. Files of an earlier comparison are replaced.

    Returns:
        The path of the page.

    Raises:
        UsageError: if the folder is a run directory.
        ResourceError: if the folder or a file cannot be written.

    >>> import tempfile
    >>> from ccfa.reporting.comparison import compare
    >>> comparison = compare(sorted(Path("results/cifar100-B50-inc10").glob("*.json")))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_comparison(comparison, Path(folder))
    ...     sorted(path.name for path in page.parent.iterdir())
    ['index.html', 'runs.csv', 'table.csv', 'table.md', 'table.tex']
    """
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} is a run directory. Choose another folder for the comparison with --out.")
    make_folder(folder)
    grid = summary_grid(comparison)
    write_atomically(folder / "table.csv", to_csv(grid))
    write_atomically(folder / "table.md", to_markdown(grid, comparison.title))
    write_atomically(folder / "table.tex", to_latex(grid, comparison.title))
    write_atomically(folder / "runs.csv", to_csv(runs_grid(comparison)))
    write_atomically(folder / PAGE, page(comparison))
    return folder / PAGE


def to_csv(grid: Grid) -> str:
    """Format a grid as comma-separated values, mean and spread in separate columns."""
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
    """Format a grid as a Markdown table."""
    headings, rows = grid.texts
    lines = [["---", *["---:"] * (len(headings) - 1)], *([_markdown(cell) for cell in row] for row in rows)]
    table = [f"| {' | '.join(line)} |" for line in [list(map(_markdown, headings)), *lines]]
    return "\n".join([f"**{_markdown(title)}**, percent; {SPREAD}.", "", *table]) + "\n"


def to_latex(grid: Grid, title: str) -> str:
    """Format a grid as a LaTeX table in the style of booktabs."""
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
    """Escape every sign that Markdown or HTML would read."""
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


def page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    grid, lines, num_seen = summary_grid(comparison), comparison.lines, comparison.num_seen
    num_runs = sum(len(line.entries) for line in lines)
    return render(
        "comparison.html",
        comparison=comparison,
        lead=f"{len(lines)} experiments, {num_runs} finished runs, {len(num_seen)} stages, {num_seen[-1]} classes.",
        spread=SPREAD,
        summary=grid.texts,
        curves=_curves(comparison),
        bars=_bars(comparison),
        runs=runs_grid(comparison).texts,
        definitions=grid.definitions,
        footer=f"Written by ccfa {ccfa.__version__}.",
    )


def _curves(comparison: Comparison) -> list[Figure]:
    """Draw all lines in one figure, or a figure for each method where there are many."""
    methods: dict[str, list[Line]] = {}
    for line in comparison.lines:
        methods.setdefault(line.experiment.method, []).append(line)
    if len(methods) <= MAX_METHODS_IN_ONE_FIGURE and len(comparison.lines) <= NUM_COLOURS:
        methods = {"All methods": [*comparison.lines]} if methods else {}
    return [_curve(comparison.num_seen, lines, title) for title, lines in methods.items()]


def _curve(num_seen: list[int], lines: Sequence[Line], title: str) -> Figure:
    # With and without CCFA in one colour, where nothing else has to be told apart by it.
    methods = list(dict.fromkeys(line.experiment.method for line in lines))
    kinds = {(line.experiment.method, line.experiment.ccfa) for line in lines}
    by_method = len(kinds) == len(lines) and len(methods) > 1
    both = len({ccfa for _, ccfa in kinds}) == 2
    curves = []
    for place, line in enumerate(lines):
        banded = line.curve if len(line.entries) > 1 else []
        curves.append(
            Curve(
                line.name,
                [value.mean for value in line.curve],
                low=[max(value.mean - value.spread, 0.0) for value in banded],
                high=[min(value.mean + value.spread, 100.0) for value in banded],
                colour=methods.index(line.experiment.method) if by_method else place,
                dashed=both and not line.experiment.ccfa,
            )
        )
    rows = [[line.name, str(len(line.entries)), *map(str, line.curve)] for line in lines]
    figure = line_figure(title, "", "classes seen", num_seen, curves, "accuracy, percent", "", 2)
    return figure._replace(table=(["method", "runs", *map(str, num_seen)], rows))


def _bars(comparison: Comparison) -> list[Figure]:
    """Draw the metrics, and the gain of CCFA, as bars."""
    figures = [
        _bar(heading.capitalize(), MEANINGS[heading], [(line, line.value(metric)) for line in comparison.lines])
        for metric, heading in COLUMNS.items()
        if metric != "last_accuracy"  # the figures above end with it
    ]
    gains = [(line, line.gain) for line in comparison.lines if line.gain]
    pairs = [[line.name, str(len(line.gains)), str(gain)] for line, gain in gains]
    figures.insert(
        1, _bar("Gain of CCFA", MEANINGS["gain"], gains)._replace(table=(["method", "pairs", "gain"], pairs))
    )
    seconds = [(line, line.seconds) for line in comparison.lines]
    figures.append(_bar("Time", f"seconds: {MEANINGS['seconds']}", seconds))
    return [figure for figure in figures if figure.chart]


def _bar(title: str, meaning: str, values: Sequence[tuple[Line, Value]]) -> Figure:
    shown = [(line, value) for line, value in values if not math.isnan(value.mean)]
    bars = [(line.name, value.mean, value.spread) for line, value in shown]
    decimals = shown[0][1].decimals if shown else 2
    chart = bar_chart(bars, f"{title}: {meaning}", decimals, [int(line.experiment.ccfa) for line, _ in shown])
    rows = [[line.name, str(len(line.entries)), str(value)] for line, value in values]
    return Figure(title, meaning, chart, (["method", "runs", title.lower()], rows))
