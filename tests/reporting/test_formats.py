import csv
import io
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from ccfa.reporting.comparison import compare
from ccfa.reporting.comparison_page import page
from ccfa.reporting.formats import Grid, runs_grid, summary_grid, to_csv, to_latex, to_markdown
from ccfa.reporting.tables import print_comparison
from ccfa.reporting.values import Value
from comparisons import ALONE, PLUGGED, entry, podnets

CIFAR = {"data": "cifar100", "sizes": (50, 10, 10, 10, 10, 10)}


@pytest.fixture(params=["three seeds", "one run each", "published", "one stage"])
def comparison(request):
    runs = {
        "three seeds": [*podnets(), entry("runs/u", 0.4, method="ucir")],
        "one run each": [entry("runs/a", 0.5), entry("runs/b", 0.4, ccfa=True)],
        "published": podnets(**CIFAR),
        "one stage": [entry("runs/a", math.nan, sizes=(10,))],
    }
    return compare(runs[request.param])


def from_csv(text):
    """Rows of (method, then numbers), spread beside mean as it stands."""
    return [list(filter(None, row)) for row in list(csv.reader(io.StringIO(text)))[1:]]


def numbers(cells):
    """All numbers of a row's cells in order, the name left out."""
    return [found for cell in cells[1:] for found in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]


def from_markdown(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def from_latex(text):
    body = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    return [[cell.strip() for cell in line.removesuffix(" \\\\").split(" & ")] for line in body.splitlines()]


class FirstTable(HTMLParser):
    """The cells of the first table of a page."""

    def __init__(self):
        super().__init__()
        self.rows, self.inside, self.done = [], False, False

    def handle_starttag(self, tag, attributes):
        self.inside = not self.done and tag in ("td", "th")
        if tag == "tr" and not self.done:
            self.rows.append([])
        if self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.done = self.done or tag == "table"
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def from_page(text):
    parser = FirstTable()
    parser.feed(text)
    return parser.rows[1:]


def from_terminal(comparison):
    file = io.StringIO()
    print_comparison(comparison, Console(file=file, width=400, markup=False, highlight=False))
    lines = file.getvalue().splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[3 : 3 + len(summary_grid(comparison).rows)]]


def test_every_format_holds_the_same_numbers(comparison):
    grid = summary_grid(comparison)
    expected = [(row[0], numbers([str(cell) for cell in row])) for row in grid.rows]
    read = {
        "csv": from_csv(to_csv(grid)),
        "markdown": from_markdown(to_markdown(grid, comparison)),
        "latex": from_latex(to_latex(grid, comparison)),
        "html": from_page(page(comparison)),
        "terminal": from_terminal(comparison),
    }
    for form, rows in read.items():
        assert [(row[0], numbers(row)) for row in rows] == expected, form


def test_the_table_has_a_column_for_each_thing_asked():
    grid = summary_grid(compare(podnets()))
    assert grid.headings == [
        "method",
        "runs",
        "average",
        "gain",
        "pairs",
        "last",
        "new",
        "old",
        "forgetting",
        "seconds",
    ]
    assert [row[:2] for row in grid.rows] == [["podnet", 3], ["podnet + CCFA", 3]]
    assert grid.rows[1][4] == 3
    assert str(grid.rows[0][-1]) == "10 ± 0"


def test_published_values_have_a_column_of_their_own():
    grid = summary_grid(compare(podnets(**CIFAR)))
    place = grid.headings.index("published")
    assert {row[0]: row[place] for row in grid.rows} == {
        "podnet": "64.62",
        "podnet + CCFA": "67.24",
        "Mnemonics (published only)": "63.34",
        "TPCIL (published only)": "65.34",
        "GeoDL (published only)": "65.34",
    }


def test_single_runs_remain_visible():
    rows = {row[0]: row for row in runs_grid(compare([*podnets(), entry("runs/x", seed=9, finished=False)])).rows}
    assert {name: str(row[6]) for name, row in rows.items() if name != "runs/x"} == {
        **{f"runs/p{seed}": f"{100 * value:.2f}" for seed, value in ALONE.items()},
        **{f"runs/c{seed}": f"{100 * value:.2f}" for seed, value in PLUGGED.items()},
    }
    assert rows["runs/x"][1:6] == ["unfinished, not averaged", "default", 9, 9, "2 of 3"]


def test_csv_keeps_mean_and_spread_apart():
    grid = Grid(
        ["method", "a", "b"], [["x, y", Value(1.0, 0.5), Value(2.0, math.nan)], ["z", "", Value(3.0, math.nan)]]
    )
    assert to_csv(grid) == 'method,a,a spread,b\r\n"x, y",1.00,0.50,2.00\r\nz,,,3.00\r\n'


HOSTILE = r"""<script>alert(1)</script> | & % $ # _ { } ~ ^ \ " ` * [x](y)"""


def test_hostile_names_mean_themselves():
    comparison = compare([entry("runs/a", method=HOSTILE, data=HOSTILE + "\n\\input{x}")])
    grid = summary_grid(comparison)
    assert next(csv.reader(io.StringIO(to_csv(grid).split("\r\n", 1)[1])))[0] == HOSTILE
    for line in (line for line in to_markdown(grid, comparison).splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(grid.headings) + 1
        assert not re.search(r"(?<!\\)[<`*]", line.replace("---", ""))
    latex = to_latex(grid, comparison).splitlines()
    assert all(line.startswith("%") for line in latex[:2]), "a line break does not end the comment"
    (row,) = (line for line in latex if line.startswith(r"\textless{}script"))
    assert len(re.findall(r"(?<!\\)&", row)) == len(grid.headings) - 1
    assert not re.search(r"(?<!\\)[%#_]", row)
    html = page(comparison)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_latex_is_balanced():
    text = to_latex(summary_grid(compare(podnets())), compare(podnets()))
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
    columns = re.search(r"\\begin\{tabular\}\{(lr*)\}", text)[1]
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count(" & ") + 1 for line in rows} == {len(columns)}
    assert re.findall(r"\\\w+rule", text) == ["\\toprule", "\\midrule", "\\bottomrule"]
    assert "$+1.52 \\pm " in text
