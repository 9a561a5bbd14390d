"""One table in five formats: the same numbers in each, and names that mean themselves."""

import csv
import io
import math
import os
import re
from html.parser import HTMLParser

import pytest

from ccfa.errors import ResourceError, UsageError
from ccfa.reporting.comparison import compare
from ccfa.reporting.comparison_page import page, write_comparison
from ccfa.reporting.formats import (
    Grid,
    definitions,
    print_comparison,
    runs_grid,
    summary_grid,
    to_csv,
    to_latex,
    to_markdown,
)
from ccfa.reporting.terminal import Output
from ccfa.reporting.values import Value
from comparisons import ALONE, PLUGGED, entry, podnets

CIFAR = {"data": "cifar100", "sizes": (50, 10, 10, 10, 10, 10)}
FILES = {"index.html", "table.csv", "table.md", "table.tex", "runs.csv"}


def numbers(cells):
    """All numbers of a row's cells in order, the name left out."""
    return [found for cell in cells[1:] for found in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]


def from_csv(text):
    return [list(filter(None, row)) for row in list(csv.reader(io.StringIO(text)))[1:]]


def from_markdown(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def from_latex(text):
    body = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    return [[cell.strip() for cell in line.removesuffix(" \\\\").split(" & ")] for line in body.splitlines()]


class Tags(HTMLParser):
    """Every tag with its attributes, and the cells of the first table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.inside, self.done = [], [], False, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
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


def printed(comparison, width=400):
    console = Output(file=io.StringIO(), width=width)
    print_comparison(comparison, console)
    return console.file.getvalue()


def from_terminal(text, num_rows):
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()[3 : 3 + num_rows]]


@pytest.mark.parametrize(
    "runs",
    [
        [*podnets(), entry("runs/u", 0.4, method="ucir")],
        [entry("runs/a", 0.5), entry("runs/b", 0.4, ccfa=True)],
        podnets(**CIFAR),
        [entry("runs/a", math.nan, sizes=(10,))],
    ],
)
def test_every_format_has_the_same_numbers(runs):
    comparison = compare(runs)
    grid = summary_grid(comparison)
    read = {
        "csv": from_csv(to_csv(grid)),
        "markdown": from_markdown(to_markdown(grid, comparison.title)),
        "latex": from_latex(to_latex(grid, comparison.title)),
        "html": Tags(page(comparison)).rows[1:],
        "terminal": from_terminal(printed(comparison), len(grid.rows)),
    }
    expected = [(row[0], numbers([str(cell) for cell in row])) for row in grid.rows]
    for form, rows in read.items():
        assert [(row[0], numbers(row)) for row in rows] == expected, form
    columns = set(grid.headings) - {"method", "runs", "pairs"}
    assert {line.split(":")[0].strip() for line in definitions(grid)} == columns | {"±"}


def test_published_values_have_a_column():
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
    grid = runs_grid(compare([*podnets(), entry("runs/x", seed=9, finished=False)]))
    rows = {row[0]: dict(zip(grid.headings, row, strict=True)) for row in grid.rows}
    averages = {name: row["average"] for name, row in rows.items() if name != "runs/x"}
    assert averages == {
        **{f"runs/p{seed}": f"{100 * value:.2f}" for seed, value in ALONE.items()},
        **{f"runs/c{seed}": f"{100 * value:.2f}" for seed, value in PLUGGED.items()},
    }
    assert (rows["runs/x"]["seed"], rows["runs/x"]["stages"]) == (9, "2 of 3")


def test_csv_keeps_mean_and_spread_apart():
    rows = [["x, y", Value(1.0, 0.5), Value(2.0, math.nan)], ["z", "", Value(-3.0, math.nan)]]
    text = to_csv(Grid(["method", "a", "b"], rows))
    assert text == 'method,a,a spread,b\r\n"x, y",1.00,0.50,2.00\r\nz,,,-3.00\r\n'


@pytest.mark.parametrize("name", ["=2+2", "-3+3", "+1+1", "@SUM(A1)", "=cmd|' /C calc'!A0"])
def test_no_cell_is_a_formula(name):
    comparison = compare([entry(name, method=name)])
    for grid in (summary_grid(comparison), runs_grid(comparison)):
        assert from_csv(to_csv(grid))[0][0] == f"'{name}"


HOSTILE = r"""<script>alert(1)</script> | & % $ # _ { } ~ ^ \ " ` * [x](y)"""


def test_hostile_names_mean_themselves():
    comparison = compare([entry("runs/a", method=HOSTILE, data=HOSTILE + "\n\\input{x}")])
    grid = summary_grid(comparison)
    assert next(csv.reader(io.StringIO(to_csv(grid).split("\r\n", 1)[1])))[0] == HOSTILE
    for line in (line for line in to_markdown(grid, comparison.title).splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(grid.headings) + 1
        assert not re.search(r"(?<!\\)[<`*]", line.replace("---", ""))
    latex = to_latex(grid, comparison.title).splitlines()
    assert all(line.startswith("%") for line in latex[:2]), "a line break does not end the comment"
    (row,) = (line for line in latex if line.startswith(r"\textless{}script"))
    assert len(re.findall(r"(?<!\\)&", row)) == len(grid.headings) - 1
    assert not re.search(r"(?<!\\)[%#_]", row)
    assert "<script>alert" not in page(comparison)


def test_escape_sequences_do_not_reach_the_terminal():
    hostile = {"method": "a\x1b]0;b\x07", "data": "\x9bc"}
    runs = [entry("runs/a", **hostile), entry("runs/b\x1b[2J", seed=1, finished=False, **hostile)]
    text = printed(compare(runs))
    assert "runs/b\\x1b[2J" in text
    assert not set("\x1b\x07\x9b\r") & set(text)


def test_latex_is_balanced():
    text = to_latex(summary_grid(compare(podnets())), "title")
    columns = re.search(r"\\begin\{tabular\}\{(lr*)\}", text)[1]
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count(" & ") + 1 for line in rows} == {len(columns)}
    assert re.findall(r"\\\w+rule", text) == ["\\toprule", "\\midrule", "\\bottomrule"]
    assert "$+1.52 \\pm " in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_number_is_cut(width):
    comparison = compare([*podnets(), entry("runs/x", 0.25, options={"epochs": "5", "a_long_option": "1.5"})])
    text = printed(comparison, width)
    table = text[: text.index("± :")]
    assert max(map(len, text.splitlines())) <= width
    for row in summary_grid(comparison).rows:
        assert all(str(cell) in table for cell in row[1:])
        folded = re.sub(r"\s+", "", table)
        assert all(part in folded for part in re.findall(r"\w+", str(row[0])))


def curves(text):
    """The labels of the figures of accuracy per stage."""
    labels = [attributes.get("aria-label", "") for tag, attributes in Tags(text).tags if tag == "svg"]
    return [label for label in labels if label.startswith("Accuracy on seen classes of ")]


def test_the_page_fetches_nothing():
    tags = Tags(page(compare(podnets()))).tags
    links = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "data")]
    assert {link for link in links if not link.startswith("data:")} == FILES - {"index.html"}
    assert "default-src 'none'" in next(a["content"] for tag, a in tags if a.get("http-equiv"))


