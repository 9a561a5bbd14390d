"""One table in five formats: the same numbers in each, and names that mean themselves."""

import csv
import io
import math
import os
import re
from html import unescape

import pytest

from ccfa.errors import ResourceError, UsageError
from ccfa.reporting.comparison import compare_entries
from ccfa.reporting.comparison_page import (
    Grid,
    page,
    print_comparison,
    runs_grid,
    summary_grid,
    to_csv,
    to_latex,
    to_markdown,
    write_comparison,
)
from ccfa.reporting.terminal import Output
from ccfa.reporting.values import Value
from comparisons import ALONE, PLUGGED, entry, podnets, store

CIFAR = {"data": "cifar100", "sizes": (50, 10, 10, 10, 10, 10)}
FILES = {"index.html", "table.csv", "table.md", "table.tex", "runs.csv"}
HOSTILE = r"""<script>alert(1)</script> | & % $ # _ { } ~ ^ \ " ` * [x](y)"""


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


def from_html(text):
    rows = re.findall(r"<tr>(.*?)</tr>", text[: text.index("</table>")])
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>([^<]*)<", row)] for row in rows[1:]]


def printed(comparison, width=400):
    console = Output(file=io.StringIO(), width=width)
    print_comparison(comparison, console)
    return console.file.getvalue()


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
    comparison = compare_entries(runs)
    grid = summary_grid(comparison)
    lines = printed(comparison).splitlines()
    read = {
        "csv": from_csv(to_csv(grid)),
        "markdown": from_markdown(to_markdown(grid, comparison.title)),
        "latex": from_latex(to_latex(grid, comparison.title)),
        "html": from_html(page(comparison)),
        "terminal": [re.split(r" {2,}", line.strip()) for line in lines[3 : 3 + len(grid.rows)]],
    }
    expected = [(row[0], numbers(row)) for row in grid.texts[1]]
    for form, rows in read.items():
        assert [(row[0], numbers(row)) for row in rows] == expected, form
    columns = set(grid.headings) - {"method", "runs", "pairs"}
    assert {line.split(":")[0].strip() for line in grid.definitions} == columns | {"±"}


def test_published_values_have_a_column():
    headings, rows = summary_grid(compare_entries(podnets(**CIFAR))).texts
    published = {row[0]: row[headings.index("published")] for row in rows}
    assert (published["podnet + CCFA"], published["GeoDL (published only)"]) == ("67.24", "65.34")


def test_single_runs_remain_visible():
    headings, rows = runs_grid(compare_entries([*podnets(), entry("runs/x", seed=9, finished=False)])).texts
    shown = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert [shown[f"runs/p{seed}"]["average"] for seed in ALONE] == [f"{100 * value:.2f}" for value in ALONE.values()]
    assert (shown["runs/x"]["seed"], shown["runs/x"]["stages"]) == ("9", "2 of 3")


def test_csv_keeps_mean_and_spread_apart():
    rows = [["x, y", Value(1.0, 0.5), Value(2.0, math.nan)], ["z", "", Value(-3.0, math.nan)]]
    text = to_csv(Grid(["method", "a", "b"], rows))
    assert text == 'method,a,a spread,b\r\n"x, y",1.00,0.50,2.00\r\nz,,,-3.00\r\n'


