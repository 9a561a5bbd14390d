import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.reporting.charts import Curve, heat_map, line_figure, ticks

HOSTILE = "<b>&\"'</b>"


def drawn(chart):
    """The chart as a tree: it must be well-formed."""
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, re.DOTALL).group())


def line_chart(x, *curves, **form):
    return drawn(line_figure("title", "meaning", "stage", x, curves, **form).chart)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(2, 8))
def test_ticks_are_even_and_cover(values, at_most):
    places = ticks(values, at_most)
    slack = 1e-8 * (places[1] - places[0]) + 1e-9
    assert places[0] <= min(values) + slack
    assert places[-1] >= max(values) - slack
    assert 2 <= len(places) <= at_most + 2
    steps = np.diff(places)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)


def test_line_passes_through_points_and_breaks():
    chart = line_chart([0, 5, 10, 15, 20], Curve("a", [0.0, 50.0, 100.0, math.nan, 100.0]))
    (line,) = chart.findall("polyline")
    x, y = zip(*(map(float, point.split(",")) for point in line.get("points").split()), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])
    assert y[0] - y[1] == pytest.approx(y[1] - y[2])
    assert len(chart.findall("circle")) == 4


def test_hover_and_table_have_every_value():
    curves = [Curve("a", [10.0, 20.0, math.nan]), Curve("b", [math.nan, 30.0, math.inf], colour=6, dashed=True)]
    figure = line_figure("t", "m", "stage", [1, 2, 3], curves)
    titles = [hit.find("title").text for hit in drawn(figure.chart).findall("g")]
    assert titles == ["stage 1\na: 10.0 %", "stage 2\na: 20.0 %\nb: 30.0 %", "stage 3"]
    assert figure.table == (["stage", "a", "b"], [["1", "10.0", "-"], ["2", "20.0", "30.0"], ["3", "-", "-"]])
    assert [dot.get("class") for dot in drawn(figure.chart).findall("circle")] == ["dot c0"] * 2 + ["dot c6 dashed"]


def test_band_spans_low_to_high():
    chart = line_chart([0, 1], Curve("a", [5.0, 5.0], low=[0.0, 4.0], high=[10.0, 6.0]))
    heights = [float(point.split(",")[1]) for point in chart.find("polygon").get("points").split()]
    assert heights[3] - heights[0] == pytest.approx(5 * (heights[2] - heights[1]), abs=0.3)


@pytest.mark.parametrize(
    "chart",
    [
        line_figure(HOSTILE, "", HOSTILE, [1], [Curve(HOSTILE, [1.0]), Curve("b", [2.0])], HOSTILE).chart,
        heat_map(np.ones((1, 1)), [HOSTILE], HOSTILE, HOSTILE, HOSTILE),
    ],
)
def test_names_are_escaped(chart):
    assert "<b>" not in chart
    assert HOSTILE in drawn(chart).get("aria-label")


def test_nothing_to_draw_gives_no_chart():
    assert (
        line_figure("t", "m", "x", [], []).chart
        == line_figure("t", "m", "x", [1], [Curve("a", [math.nan])]).chart
        == ""
    )
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


@pytest.mark.parametrize("value", [1e38, -1e38, math.inf, 1e-38])
def test_extreme_losses_are_no_error(value):
    assert line_chart([0, 1, 2], Curve("a", [1.0, value, value]), from_zero=True)