def test_one_curve_a_method():
    text = page(compare([*podnets(), entry("runs/u", method="ucir")]))
    assert curves(text) == ["Accuracy on seen classes of podnet, podnet + CCFA, ucir"]
    methods = [f"method-{number}" for number in range(6)]
    many = page(compare([entry(f"runs/{name}", method=name) for name in methods]))
    assert curves(many) == [f"Accuracy on seen classes of {name}" for name in methods]


def test_every_figure_has_its_numbers():
    text = page(compare(podnets()))
    assert text.count("<figure") == text.count('<details class="data">') > 0
    assert all(str(value) in text for line in compare(podnets()).lines for value in line.curve)


def test_unfinished_runs_have_a_page():
    assert "runs/a" in page(compare([entry("runs/a", finished=False)]))


def test_all_files_are_written_and_replaced(tmp_path):
    for runs in ([entry("runs/a", 0.5)], [entry("runs/a", 0.75)]):
        assert write_comparison(compare(runs), tmp_path / "new" / "page") == tmp_path / "new" / "page" / "index.html"
    assert {path.name for path in (tmp_path / "new" / "page").iterdir()} == FILES
    for name in FILES:
        assert "75.00" in (tmp_path / "new" / "page" / name).read_text(encoding="utf-8")


def test_bad_places_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="run directory"):
        write_comparison(compare([entry()]), tmp_path)
    with pytest.raises(ResourceError, match="--out"):
        write_comparison(compare([entry()]), tmp_path / "config.json" / "page")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_full_disk_leaves_the_old_page(tmp_path, monkeypatch):
    write_comparison(compare([entry("a", 0.5)]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError):
        write_comparison(compare([entry("a", 0.75)]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
