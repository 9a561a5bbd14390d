"""A comparison as one grid of cells, and that grid as CSV, Markdown and LaTeX: the same figures in each."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ccfa.reporting.comparison import METRICS, SPREAD, Comparison, Line
from ccfa.reporting.sameness import Entry
from ccfa.reporting.values import Value

Cell = str | int | Value
SURROUNDINGS = ("device", "precision", "ccfa", "commit")


class Grid(NamedTuple):
    """Headings and rows; a cell is text, a count, or a value with its spread."""

    headings: list[str]
    rows: list[list[Cell]]

    def without(self, unwanted: Sequence[str]) -> "Grid":
        """The same without these columns."""
        kept = [place for place, heading in enumerate(self.headings) if heading not in unwanted]
        return Grid([self.headings[place] for place in kept], [[row[place] for place in kept] for row in self.rows])


def summary_grid(comparison: Comparison) -> Grid:
    """A row for each experiment; columns without any value are left out."""
    headings = [
        "method",
        "runs",
        "average",
        "gain",
        "pairs",
        "published",
        "last",
        "new",
        "old",
        "forgetting",
        "seconds",
    ]
    rows = [_summary_row(line) for line in comparison.lines]
    for name, cell in comparison.cited.items():
        blank: list[Cell] = ["" for _ in headings]
        rows.append([f"{name} (published only)", *blank[1:5], f"{cell:.2f}", *blank[6:]])
    optional = ("gain", "pairs", "published")
    empty = [name for name in optional if all(row[headings.index(name)] == "" for row in rows)]
    return Grid(headings, rows).without(empty)


def _summary_row(line: Line) -> list[Cell]:
    average, *others = (line.value(metric) for metric in METRICS)
    gain: list[Cell] = [line.gain.value, line.gain.num_pairs] if line.gain else ["", ""]
    published = "" if line.published is None else f"{line.published:.2f}"
    return [line.name, len(line.entries), average, *gain, published, *others, line.seconds]


def runs_grid(comparison: Comparison) -> Grid:
    """A row for each single run, unfinished ones included."""
    headings = ["run", "experiment", "order", "seed", "batch seed", "stages", *METRICS.values(), "seconds"]
    rows = [_run_row(entry, line.name) for line in comparison.lines for entry in line.entries]
    rows += [_run_row(entry, "unfinished, not averaged") for entry in comparison.unfinished]
    return Grid([*headings, "rule", *SURROUNDINGS], rows)


def _run_row(entry: Entry, name: str) -> list[Cell]:
    report = entry.report
    order, seed, batch_seed = entry.key
    order_name = entry.experiment.get("order") or "default"
    stages = f"{len(report.num_seen)} of {len(entry.resolved['stage_sizes'])}"
    values = [Value.of([100 * report.own_metrics[metric]]) for metric in METRICS]
    return [
        str(entry.path),
        name,
        order_name if len(order_name) <= 24 else ",".join(map(str, order[:4])) + ",...",
        seed,
        batch_seed,
        stages,
        *values,
        Value.of([report.seconds], decimals=0),
        report.own_rule,
        *(entry.surroundings[name] for name in SURROUNDINGS),
    ]


def to_csv(grid: Grid) -> str:
    """Comma-separated, mean and spread in columns of their own."""
    spread = {place for row in grid.rows for place, cell in enumerate(row) if isinstance(cell, Value) and cell.texts[1]}
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    pairs = [[name, f"{name} spread"] if place in spread else [name] for place, name in enumerate(grid.headings)]
    writer.writerow([name for pair in pairs for name in pair])
    for row in grid.rows:
        cells = [
            (cell.texts if isinstance(cell, Value) else (cell, ""))[: 2 if place in spread else 1]
            for place, cell in enumerate(row)
        ]
        writer.writerow([text for pair in cells for text in pair])
    return text.getvalue()


def to_markdown(grid: Grid, comparison: Comparison) -> str:
    """A table that GitHub and most editors show."""
    lines = [f"**{_markdown(comparison.title)}**, percent; {SPREAD}.", ""]
    lines.append(_piped(_markdown(heading) for heading in grid.headings))
    lines.append(_piped(["---", *("---:" for _ in grid.headings[1:])]))
    lines += [_piped(_markdown(str(cell)) for cell in row) for row in grid.rows]
    return "\n".join(lines) + "\n"


def to_latex(grid: Grid, comparison: Comparison) -> str:
    """A table for a paper, in the style of booktabs."""
    title = re.sub(r"\s+", " ", comparison.title)
    body = [" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in grid.rows]
    return "\n".join(
        [
            f"% {title}, percent; {SPREAD}.",
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * (len(grid.headings) - 1)}}}",
            r"\toprule",
            " & ".join(map(_latex, grid.headings)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Text that means itself: every sign that Markdown or HTML would read is escaped."""
    return re.sub(r"([\\`*_{}\[\]<>&|#~!])", r"\\\1", " ".join(text.split()))


def _latex_cell(cell: Cell) -> str:
    if not isinstance(cell, Value):
        return _latex(str(cell))
    mean, spread = cell.texts
    return f"${mean} \\pm {spread}$" if spread else f"${mean}$" if mean else "--"


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


def _latex(text: str) -> str:
    """Text that means itself in LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
