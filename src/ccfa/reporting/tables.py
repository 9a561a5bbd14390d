"""Numbers as text, the same wherever they are shown, and tables of them as CSV, Markdown and LaTeX."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ccfa.evaluation import COSTS, METRICS, Numbers, Report, mean_and_spread
from ccfa.files import csv_text
from ccfa.settings import Experiment


class Value(NamedTuple):
    """The mean of several runs and their sample standard deviation; NaN where there is none.

    >>> str(Value.of([1.0, 3.0])), str(Value.of([1.0], sign="+")), str(Value.of([]))
    ('2.00 ± 1.41', '+1.00', '-')
    """

    mean: float
    spread: float
    decimals: int = 2
    sign: str = ""

    @classmethod
    def of(cls, values: Sequence[float], **form: Any) -> "Value":
        return cls(*mean_and_spread(values), **form)

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and spread as text, empty where there is none."""
        mean = "" if math.isnan(self.mean) else f"{self.mean:{self.sign}z.{self.decimals}f}"
        return mean, "" if math.isnan(self.spread) else f"{self.spread:.{self.decimals}f}"

    def __str__(self) -> str:
        mean, spread = self.texts
        return f"{mean} ± {spread}" if spread else mean or "-"


Cell = str | int | Value


class Table(NamedTuple):
    """Headings, and rows of as many cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def number(value: float, unit: str = "", decimals: int = 1) -> str:
    """Format a value, or a dash where there is none.

    >>> number(1234.56), number(math.nan), number(12.3456, " %", 2), number(-0.01)
    ('1,234.6', '-', '12.35 %', '0.0')
    """
    return f"{value:z,.{decimals}f}{unit}" if math.isfinite(value) else "-"


def percent(value: float | None, decimals: int = 2) -> str:
    """Format a fraction as a percentage, or a dash where there is none.

    >>> percent(0.12345), percent(0.5, 1), percent(None)
    ('12.35', '50.0', '-')
    """
    return "-" if value is None else number(100 * value, decimals=decimals)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun.

    >>> counted(1, "image"), counted(2, "class", "es")
    ('1 image', '2 classes')
    """
    return f"{number} {noun}{'' if number == 1 else plural}"


def sentence(text: str) -> str:
    """Return a note with a capital letter, as it stands among sentences."""
    return text[:1].upper() + text[1:]


def plain(name: str) -> str:
    return name.replace("_", " ")


def method_name(experiment: Experiment) -> str:
    """Return the method with what is plugged into it, such as "podnet + CCFA"."""
    return " + ".join(filter(None, [experiment.method, experiment.mix, "CCFA" if experiment.ccfa else None]))


def own_first(report: Report) -> dict[str, Numbers]:
    """Return the numbers of a report by each rule of prediction, the method's own rule first."""
    return {report.own: report.rules[report.own], **report.rules}


def metrics_table(report: Report, others: bool = False) -> Table:
    """List the metrics by every rule of prediction; with `others`, the other definitions of forgetting instead.

    Reports of earlier versions may lack some.
    """
    rules = own_first(report)
    headings = [f"by {plain(rule)}" + " (the method's rule)" * (rule == report.own) for rule in rules]
    shown = [name for name, metric in METRICS.items() if bool(metric.column) != others]
    rows = [[metric_name(name), *(percent(numbers.metrics.get(name)) for numbers in rules.values())] for name in shown]
    return Table(["percent", *headings], rows)


def metric_name(name: str) -> str:
    """Return a metric's name for people; the first of several definitions is the one that is meant.

    >>> metric_name("last_accuracy"), metric_name("forgetting_lee2019")
    ('last accuracy', 'forgetting (Lee et al. 2019)')
    """
    return METRICS[name].name or plain(name)


def cost_texts(report: Report) -> dict[str, str]:
    """Return what a run costs, as text by its name in `COSTS`; a dash where it is unknown."""
    return {name: number(value, decimals=COSTS[name].decimals) for name, value in report.costs.items()}


def to_csv(table: Table) -> str:
    """Format a table as comma-separated values, mean and spread in separate columns."""
    columns: list[list[Cell]] = []
    for heading, *cells in zip(table.headings, *table.rows, strict=True):
        pairs = [cell.texts if isinstance(cell, Value) else (cell, "") for cell in cells]
        columns.append([heading, *(mean for mean, _ in pairs)])
        if any(spread for _, spread in pairs):
            columns.append([f"{heading} spread", *(spread for _, spread in pairs)])
    return csv_text(zip(*columns, strict=True))


def to_markdown(table: Table, title: str, note: str) -> str:
    """Format a table in Markdown, under a line with its title and a note."""
    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    lines = [map(_markdown, table.headings), rule, *(map(_markdown, row) for row in table.rows)]
    return (
        "\n".join([f"**{_markdown(title)}**, {_markdown(note)}", "", *(f"| {' | '.join(line)} |" for line in lines)])
        + "\n"
    )


def to_latex(table: Table, title: str, note: str) -> str:
    """Format a table in the style of LaTeX's booktabs, under a comment with its title and a note."""
    heading, *body = (" & ".join(map(_latex, row)) + r" \\" for row in [table.headings, *table.rows])
    lines = [
        f"% {' '.join(f'{title}, {note}'.split())}",
        r"% Needs \usepackage{booktabs}.",
        rf"\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}",
        r"\toprule",
        heading,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _markdown(cell: Cell) -> str:
    """Escape every sign that Markdown or HTML would read."""
    return re.sub(r"([\\`*_{}\[\]<>&|#~!])", r"\\\1", " ".join(str(cell).split()))


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
