import os
import re
from html.parser import HTMLParser

import pytest

from ccfa.errors import ResourceError, UsageError
from ccfa.reporting.comparison import compare
from ccfa.reporting.comparison_page import page, write_comparison
from comparisons import entry, podnets

FILES = {"index.html", "table.csv", "table.md", "table.tex", "runs.csv"}
METHODS = [f"method-{number}" for number in range(6)]


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def curves(text):
    """The labels of the figures of accuracy per stage."""
    tags = Tags(text).tags
    labels = [attributes.get("aria-label", "") for tag, attributes in tags if tag == "svg"]
    return [label for label in labels if label.startswith("Accuracy on seen classes of ")]


def test_the_page_fetches_nothing():
    tags = Tags(page(compare(podnets()))).tags
    links = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "data")]
    assert {link for link in links if not link.startswith("data:")} == FILES - {"index.html"}
    assert "default-src 'none'" in next(a["content"] for tag, a in tags if a.get("http-equiv"))


def test_one_line_a_method_with_a_band_over_runs():
    text = page(compare([*podnets(), entry("runs/u", method="ucir")]))
    assert curves(text) == ["Accuracy on seen classes of podnet, podnet + CCFA, ucir"]
    figure = text[text.index("Accuracy on seen classes of") :].split("</svg>")[0]
    assert figure.count("<polyline") == 3
    assert figure.count("<polygon") == 2, "a single run has no band"
    assert "classes seen" in figure


def test_many_methods_have_a_figure_each():
    assert curves(page(compare([entry(f"runs/{name}", method=name) for name in METHODS]))) == [
        f"Accuracy on seen classes of {name}" for name in METHODS
    ]


def test_every_figure_has_its_numbers_as_a_table():
    text = page(compare(podnets()))
    assert text.count("<figure") == text.count('<details class="data">') == 7
    for line in compare(podnets()).lines:
        assert all(str(value) in text for value in line.curve)


def test_bands_end_where_accuracies_do():
    runs = [entry("a", 0.99, seed=0), entry("b", 0.9, seed=1)]
    points = re.search(r'<polygon[^>]*points="([^"]*)"', page(compare(runs)))[1]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[0] == heights[1] < heights[2], "100 percent after stage 0, and no more than that after stage 1"


def test_without_a_finished_run_there_is_still_a_page():
    text = page(compare([entry("runs/a", finished=False)]))
    assert "No finished run yet." in text
    assert "runs/a is unfinished" in text


def test_all_files_are_written_and_replaced(tmp_path):
    for runs in ([entry("runs/a", 0.5)], [entry("runs/a", 0.75)]):
        assert write_comparison(compare(runs), tmp_path / "new" / "page") == tmp_path / "new" / "page" / "index.html"
    assert {path.name for path in (tmp_path / "new" / "page").iterdir()} == FILES
    for name in FILES:
        assert "75.00" in (tmp_path / "new" / "page" / name).read_text(encoding="utf-8")


def test_a_run_directory_is_no_place_for_a_comparison(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is a run directory"):
        write_comparison(compare([entry()]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_place_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResourceError, match="--out"):
        write_comparison(compare([entry()]), tmp_path / "file" / "page")


def test_a_full_disk_leaves_the_old_page(tmp_path, monkeypatch):
    write_comparison(compare([entry("a", 0.5)]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        write_comparison(compare([entry("a", 0.75)]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
