import itertools
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ccfa.reporting.charts import (
    DOT,
    MAX_STEPS,
    PLOT,
    Box,
    Curve,
    Point,
    heat_map,
    line_figure,
    log_ticks,
    place_names,
    scatter_figure,
    ticks,
)


def drawn(chart):
    """The chart as a tree: it must be well-formed."""
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, re.DOTALL).group())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(2, 8))
def test_ticks_are_even_and_cover(values, at_most):
    places = ticks(values, at_most)
    slack = 1e-8 * (places[1] - places[0]) + 1e-9
    assert places[0] <= min(values) + slack
    assert places[-1] >= max(values) - slack
    assert 2 <= len(places) <= at_most + 2
    steps = np.diff(places)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
@example([999999.9999999999])
def test_log_ticks_cover(values):
    places = log_ticks(values)
    assert places[0] <= min(values) <= max(values) <= places[-1]
    assert 2 <= len(places) <= 14
    assert all(later > earlier for earlier, later in itertools.pairwise(places))


def test_points_are_placed_by_ratio():
    points = [Point("a", 1.0, 50.0), Point("b", 10.0, 60.0, 1), Point("c", 100.0, 60.1, 2), Point("a + c", 1.0, 50.1)]
    figure = scatter_figure("t", "m", "x", "y", [*points, Point("unknown", math.nan, 1.0)])
    hits = drawn(figure.chart).findall("g")
    at = {hit.find("text").text: float(hit.find("circle").get("cx")) for hit in hits}
    assert at["b"] - at["a"] == pytest.approx(at["c"] - at["b"], abs=0.11)
    assert hits[0].find("title").text == "c\nx: 100.000\ny: 60.10"
    assert figure.table.rows[-1] == ["unknown", "-", "1.00"]
    assert scatter_figure("t", "m", "x", "y", [points[0], Point("unknown", math.nan, 1.0)]).chart == "", "one point"


DOTS = st.tuples(st.floats(PLOT.left, PLOT.right), st.floats(PLOT.top, PLOT.bottom))
NEAR_DOTS = st.tuples(st.floats(240.0, 280.0), st.floats(PLOT.bottom - 30.0, PLOT.bottom))


@given(st.lists(st.tuples(st.text("aimW +", max_size=60), DOTS | NEAR_DOTS), max_size=24))
def test_every_dot_finds_its_number(points):
    dots = [dot for _, dot in points]
    assert None not in place_names([str(number) for number in range(len(dots))], dots, MAX_STEPS)


