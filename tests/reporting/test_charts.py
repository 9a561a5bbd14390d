import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.reporting.charts import Series, bar_chart, heat_map, line_chart, lines_figure, number, percent, ticks

HOSTILE = "<b>&\"'</b>"
finite = st.floats(-1e6, 1e6)


def drawn(chart):
    """The chart as a tree: it must be well-formed."""
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, re.DOTALL).group())


@given(st.lists(finite, min_size=1, max_size=30), st.integers(2, 8))
def test_ticks_are_even_and_cover(values, at_most):
    places = ticks(values, at_most)
    slack = 1e-8 * (places[1] - places[0]) + 1e-9
    assert places[0] <= min(values) + slack
    assert places[-1] >= max(values) - slack
    assert 2 <= len(places) <= at_most + 2
    steps = np.diff(places)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)


def test_line_passes_through_its_points():
    chart = drawn(line_chart([Series("a", [0, 5, 10], [0.0, 50.0, 100.0])], "label", "x", "y"))
    points = chart.find("polyline").get("points").split()
    x, y = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])
    assert y[0] - y[1] == pytest.approx(y[1] - y[2])
    assert len(chart.findall("circle")) == 3


def test_line_breaks_at_missing_values():
    chart = drawn(line_chart([Series("a", range(5), [1.0, 2.0, math.nan, 3.0, 4.0])], "label", "x", "y"))
    assert len(chart.findall("polyline")) == 2
    assert len(chart.findall("circle")) == 4


def test_hover_tells_every_series():
    series = [Series("a", [1, 2], [10.0, 20.0]), Series("b", [2, 3], [30.0, math.inf])]
    titles = [hit.find("title").text for hit in drawn(line_chart(series, "l", "stage", "y", " %")).findall("g")]
    assert titles == ["stage 1\na: 10.0 %", "stage 2\na: 20.0 %\nb: 30.0 %", "stage 3"]


def test_band_spans_low_to_high():
    series = Series("a", [0, 1], [5.0, 5.0], low=[0.0, 4.0], high=[10.0, 6.0])
    points = drawn(line_chart([series], "l", "x", "y")).find("polygon").get("points").split()
    heights = [float(point.split(",")[1]) for point in points]
    assert heights[3] - heights[0] == pytest.approx(5 * (heights[2] - heights[1]), abs=0.3)


def test_bars_show_value_and_spread():
    chart = bar_chart([(HOSTILE, 60.0, 1.5), ("b", 30.0, math.nan)], "l", " %")
    assert "60.0 % ± 1.5" in chart
    assert len(drawn(chart).findall(".//line[@class='whisker']")) == 1


def test_names_are_escaped():
    charts = [
        line_chart([Series(HOSTILE, [1], [1.0]), Series("b", [1], [2.0])], HOSTILE, HOSTILE, HOSTILE),
        bar_chart([(HOSTILE, 1.0, 1.0)], HOSTILE),
        heat_map(np.ones((1, 1)), [HOSTILE], HOSTILE, HOSTILE, HOSTILE),
    ]
    for chart in charts:
        assert "<b>" not in chart
        assert drawn(chart).get("aria-label") == HOSTILE


def test_nothing_to_draw_gives_no_chart():
    assert line_chart([], "l", "x", "y") == line_chart([Series("a", [1], [math.nan])], "l", "x", "y") == ""
    assert bar_chart([], "l") == ""
    assert heat_map(np.full((2, 2), np.nan), ["a"] * 2, "l", "r", "c") == ""


def test_heat_map_paints_each_cell():
    values = np.random.default_rng(0).uniform(0, 100, (40, 40))
    values[3, 4] = np.nan
    chart = heat_map(values, ["n"] * 40, "l", "r", "c")
    painted = np.zeros((40, 40))
    for opacity, path in re.findall(r'fill-opacity="([\d.]+)" d="([^"]*)"', chart):
        for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)", path):
            painted[int(row), int(column) : int(column) + int(run)] += float(opacity)
    expected = np.nan_to_num(values) / 100
    np.testing.assert_allclose(painted, expected, atol=1 / 32 + 1e-3)


def test_figure_has_its_numbers_as_table():
    figure = lines_figure("t", "m", "stage", [1, 2], {"a": [10.0, math.nan], "b": [1e308, 5.0]}, main="b")
    assert figure.table == (["stage", "a", "b"], [["1", "10.0", "1e+308"], ["2", "-", "5.0"]])
    assert [line.get("class") for line in drawn(figure.chart).findall("circle")] == ["dot c6 dashed", "dot c1"]


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, 1e-300])
def test_extreme_values_are_no_error(value):
    line_chart([Series("a", [0, 1, 2], [1.0, value, value])], "l", "x", "y", from_zero=True)
    bar_chart([("a", value, value), ("b", 1.0, value)], "l")


def test_numbers_for_people():
    assert number(1234.56) == "1,234.6"
    assert number(math.nan) == number(math.inf) == "-"
    assert number(12.3456, " %", 2) == "12.35 %"
    assert percent(0.12345) == "12.3"