def test_hostile_names_mean_themselves():
    comparison = compare_entries([entry("=2+2", method=HOSTILE, data=HOSTILE + "\n\\input{x}")])
    grid = summary_grid(comparison)
    assert from_csv(to_csv(grid))[0][0] == HOSTILE
    assert from_csv(to_csv(runs_grid(comparison)))[0][0] == "'=2+2", "no formula"
    for line in (line for line in to_markdown(grid, comparison.title).splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(grid.headings) + 1
        assert not re.search(r"(?<!\\)[<`*]", line.replace("---", ""))
    latex = to_latex(grid, comparison.title).splitlines()
    assert all(line.startswith("%") for line in latex[:2]), "a line break does not end the comment"
    (row,) = (line for line in latex if line.startswith(r"\textless{}script"))
    assert len(re.findall(r"(?<!\\)&", row)) == len(grid.headings) - 1
    assert not re.search(r"(?<!\\)[%#_]", row)
    assert "<script>alert" not in page(comparison)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_number_is_cut(width):
    comparison = compare_entries([*podnets(), entry("runs/x", 0.25, options={"epochs": "5", "a_long_option": "1.5"})])
    text = printed(comparison, width)
    table = text[: text.index("± :")]
    assert max(map(len, text.splitlines())) <= width
    for name, *cells in summary_grid(comparison).texts[1]:
        assert all(cell in table for cell in cells)
        assert all(part in re.sub(r"\s+", "", table) for part in re.findall(r"\w+", name))


@pytest.mark.parametrize(
    ("runs", "titles"),
    [
        ([*podnets(), entry("runs/u", method="ucir")], ["All methods"]),
        ([entry(f"runs/{at}", method=f"method-{at}") for at in range(6)], [f"method-{at}" for at in range(6)]),
        ([entry("runs/a", finished=False)], []),
    ],
)
def test_figures_have_their_numbers(runs, titles):
    comparison = compare_entries(runs)
    text = page(comparison)
    labels = re.findall(r'<svg[^>]*aria-label="([^"]*)"', text)
    assert [label.split(" over ")[0] for label in labels if " points: " in label] == titles
    assert text.count("<figure") == text.count('<details class="data">') == len(labels)
    assert all(str(value) in text for line in comparison.lines for value in line.curve)
    assert all(str(run.path) in text for run in comparison.entries)
    assert set(re.findall(r'(?:src|href)="([^":]*)"', text)) == FILES - {"index.html"}


def test_all_files_are_written_and_replaced(tmp_path, monkeypatch):
    for value in (0.5, 0.75):
        written = write_comparison(compare_entries([entry("runs/a", value)]), tmp_path / "new" / "page")
    assert written == tmp_path / "new" / "page" / "index.html"
    before = {path.name: path.read_bytes() for path in written.parent.iterdir()}
    assert before.keys() == FILES
    assert all(b"75.00" in content for content in before.values())

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError):
        write_comparison(compare_entries([entry("a", 0.25)]), written.parent)
    assert {path.name: path.read_bytes() for path in written.parent.iterdir()} == before


def test_run_directory_is_no_place(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="run directory"):
        write_comparison(compare_entries([entry()]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_command_prints_and_writes_beside_the_runs(call, tmp_path):
    runs = tmp_path / "runs"
    for seed, value in ALONE.items():
        store(runs / f"p{seed}", value, seed=seed)
        store(runs / f"c{seed}", PLUGGED[seed], seed=seed, ccfa=True)
    for _ in range(2):  # the second time its own page is among what the glob catches
        code, out, err = call("compare", *sorted(runs.iterdir()))
        assert (code, err) == (0, "")
        assert all(text in out for text in ("60.39 ± 1.83", "+1.52 ± 1.32", str(runs / "comparison" / "index.html")))
    assert {path.name for path in (runs / "comparison").iterdir()} == FILES
    assert call("compare", runs / "p0", "--out", "here")[0] == 0
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES


def test_command_refuses_two_scenarios(call, tmp_path):
    store(tmp_path / "a")
    store(tmp_path / "b", sizes=(5, 5))
    code, out, err = call("compare", "a", "b")
    assert (code, out) == (2, "")
    assert re.search(r"stage sizes  \[4, 3, 3\]  \[5, 5\]", err)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_table_is_printed_if_it_cannot_be_written(call, tmp_path):
    store(tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    code, out, err = call("compare", "a", "--out", "file/page")
    assert code == 5
    assert "50.00" in out
    assert "file/page" in err
