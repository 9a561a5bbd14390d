"""Figures as files: whole, embedded fonts, the same bytes each time, numbers beside them, nothing overlapping."""

import csv
import itertools
import sys

import numpy as np
import pytest
from PIL import Image

from ccfa.errors import ModelError, UsageError
from ccfa.experiments import Run
from ccfa.experiments import feature_plane as planes
from ccfa.experiments.map_similarity import Similarities, map_similarities
from ccfa.reporting import paper_figures, plots
from ccfa.reporting.figures import Wish, write_figure
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


def fixed_plane(monkeypatch):
    monkeypatch.setattr(planes, "tsne", lambda features, perplexity, seed: features[:, :2].astype(np.float64))


@pytest.mark.parametrize("kind", ["tsne", "cka", "accuracy"])
def test_files_are_whole_repeat_themselves_and_lie_in_the_run(runs, kind, monkeypatch, tmp_path):
    fixed_plane(monkeypatch)
    run = runs / "ccfa-0"
    written = write_figure(kind, [run])
    assert written.paths == [run / "figures" / f"{kind}.{suffix}" for suffix in ("png", "pdf", "csv", "txt")]
    again = write_figure(kind, [run], tmp_path / "again")
    for path, other in zip(written.paths, again.paths, strict=True):
        assert path.read_bytes() == other.read_bytes()

    png, pdf, _, caption = written.paths
    with Image.open(png) as image:
        image.load()
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert image.width in (pytest.approx(300 * plots.COLUMN_WIDTH, abs=1), 300 * plots.TEXT_WIDTH)
        assert 0.25 < image.height / image.width < 1.2
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    table_of_objects = int(content.rsplit(b"startxref", 1)[1].split()[0])
    assert content[table_of_objects:].startswith(b"xref")
    assert b"/FontFile2" in content  # TrueType outlines are embedded
    assert b"/Type3" not in content
    assert b"CreationDate" not in content
    assert caption.read_text() == written.caption + "\n"


def test_accuracies_are_means_and_spreads_of_the_runs(runs):
    written = write_figure("accuracy", [runs / name for name in ("plain-0", "plain-1", "ccfa-0")])
    assert written.paths[0].parent == runs / "figures"
    rows = table(written.paths[2])
    reports = [Run(runs / name).report() for name in ("plain-0", "plain-1")]
    plain = [row for row in rows if row["name"] == "podnet"]
    values = 100 * np.array([report.overall for report in reports])
    assert [int(row["num_seen"]) for row in plain] == [4, 7, 10]
    assert {row["runs"] for row in plain} == {"2"}
    np.testing.assert_allclose([float(row["mean"]) for row in plain], values.mean(axis=0))
    np.testing.assert_allclose([float(row["spread"]) for row in plain], values.std(axis=0, ddof=1))
    single = [row for row in rows if row["name"] == "podnet + CCFA"]
    np.testing.assert_allclose(
        [float(row["mean"]) for row in single], 100 * np.array(Run(runs / "ccfa-0").report().overall)
    )
    assert {row["spread"] for row in single} == {""}


def test_cka_has_a_line_with_and_one_without_ccfa_for_each_level(runs):
    names = ("plain-0", "plain-1", "ccfa-0")
    rows = table(write_figure("cka", [runs / name for name in names], None, Wish(num_images=50)).paths[2])
    values = {name: map_similarities(Run(runs / name), None, CPU, 50, 0).values for name in names}
    assert {(row["level"], row["name"], row["stage"]) for row in rows} == set(
        itertools.product("123", ("podnet", "podnet + CCFA"), "12")
    )
    for row in rows:
        stage, level = int(row["stage"]) - 1, int(row["level"]) - 1
        pair = [values[name][stage][level] for name in (names[:2] if row["name"] == "podnet" else names[2:])]
        assert float(row["mean"]) == pytest.approx(np.mean(pair), rel=1e-12)
        assert (row["images"], row["seed"], row["estimator"]) == ("50", "0", "biased")


def test_cka_says_which_estimator_it_shows(runs, tmp_path):
    biased, unbiased = (
        write_figure("cka", [runs / "plain-0"], tmp_path / name, Wish(num_images=50, estimator=name))
        for name in ("biased", "unbiased")
    )
    assert "(biased estimator" in biased.caption
    assert "(unbiased estimator" in unbiased.caption
    assert {row["estimator"] for row in table(unbiased.paths[2])} == {"unbiased"}
    for one, other in zip(table(biased.paths[2]), table(unbiased.paths[2]), strict=True):
        assert float(other["mean"]) < float(one["mean"])


def test_the_numbers_of_a_t_sne_say_what_it_depends_on(runs, tmp_path):
    written = write_figure("tsne", [runs / "plain-0"], tmp_path, Wish(num_images=25, seed=3))
    rows = table(written.paths[2])
    assert {row["seed"] for row in rows} == {"3"}
    assert {float(row["perplexity"]) for row in rows} == {round((len(rows) - 1) / 3, 4)}
    assert [row["kind"] for row in rows] == sorted((row["kind"] for row in rows), key=planes.KINDS.index)
    assert sum(row["kind"] == "training" for row in rows) == 25
    assert "seed 3" in written.caption


def test_a_panel_for_each_scenario(made_up, tmp_path):
    paths = made_up({"sizes": (4, 3, 3)}, {"sizes": (4, 3, 3), "ccfa": True}, {"sizes": (5, 1, 1, 1, 1, 1)})
    written = write_figure("accuracy", paths, tmp_path / "out")
    rows = table(written.paths[2])
    assert {(row["panel"], row["scenario"]) for row in rows} == {("1", "digits · B4-inc3"), ("2", "digits · B5-inc1")}
    assert len(rows) == 3 + 3 + 6


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


