"""Figures as files: whole, the same bytes each time, their numbers beside them, nothing overlapping."""

import csv
import itertools
import re
import sys

import numpy as np
import pytest
from PIL import Image

from ccfa.errors import UsageError, installing
from ccfa.experiments import Run, analyses
from ccfa.reporting import figures
from ccfa.reporting.figures import FigureOptions, draw_curves, draw_plane, write_figure
from comparisons import store
from digit_runs import digit_run

SUFFIXES = ("png", "pdf", "csv", "txt")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    untrained = {"epochs": "0", "balanced_epochs": "0"}
    return digit_run(tmp_path_factory.mktemp("runs") / "ccfa", ccfa=True, options=untrained).path


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Writes run directories with nothing but a report; figures of them are not rendered."""
    monkeypatch.setattr(figures.Figure, "savefig", lambda *arguments, **options: None)
    return lambda *choices: [store(tmp_path / f"run-{at}", **choice) for at, choice in enumerate(choices)]


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["tsne", "cka", "accuracy"])
def test_files_are_whole_and_repeat(run, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(analyses, "tsne", lambda features, perplexity, seed: features[:, :2].astype(np.float64))
    options = FigureOptions(num_images=50)
    written = write_figure(kind, [run], None, options)
    assert written.paths == [run / "figures" / f"{kind}.{suffix}" for suffix in SUFFIXES]
    again = write_figure(kind, [run], tmp_path / "again", options)
    assert [path.read_bytes() for path in written.paths] == [path.read_bytes() for path in again.paths]
    png, pdf, _, caption = written.paths
    with Image.open(png) as image:
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert len(image.convert("RGB").getcolors(2**24)) > 20
    content = pdf.read_bytes()
    assert content.rstrip().endswith(b"%%EOF")
    assert b"/FontFile2" in content  # TrueType outlines are embedded
    assert b"/Type3" not in content
    assert "seed 0" in written.caption or kind != "tsne"
    assert caption.read_text() == written.caption + "\n"


def test_accuracies_are_means_and_spreads(made_up):
    paths = made_up({"value": 0.5}, {"value": 0.6, "seed": 1}, {"ccfa": True})
    written = write_figure("accuracy", paths)
    assert written.paths[0].parent == paths[0].parent / "figures"
    rows = table(written.paths[2])
    plain = [row for row in rows if row["name"] == "podnet"]
    values = 100 * np.array([Run(path).report().overall for path in paths[:2]])
    assert [(row["num_seen"], row["runs"]) for row in plain] == [("4", "2"), ("7", "2"), ("10", "2")]
    np.testing.assert_allclose([float(row["mean"]) for row in plain], values.mean(axis=0))
    np.testing.assert_allclose([float(row["spread"]) for row in plain], values.std(axis=0, ddof=1))
    assert {row["spread"] for row in rows if row["name"] == "podnet + CCFA"} == {""}


def test_cka_of_each_level(made_up, monkeypatch):
    paths = made_up({}, {"seed": 1}, {"ccfa": True})
    values = dict(zip(paths, np.random.default_rng(0).random((3, 2, 3)).tolist(), strict=True))
    monkeypatch.setattr(figures, "map_similarities", lambda run, *_: (values[run.path], 50))
    written = write_figure("cka", paths, None, FigureOptions(num_images=50, estimator="unbiased"))
    rows = table(written.paths[2])
    assert {(row["level"], row["name"], row["stage"]) for row in rows} == set(
        itertools.product("123", ("podnet", "podnet + CCFA"), "12")
    )
    for row in rows:
        stage, level = int(row["stage"]) - 1, int(row["level"]) - 1
        own = [values[path][stage][level] for path in (paths[:2] if row["name"] == "podnet" else paths[2:])]
        assert float(row["mean"]) == pytest.approx(np.mean(own), rel=1e-12)
        assert (row["images"], row["seed"], row["estimator"]) == ("50", "0", "unbiased")
    values[paths[2]] = [[0.5] * 4] * 2
    with pytest.raises(UsageError, match="levels"):
        write_figure("cka", paths)


def test_panel_for_each_scenario(made_up):
    choices = ({"sizes": (4, 3, 3)}, {"sizes": (4, 3, 3), "ccfa": True}, {"sizes": (5, 5)}, {"validation": 0.1})
    rows = table(write_figure("accuracy", made_up(*choices)).paths[2])
    first, second = "digits · B4-inc3", "digits · B0-inc5"
    assert {(row["panel"], row["scenario"]) for row in rows} == {("1", first), ("2", second), ("3", first)}
    assert len(rows) == 3 + 3 + 2 + 3


def require_room(figure):
    """No panel, with its title, labels and ticks, may lie over another, over the legend or beyond the page."""
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [legend.get_tightbbox() for legend in figure.legends]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    for box in boxes:
        assert box.x0 >= 0 <= box.y0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("options", ["", ", epochs=6, balanced_epochs=20, ccfa.step_size=0.125,0.25", ", " + 99 * "x"])
@pytest.mark.parametrize(("num_panels", "num_methods"), [(1, 1), (1, 10), (2, 7), (5, 7)])
def test_curves_do_not_overlap(num_panels, num_methods, options):
    rows = [
        {"name": f"method-{name}{' + CCFA' * ccfa}{options}", "x": x, "mean": 90 - 0.4 * x, "spread": 0.0}
        for name, ccfa, x in itertools.product(range(num_methods), (0, 1), range(50, 101, 5))
    ]
    panels = [(f"cifar100{options} · B50-inc{number}", rows) for number in range(num_panels)]
    figure = draw_curves(panels, "x", "Number of classes", "Accuracy (%)")
    require_room(figure)
    assert all(axes.get_window_extent().height > 60 for axes in figure.axes)  # points, of 72 an inch


def test_class_names_fit_and_are_no_formula(tmp_path):
    names = {number: f"aquarium fish {number}" for number in range(9)} | {9: r"$\undefined{$"}
    random = np.random.default_rng(0)
    points = [
        {"kind": kind, "class": number % 10, "x": random.normal(), "y": random.normal()}
        for number in range(100)
        for kind in analyses.KINDS
    ]
    require_room(draw_plane(points, names))
    require_room(draw_plane(points, {number: f"{name} of the northern seas" for number, name in names.items()}))
    assert write_figure("accuracy", [store(tmp_path / "run", data=r"a$\frac{$b")]).paths


def test_curves_differ_without_colour():
    looks = figures.curve_looks(["a", "a + CCFA", "a + CCFA, count=3", "b"])
    assert len({(look["marker"], look["markerfacecolor"]) for look in looks.values()}) == 4
    assert looks["a"]["color"] == looks["a + CCFA"]["color"]
    assert looks["a"]["linestyle"] != looks["a + CCFA"]["linestyle"]


def test_command_prints_caption_paths_and_notes(made_up, call, tmp_path):
    paths = [*made_up({}, {"finished": False, "seed": 1}), tmp_path / "empty"]
    paths[-1].mkdir()
    code, output, _ = call("figure", "accuracy", *paths, "--out", tmp_path / "out")
    assert code == 0
    assert (tmp_path / "out" / "accuracy.txt").read_text() in output
    assert all(str(tmp_path / "out" / f"accuracy.{suffix}") in output for suffix in SUFFIXES)
    assert all(str(path) in output for path in paths[1:])
    assert "replaced" not in output
    assert "replaced" in call("figure", "accuracy", *paths, "--out", tmp_path / "out")[1]
    (tmp_path / "file").touch()
    code, _, errors = call("figure", "accuracy", *paths, "--out", tmp_path / "file" / "out")
    assert code == 5
    assert str(tmp_path / "file" / "out") in errors


def test_a_setting_of_one_panel_names_it(made_up):
    paths = made_up({"options": {"epochs": "1"}}, {"options": {"epochs": "2"}, "sizes": (4, 4, 2)})
    caption = write_figure("accuracy", paths).caption
    for scenario, epochs in (("B4-inc3", 1), ("B0-inc4", 2)):
        assert re.search(rf"{scenario}: [^.]*epochs={epochs}\.", caption)


def test_missing_matplotlib_names_the_extra(made_up, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ccfa.reporting.figures")
    code, _, errors = call("figure", "accuracy", *made_up({}))
    assert code == 2
    assert installing("figures") in errors


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["accuracy"], 2, "run directory"),
        (["tsne", "run-0", "run-1"], 2, "one run"),
        (["cka", "run-0", "--images", "1"], 2, "--images 1"),
        (["tsne", "run-0", "--seed", str(2**32)], 2, "seed"),
        (["accuracy", "run-2"], 4, "ccfa resume"),
        (["cka", "run-0/report.json"], 4, "run directory"),
    ],
)
def test_wrong_requests_are_refused(made_up, call, words, code, named):
    made_up({}, {"seed": 1}, {"finished": False})
    found, _, errors = call("figure", *words)
    assert found == code
    assert named in errors
