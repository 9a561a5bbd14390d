"""Figures as files: whole, the same bytes each time, their numbers beside them, nothing overlapping."""

import csv
import itertools
import sys

import numpy as np
import pytest
from PIL import Image

from ccfa.errors import ModelError, UsageError
from ccfa.experiments import Run, analyses
from ccfa.experiments.analyses import map_similarities
from ccfa.reporting import figures
from ccfa.reporting.figures import FigureOptions, draw_curves, draw_plane, write_figure
from comparisons import entry
from digit_runs import CPU, digit_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """PODNet with and without CCFA, the latter with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, ccfa, seed in (("plain-0", False, 0), ("plain-1", False, 1), ("ccfa-0", True, 0)):
        digit_run(folder / name, ccfa=ccfa, seed=seed)
    return folder


@pytest.fixture
def made_up(tmp_path):
    """Writes run directories of a report alone, with the choices given."""

    def written(*choices):
        paths = []
        for number, choice in enumerate(choices):
            paths.append(tmp_path / "made-up" / f"run-{number}")
            paths[-1].mkdir(parents=True)
            report = entry(paths[-1], **choice).report
            (paths[-1] / "report.json").write_text(report.to_json(), encoding="utf-8")
            Run(paths[-1]).write_json("config.json", report.config)
        return paths

    return written


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["tsne", "cka", "accuracy"])
def test_files_are_whole_and_repeat(runs, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(analyses, "tsne", lambda features, perplexity, seed: features[:, :2].astype(np.float64))
    run, options = runs / "ccfa-0", FigureOptions(num_images=50)
    written = write_figure(kind, [run], None, options)
    assert written.paths == [run / "figures" / f"{kind}.{suffix}" for suffix in ("png", "pdf", "csv", "txt")]
    again = write_figure(kind, [run], tmp_path / "again", options)
    for path, other in zip(written.paths, again.paths, strict=True):
        assert path.read_bytes() == other.read_bytes()
    png, pdf, _, caption = written.paths
    with Image.open(png) as image:
        image.load()
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20
    content = pdf.read_bytes()
    assert content.rstrip().endswith(b"%%EOF")
    assert b"/FontFile2" in content  # TrueType outlines are embedded
    assert b"/Type3" not in content
    assert "seed 0" in written.caption or kind != "tsne"
    assert caption.read_text() == written.caption + "\n"


def test_accuracies_are_means_and_spreads(runs):
    written = write_figure("accuracy", [runs / name for name in ("plain-0", "plain-1", "ccfa-0")])
    assert written.paths[0].parent == runs / "figures"
    rows = table(written.paths[2])
    plain = [row for row in rows if row["name"] == "podnet"]
    values = 100 * np.array([Run(runs / name).report().overall for name in ("plain-0", "plain-1")])
    assert [(row["num_seen"], row["runs"]) for row in plain] == [("4", "2"), ("7", "2"), ("10", "2")]
    np.testing.assert_allclose([float(row["mean"]) for row in plain], values.mean(axis=0))
    np.testing.assert_allclose([float(row["spread"]) for row in plain], values.std(axis=0, ddof=1))
    assert {row["spread"] for row in rows if row["name"] == "podnet + CCFA"} == {""}


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_cka_of_each_level(runs, tmp_path, estimator):
    names = ("plain-0", "plain-1", "ccfa-0")
    options = FigureOptions(num_images=50, estimator=estimator)
    written = write_figure("cka", [runs / name for name in names], tmp_path, options)
    rows = table(written.paths[2])
    values = {name: map_similarities(Run(runs / name), None, CPU, 50, 0, estimator)[0] for name in names}
    assert {(row["level"], row["name"], row["stage"]) for row in rows} == set(
        itertools.product("123", ("podnet", "podnet + CCFA"), "12")
    )
    for row in rows:
        stage, level = int(row["stage"]) - 1, int(row["level"]) - 1
        pair = [values[name][stage][level] for name in (names[:2] if row["name"] == "podnet" else names[2:])]
        assert float(row["mean"]) == pytest.approx(np.mean(pair), rel=1e-12)
        assert (row["images"], row["seed"], row["estimator"]) == ("50", "0", estimator)
    assert f"({estimator} estimator" in written.caption


def test_dollars_are_no_formula(made_up, tmp_path):
    written = write_figure("accuracy", made_up({"data": r"a$\frac{$b"}), tmp_path / "out")
    assert all(path.stat().st_size for path in written.paths)
    points = [{"kind": kind, "class": 0, "x": 0.0, "y": 1.0} for kind in analyses.KINDS]
    draw_plane(points, {0: r"$\undefined{$"}).draw_without_rendering()


def test_panel_for_each_scenario(made_up, tmp_path):
    choices = ({"sizes": (4, 3, 3)}, {"sizes": (4, 3, 3), "ccfa": True}, {"sizes": (5, 5)}, {"validation": 0.1})
    rows = table(write_figure("accuracy", made_up(*choices), tmp_path / "out").paths[2])
    panels = [(row["panel"], row["scenario"], row["runs"]) for row in rows]
    first, second = "digits · B4-inc3", "digits · B0-inc5"
    assert set(panels) == {("1", first, "1"), ("2", second, "1"), ("3", first, "1")}
    assert len(rows) == 3 + 3 + 2 + 3


def require_room(figure):
    """No panel, with its title, labels and ticks, may lie over another, over the legend or beyond the page."""
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [legend.get_window_extent() for legend in figure.legends]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert box.x0 >= 0 <= box.y0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


@pytest.mark.parametrize(("num_panels", "num_methods"), [(1, 1), (1, 7), (2, 1), (2, 7), (3, 7), (4, 1), (5, 7)])
def test_nothing_overlaps(num_panels, num_methods):
    rows = [
        {"name": f"method-{name}{' + CCFA' * ccfa}", "x": x, "mean": 90 - 0.4 * x, "spread": 0.0}
        for name, ccfa, x in itertools.product(range(num_methods), (0, 1), range(50, 101, 5))
    ]
    panels = [(f"cifar100 · B50-inc{number}", rows) for number in range(num_panels)]
    figure = draw_curves(panels, "x", "Number of classes", "Accuracy (%)")
    require_room(figure)
    assert all(axes.get_window_extent().height > 60 for axes in figure.axes)  # points, of 72 an inch


def test_long_class_names_fit():
    names = {number: f"aquarium fish {number}" for number in range(10)}
    random = np.random.default_rng(0)
    points = [
        {"kind": kind, "class": number % 10, "x": random.normal(), "y": random.normal()}
        for number in range(100)
        for kind in analyses.KINDS
    ]
    require_room(draw_plane(points, names))


def test_curves_differ_without_colour():
    looks = figures.curve_looks(["a", "a + CCFA", "a + CCFA, count=3", "b"])
    assert len({(look["marker"], look["markerfacecolor"]) for look in looks.values()}) == 4
    assert looks["a"]["color"] == looks["a + CCFA"]["color"]
    assert looks["a"]["linestyle"] != looks["a + CCFA"]["linestyle"]


def test_missing_matplotlib_names_the_extra(made_up, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ccfa.reporting.figures")
    code, _, errors = call("figure", "accuracy", *made_up({}))
    assert code == 2
    assert "ccfa[figures]" in errors


def test_command_prints_caption_and_paths(made_up, call, tmp_path):
    paths = made_up({}, {"ccfa": True})
    code, output, _ = call("figure", "accuracy", *paths, "--out", tmp_path / "out")
    assert code == 0
    assert (tmp_path / "out" / "accuracy.txt").read_text() in output
    assert all(str(tmp_path / "out" / f"accuracy.{suffix}") in output for suffix in ("png", "pdf", "csv", "txt"))
    (tmp_path / "file").touch()
    code, _, errors = call("figure", "accuracy", *paths, "--out", tmp_path / "file" / "out")
    assert code == 5
    assert str(tmp_path / "file" / "out") in errors


def test_what_is_left_out_is_noted(made_up, tmp_path):
    paths = made_up({}, {"finished": False, "seed": 1})
    (tmp_path / "empty").mkdir()
    written = write_figure("accuracy", [*paths, tmp_path / "empty"], tmp_path / "out")
    assert any(str(paths[1]) in note for note in written.notes)
    assert any("empty" in note for note in written.notes)
    assert {row["runs"] for row in table(written.paths[2])} == {"1"}


@pytest.mark.parametrize(
    ("kind", "names", "options", "word"),
    [
        ("accuracy", [], {}, "ccfa figure accuracy"),
        ("tsne", ["plain-0", "ccfa-0"], {}, "one run"),
        ("cka", ["plain-0"], {"num_images": 1}, "--images 1"),
        ("tsne", ["plain-0"], {"seed": 2**32}, "seed"),
    ],
)
def test_wrong_requests_are_refused(runs, kind, names, options, word):
    with pytest.raises(UsageError, match=word):
        write_figure(kind, [runs / name for name in names], None, FigureOptions(**options))


def test_figure_needs_finished_run_directories(runs, made_up):
    with pytest.raises(ModelError, match="run directory"):
        write_figure("cka", [runs / "plain-0" / "report.json"])
    with pytest.raises(ModelError, match="ccfa resume"):
        write_figure("accuracy", made_up({"finished": False}))


def test_different_depths_are_not_mixed(runs, monkeypatch):
    def depth(directory, *_):
        return [[0.5] * (3 if "ccfa" in directory.path.name else 4)] * 2, 10

    monkeypatch.setattr(figures, "map_similarities", depth)
    with pytest.raises(UsageError, match="levels"):
        write_figure("cka", [runs / "plain-0", runs / "ccfa-0"])