@pytest.mark.parametrize("num_panels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_methods", [1, 7])
def test_nothing_lies_over_another_or_beyond_the_page(num_panels, num_methods):
    stages = np.arange(50, 101, 5)
    curves = [
        plots.Curve(f"method-{name}{' + CCFA' * ccfa}", f"{name}", bool(ccfa), stages, 90 - 0.4 * stages, 0 * stages)
        for name, ccfa in itertools.product(range(num_methods), (0, 1))
    ]
    panels = [plots.Panel(f"cifar100 · B50-inc{number}", curves) for number in range(num_panels)]
    figure = plots.draw_curves(panels, "Number of classes", "Accuracy (%)")
    require_room(figure)
    labelled = [axes for axes in figure.axes if axes.get_xlabel()]
    assert len(labelled) == min(num_panels, 2 if num_panels == 4 else 3)  # whatever has no panel below
    assert all(axes.get_window_extent().height > 60 for axes in figure.axes)  # points, of 72 an inch


def test_ten_long_class_names_stay_on_the_page():
    names = {number: f"aquarium fish {number}" for number in range(10)}
    points = np.random.default_rng(0).normal(size=(300, 2))
    clouds = [plots.Cloud(title, points, np.arange(300) % 10) for title in paper_figures.TITLES.values()]
    require_room(plots.draw_clouds(clouds, names))


def test_curves_are_told_apart_without_colour():
    curves = [plots.Curve(name, name, ccfa, [0], [0], [0]) for name, ccfa in (("a", False), ("b", True), ("c", False))]
    looks = plots._looks(curves)
    assert len({look["marker"] for look in looks.values()}) == 3
    assert looks["a"]["markerfacecolor"] == "white" != looks["b"]["markerfacecolor"]
    assert looks["a"]["linestyle"] != looks["b"]["linestyle"]


def test_says_what_to_install_where_matplotlib_is_missing(runs, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("plots", "paper_figures"):
        monkeypatch.delitem(sys.modules, f"ccfa.reporting.{name}")
        monkeypatch.delattr(f"ccfa.reporting.{name}")
    code, _, errors = call("figure", "accuracy", runs / "ccfa-0")
    assert code == 2
    assert "ccfa[figures]" in errors


def test_the_command_prints_caption_and_paths(runs, call, tmp_path):
    code, output, _ = call("figure", "accuracy", runs / "plain-0", runs / "ccfa-0", "--out", tmp_path / "out")
    assert code == 0
    assert "Accuracy on the test images" in output
    assert all(str(tmp_path / "out" / f"accuracy.{suffix}") in output for suffix in ("png", "pdf", "csv", "txt"))


def test_what_is_left_out_is_said(made_up, tmp_path):
    paths = made_up({}, {"finished": False, "seed": 1})
    (tmp_path / "empty").mkdir()
    written = write_figure("accuracy", [*paths, tmp_path / "empty"], tmp_path / "out")
    assert any("unfinished" in note for note in written.notes)
    assert any("no runs" in note for note in written.notes)
    assert {row["runs"] for row in table(written.paths[2])} == {"1"}


def test_panels_of_one_title_are_not_mixed_up(made_up, tmp_path):
    rows = table(write_figure("accuracy", made_up({}, {"value": 0.9, "validation": 0.1}), tmp_path / "out").paths[2])
    assert [(row["panel"], row["runs"]) for row in rows] == [("1", "1")] * 3 + [("2", "1")] * 3


@pytest.mark.parametrize("kind", ["tsne", "cka", "accuracy"])
def test_needs_a_run(kind):
    with pytest.raises(UsageError, match=f"ccfa figure {kind}"):
        write_figure(kind, [])


def test_a_t_sne_is_of_one_run(runs):
    with pytest.raises(UsageError, match="one run"):
        write_figure("tsne", [runs / "plain-0", runs / "ccfa-0"])


def test_a_figure_of_one_image_is_refused(runs):
    with pytest.raises(UsageError, match="--images 1"):
        write_figure("cka", [runs / "plain-0"], None, Wish(num_images=1))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_is_none_is_refused(runs, seed):
    with pytest.raises(UsageError, match="seed"):
        write_figure("tsne", [runs / "plain-0"], None, Wish(seed=seed))


def test_networks_are_needed_and_a_report_is_not_enough(runs):
    with pytest.raises(ModelError, match="run directory"):
        write_figure("cka", [runs / "plain-0" / "report.json"])


def test_unfinished_runs_have_no_figure(made_up):
    with pytest.raises(ModelError, match="ccfa resume"):
        write_figure("accuracy", made_up({"finished": False}))


def test_backbones_of_different_depths_are_not_drawn_together(runs, monkeypatch):
    def depth(directory, *_):
        return Similarities([[0.5] * (3 if "ccfa" in directory.path.name else 4)] * 2, 10)

    monkeypatch.setattr(paper_figures, "map_similarities", depth)
    with pytest.raises(UsageError, match="levels"):
        write_figure("cka", [runs / "plain-0", runs / "ccfa-0"])


def test_a_folder_that_cannot_be_made_is_named(runs, tmp_path, call):
    (tmp_path / "file").touch()
    code, _, errors = call("figure", "accuracy", runs / "ccfa-0", "--out", tmp_path / "file" / "out")
    assert code == 5
    assert "Could not create" in errors