@given(st.lists(st.tuples(st.text("aimW +", max_size=60), DOTS | NEAR_DOTS), max_size=24))
def test_names_stay_in_the_plot_and_apart(points):
    dots = [dot for _, dot in points]
    squares = [Box(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in dots]
    places = place_names([name for name, _ in points], dots)
    boxes = [place[1] for place in places if place]
    assert all(box.left >= PLOT.left and box.right <= PLOT.right for box in boxes)
    assert all(box.top >= PLOT.top and box.bottom <= PLOT.bottom for box in boxes)
    assert not any(box.overlaps(square) for box in boxes for square in squares)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    for (x, y), place in zip(dots, places, strict=True):
        if place:  # it is beside its own dot
            left, top, right, bottom = place[1]
            assert max(left - x, x - right) <= 8.01
            assert max(top - y, y - bottom) <= 8.01


@pytest.mark.parametrize("x", [PLOT.left, 200.0, PLOT.right])
@pytest.mark.parametrize("y", [PLOT.top, 100.0, PLOT.bottom])
def test_lone_point_has_its_name(x, y):
    assert place_names(["n" * 40], [(x, y)]) != [None]


def test_names_without_room_are_numbered():
    names = ["elsewhere", "x" * 255, *(f"method-{number}" for number in range(30))]
    points = [Point(name, 2.0 + at / 1000, 60.0 - at / 1000, at) for at, name in enumerate(names)]
    chart = scatter_figure("t", "m", "x", "y", points).chart
    shown = {hit.find("text").text: hit.find("title").text.split("\n")[0] for hit in drawn(chart).findall("g")}
    assert shown == {str(number): name for number, name in enumerate(names, start=1)}
    assert re.findall(r">(\d+)</i>(.*?)</li>", chart) == [*shown.items()]


def test_line_passes_through_points_and_breaks():
    curve = Curve("a", [0.0, 50.0, 100.0, math.nan, 100.0], low=[0.0, 40.0], high=[10.0, 60.0])
    chart = drawn(line_figure("t", "m", "stage", [0, 5, 10, 15, 20], [curve]).chart)
    line, band = (
        np.array([point.split(",") for point in chart.find(kind).get("points").split()], float)
        for kind in ("polyline", "polygon")
    )
    np.testing.assert_allclose(line[1] - line[0], line[2] - line[1], atol=0.11)
    assert band[3, 1] - band[0, 1] == pytest.approx((band[2, 1] - band[1, 1]) / 2, abs=0.21)
    assert len(chart.findall("circle")) == 4


def test_hover_and_table_have_every_value():
    curves = [Curve("a", [10.0, 20.0, math.nan]), Curve("b", [math.nan, 30.0, math.inf], colour=6, dashed=True)]
    figure = line_figure("t", "m", "stage", [1, 2, 3], curves)
    titles = [hit.find("title").text for hit in drawn(figure.chart).findall("g")]
    assert titles == ["stage 1\na: 10.0 %", "stage 2\na: 20.0 %\nb: 30.0 %", "stage 3"]
    assert figure.table == (["stage", "a", "b"], [["1", "10.0", "-"], ["2", "20.0", "30.0"], ["3", "-", "-"]])
    assert [dot.get("class") for dot in drawn(figure.chart).findall("circle")] == ["dot c0"] * 2 + ["dot c6 dashed"]


def test_nothing_to_draw_gives_no_chart():
    assert line_figure("t", "m", "x", [1], [Curve("a", [math.nan])]).chart == ""
    assert heat_map(np.empty((0, 0)), [], "l", "r", "c") == ""


def test_heat_map_paints_each_cell():
    values = np.random.default_rng(0).uniform(0, 100, (40, 40))
    values[3, 4] = np.nan
    chart = heat_map(values, ["n"] * 40, "l", "r", "c")
    painted = np.zeros((40, 40))
    for opacity, path in re.findall(r'fill-opacity="([\d.]+)" d="([^"]*)"', chart):
        for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)", path):
            painted[int(row), int(column) : int(column) + int(run)] += float(opacity)
    np.testing.assert_allclose(painted, np.nan_to_num(values) / 100, atol=1 / 32 + 1e-3)
    hints = [row.split(",") for row in drawn(chart).get("data-values").split(";")]
    assert hints[3][4] == ""
    assert float(hints[0][0]) == pytest.approx(values[0, 0], abs=0.051)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["cat", "dog", "aquarium fish"], ["cat", "dog", "aquarium fish"]),
        (["cat", "d" * 50, "aquarium fish"], ["cat", "d" * 12 + "…", "aquarium fish"]),
        (["x" * 50 + "a", "x" * 50 + "b", "c"], ["0", "1", "2"]),  # the same when they are cut
        ([f"name {number}" for number in range(40)], [str(number) for number in range(0, 40, 5)]),
    ],
)
def test_class_names_are_on_the_axes_if_they_fit(names, shown):
    chart = drawn(heat_map(np.eye(len(names)), names, "l", "r", "c", faint=True))
    texts = [text.text for text in chart.findall("text") if text.get("class") == "tick"]
    assert texts == [name for name in shown for _ in range(2)]
    assert json.loads(chart.get("data-names"))[0] == [f"r {name}" for name in names]


def test_single_point_is_a_number():
    curves = [Curve("a", [12.34]), Curve("<b>", [math.nan])]
    figure = line_figure("t", "m", "stage", [1], curves)
    assert "<svg" not in figure.chart
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", figure.chart) == [("a", "12.3 %"), ("&lt;b&gt;", "-")]


@pytest.mark.parametrize("value", [1e38, -1e38, math.inf, 1e-38])
def test_extreme_losses_are_no_error(value):
    figure = line_figure("t", "m", "epoch", [0, 1, 2], [Curve("a", [1.0, value, value])], from_zero=True)
    assert drawn(figure.chart)
