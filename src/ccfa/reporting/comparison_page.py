"""A comparison as files: one self-contained page, and its table as CSV, Markdown and LaTeX."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import ccfa
from ccfa.errors import ResourceError, UsageError
from ccfa.evaluation import DEFINITIONS
from ccfa.files import write_atomically
from ccfa.reporting.charts import NUM_COLOURS, Figure, Series, Table, bar_chart, line_chart
from ccfa.reporting.comparison import COLUMNS, Comparison, Line
from ccfa.reporting.formats import (
    GAIN,
    SECONDS,
    SPREAD,
    Grid,
    definitions,
    print_comparison,
    runs_grid,
    summary_grid,
    to_csv,
    to_latex,
    to_markdown,
)
from ccfa.reporting.page import render
from ccfa.reporting.values import Value

PAGE = "index.html"
MAX_METHODS_IN_ONE_FIGURE = 4  # with and without CCFA that is as many lines as there are colours


def show_comparison(comparison: Comparison, folder: Path, console: Console) -> None:
    """Print a comparison, write it down, and say where."""
    try:
        print_comparison(comparison, console)
    finally:  # whoever reads what is printed may have left, as `head` does
        page = write_comparison(comparison, folder)
    console.print(f"Comparison: {page}; table.csv, table.md and table.tex lie beside it.", soft_wrap=True)


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write the page and the tables, each file whole or not at all; the page's path."""
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} is a run directory. Choose another folder for the comparison with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"Could not create {folder}: {error.strerror}. Choose another with --out.") from error
    grid = summary_grid(comparison)
    write_atomically(folder / "table.csv", to_csv(grid))
    write_atomically(folder / "table.md", to_markdown(grid, comparison.title))
    write_atomically(folder / "table.tex", to_latex(grid, comparison.title))
    write_atomically(folder / "runs.csv", to_csv(runs_grid(comparison)))
    write_atomically(folder / PAGE, page(comparison))
    return folder / PAGE


def page(comparison: Comparison) -> str:
    """The page as HTML."""
    entries = [entry for line in comparison.lines for entry in line.entries]
    return render(
        "comparison.html",
        comparison=comparison,
        lead=f"{len(comparison.lines)} experiments, {len(entries)} finished runs, {len(comparison.num_seen)} stages "
        f"up to {comparison.num_seen[-1]} classes.",
        spread=SPREAD,
        summary=_texts(summary_grid(comparison)),
        curves=_curves(comparison),
        bars=_bars(comparison),
        runs=_texts(runs_grid(comparison)),
        definitions=definitions(summary_grid(comparison)),
        footer=f"Written by ccfa {ccfa.__version__}.",
    )


def _texts(grid: Grid) -> Table:
    return grid.headings, [[str(cell) for cell in row] for row in grid.rows]


def _curves(comparison: Comparison) -> list[Figure]:
    """All lines in one figure, or a figure for each method where there are many."""
    lines = comparison.lines
    methods = list(dict.fromkeys(line.method for line in lines))
    if len(methods) <= MAX_METHODS_IN_ONE_FIGURE and len(lines) <= NUM_COLOURS:
        return [_curve(comparison, lines, "All methods")] if lines else []
    return [_curve(comparison, [line for line in lines if line.method == name], name) for name in methods]


def _curve(comparison: Comparison, lines: Sequence[Line], title: str) -> Figure:
    # With and without CCFA in one colour, where nothing else has to be told apart by it.
    methods = list(dict.fromkeys(line.method for line in lines))
    kinds = {(line.method, line.entries[0].ccfa) for line in lines}
    by_method = len(kinds) == len(lines) and len(methods) > 1
    both = len({ccfa for _, ccfa in kinds}) == 2
    series = []
    for place, line in enumerate(lines):
        means = [value.mean for value in line.curve]
        # One standard deviation to each side, within what an accuracy can be.
        low = [max(value.mean - value.spread, 0.0) for value in line.curve] if len(line.entries) > 1 else None
        high = [min(value.mean + value.spread, 100.0) for value in line.curve] if len(line.entries) > 1 else None
        colour = methods.index(line.method) if by_method else place
        dashed = both and not line.entries[0].ccfa
        series.append(Series(line.name, comparison.num_seen, means, low, high, colour, dashed))
    label = f"Accuracy on seen classes of {', '.join(line.name for line in lines)}"
    chart = line_chart(series, label, "classes seen", "accuracy, percent", decimals=2)
    rows = [[line.name, str(len(line.entries)), *map(str, line.curve)] for line in lines]
    return Figure(title, "", chart, (["method", "runs", *map(str, comparison.num_seen)], rows))


def _bars(comparison: Comparison) -> list[Figure]:
    """The metrics, and what CCFA adds, as bars."""
    figures = [
        _bar(heading.capitalize(), DEFINITIONS[metric], [(line, line.value(metric)) for line in comparison.lines])
        for metric, heading in COLUMNS.items()
        if metric != "last_accuracy"  # the figures above end with it
    ]
    gains = [(line, line.gain) for line in comparison.lines if line.gain]
    pairs = [[line.name, str(len(line.gains)), str(gain)] for line, gain in gains]
    figures.insert(1, _bar("Gain of CCFA", GAIN, gains)._replace(table=(["method", "pairs", "gain"], pairs)))
    figures.append(_bar("Time", f"seconds: {SECONDS}", [(line, line.seconds) for line in comparison.lines]))
    return [figure for figure in figures if figure.chart]


def _bar(title: str, meaning: str, values: Sequence[tuple[Line, Value]]) -> Figure:
    shown = [(line, value) for line, value in values if not math.isnan(value.mean)]
    bars = [(line.name, value.mean, value.spread) for line, value in shown]
    colours = [int(line.entries[0].ccfa) for line, _ in shown]
    decimals = shown[0][1].decimals if shown else 2
    chart = bar_chart(bars, f"{title}: {meaning}", "", decimals, colours)
    rows = [[line.name, str(len(line.entries)), str(value)] for line, value in values]
    return Figure(title, meaning, chart, (["method", "runs", title.lower()], rows))
