"""Charts of the pages as inline SVG: lines with bands, bars, heat maps.

Colours are the CSS classes c0 to c7. A part that reacts to the mouse is a group `hit` with its values in a <title>;
a heat map carries its values as attributes. The page's script shows both, and without the script the titles still do.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 42  # margins
NUM_COLOURS = 8
MAX_DOTS = 60  # of a line
NUM_SHADES = 32  # of a heat map
MAX_CELLS_WITH_NUMBERS = 14  # on a side; smaller cells have no room

Table = tuple[list[str], list[list[str]]]


class Figure(NamedTuple):
    """A chart with its title, the sentence that defines its number, and its data as a table.

    The chart is empty where nothing was recorded.
    """

    title: str
    meaning: str
    chart: Markup = Markup("")
    table: Table | None = None


class Series(NamedTuple):
    """One line: y at each x, NaN where there is none, with an optional band."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int | None = None  # by default the position in the chart
    dashed: bool = False


def number(value: float, unit: str = "", decimals: int = 1) -> str:
    """Format a value for people; a dash where there is none.

    >>> number(1234.56), number(float("nan")), number(12.3456, " %", 2)
    ('1,234.6', '-', '12.35 %')
    """
    if not math.isfinite(value):
        return "-"
    return f"{value:.3g}{unit}" if abs(value) >= 1e12 else f"{value:,.{decimals}f}{unit}"


def percent(value: float, decimals: int = 1) -> str:
    """Format a fraction as a percentage; a dash where there is none."""
    return number(100 * value, decimals=decimals)


def ticks(values: Sequence[float], at_most: int = 6) -> list[float]:
    """Choose round numbers that cover the values."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(low)):
        margin = 0.1 * (abs(low) if abs(low) > 1e-6 else 1.0)
        low, high = low - margin, high + margin
    rough = (high - low) / max(at_most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    label: str,
    x_label: str,
    y_label: str,
    unit: str = "",
    decimals: int = 1,
    marks: Sequence[float] = (),
    from_zero: bool = False,
) -> Markup:
    """Draw lines over a common x with a legend.

    `label` says in words what they show. `unit` and `decimals` are of the values in hints. `marks` are places of
    vertical hairlines. With `from_zero` the y axis includes 0.
    """
    values = [value for one in series for part in (one.y, one.low, one.high) for value in part or () if _known(value)]
    places = sorted({float(x) for one in series for x in one.x if _known(x)})
    if not places or not values:
        return Markup("")
    y_ticks = ticks(values + ([0.0] if from_zero else []))
    margin = 1 if len(places) == 1 else 0
    axes = _Axes(places[0] - margin, places[-1] + margin, y_ticks[0], y_ticks[-1])
    whole = all(place.is_integer() for place in places)
    x_ticks = [x for x in ticks(places, 7) if axes.x_low <= x <= axes.x_high and (x.is_integer() or not whole)]
    parts = [axes.frame(x_ticks, y_ticks, x_label, y_label)]
    parts += [_line("mark", axes.x(x), axes.x(x), TOP, HEIGHT - BOTTOM) for x in marks]
    styles = [f"c{(place if one.colour is None else one.colour) % NUM_COLOURS}" for place, one in enumerate(series)]
    parts += [_band(one, axes, style) for one, style in zip(series, styles, strict=True)]
    parts += [_curve(one, axes, style) for one, style in zip(series, styles, strict=True)]
    pixels = [axes.x(place) for place in places]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(pixels)), WIDTH - RIGHT]
    values_at = [dict(zip(one.x, one.y, strict=True)) for one in series]
    for place, pixel, left, right in zip(places, pixels, edges[:-1], edges[1:], strict=True):
        told = [(one.name, values[place]) for one, values in zip(series, values_at, strict=True) if place in values]
        tip = [f"{name}: {number(value, unit, decimals)}" for name, value in told if math.isfinite(value)]
        guide = _line("guide", pixel, pixel, TOP, HEIGHT - BOTTOM)
        parts.append(_hit(left, right, guide, [f"{x_label} {place:g}", *tip]))
    names = [(one.name, f"{style} dashed" if one.dashed else style) for one, style in zip(series, styles, strict=True)]
    return _legend(names) + _svg(parts, label)


def lines_figure(
    title: str,
    meaning: str,
    x_label: str,
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    y_label: str = "percent",
    unit: str = " %",
    decimals: int = 1,
    marks: Sequence[float] = (),
    from_zero: bool = False,
    main: str | None = None,
) -> Figure:
    """Draw named curves over a common x, with the same numbers as a table; all but `main`, if given, are dashed."""
    series = [
        Series(name, x, values, dashed=main not in (None, name), colour=None if main in (None, name) else 6)
        for name, values in curves.items()
    ]
    ends = [f"{name} from {number(y[0], unit)} to {number(y[-1], unit)}" for name, y in curves.items() if len(y)]
    label = f"{title} over {len(x)} points: {'; '.join(ends)}."
    chart = line_chart(series, label, x_label, y_label, unit, decimals, marks, from_zero)
    rows = [
        [f"{place:g}", *(number(values[at], decimals=decimals) for values in curves.values())]
        for at, place in enumerate(x)
    ]
    return Figure(title, meaning, chart, ([x_label, *curves], rows))


def bar_chart(
    bars: Sequence[tuple[str, float, float]],
    label: str,
    unit: str = "",
    decimals: int = 1,
    colours: Sequence[int] = (),
) -> Markup:
    """Draw horizontal bars: name, value, and the spread as a whisker (NaN for none)."""
    if not bars:
        return Markup("")
    reach = [value + sign * _or_zero(spread) for _, value, spread in bars for sign in (-1, 1) if _known(value)]
    x_ticks = ticks([0.0, *reach])
    row, top = 34, 6
    bottom = top + row * len(bars)
    axes = _Axes(x_ticks[0], x_ticks[-1], 0, 1)
    parts = [
        _line("grid", axes.x(tick), axes.x(tick), top, bottom) + _text(axes.x(tick), bottom + 18, f"{tick:g}", "middle")
        for tick in x_ticks
    ]
    for place, (name, value, spread) in enumerate(bars):
        y, colour = top + row * place, (colours[place] if colours else 0) % NUM_COLOURS
        left, right = sorted((axes.x(0), axes.x(_or_zero(value))))
        drawn = _rect(f"fill c{colour}", left, y + 18, right - left, 10)
        shown = number(value, unit, decimals)
        if _known(spread) and _known(value):
            drawn += _line("whisker", axes.x(value - spread), axes.x(value + spread), y + 23, y + 23)
            shown += f" ± {spread:.{decimals}f}"
        drawn += _text(LEFT, y + 13, name, "start", "name") + _text(WIDTH - RIGHT, y + 13, shown, "end", "name")
        parts.append(f'<g class="hit">{drawn}<title>{escape(name)}: {escape(shown)}</title></g>')
    return _svg(parts, label, bottom + 26)


def heat_map(
    percents: NDArray[np.float64],
    names: Sequence[str],
    label: str,
    row_label: str,
    column_label: str,
    lines: Sequence[int] = (),
    faint: bool = False,
) -> Markup:
    """Draw a square matrix of percentages in shades of one colour; NaN is left out.

    Rows and columns have the same names. `label` says in words what is shown, `row_label` and `column_label` what a row
    and a column are. A line is drawn before each row and column of `lines`. With `faint` the shade grows with the
    square root, so that small values show, and zeros bear no number.
    """
    if not percents.size or np.isnan(percents).all():
        return Markup("")
    num, left, top = len(percents), 44, 8
    shades = np.clip(percents / 100, 0, 1) ** (0.5 if faint else 1.0)
    side = (WIDTH - left - 8) / max(num, 3)
    size = side * num
    parts = [f'<g transform="translate({left} {top}) scale({side:.4f})">{_cells(shades)}</g>']
    if num <= MAX_CELLS_WITH_NUMBERS:
        font = min(13.0, side * 0.4)
        parts += [
            f'<text class="{"on-dark" if shades[row, column] > 0.55 else "on-light"}" font-size="{font:.1f}" '
            f'text-anchor="middle" x="{left + (column + 0.5) * side:.1f}" '
            f'y="{top + (row + 0.5) * side + font * 0.36:.1f}">{value:.0f}</text>'
            for (row, column), value in np.ndenumerate(percents)
            if not math.isnan(value) and (value or not faint)
        ]
    for place in lines:
        parts.append(_line("part", left + place * side, left + place * side, top, top + size))
        parts.append(_line("part", left, left + size, top + place * side, top + place * side))
    parts.append(_rect("outline", left, top, size, size))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * side >= 24 or step == 1000)
    for place in range(0, num, step):
        middle = (place + 0.5) * side
        parts.append(_text(left - 6, top + middle + 4, str(place), "end"))
        parts.append(_text(left + middle, top + size + 15, str(place), "middle"))
    parts.append(_text(left + size / 2, top + size + 36, column_label, "middle", "axis"))
    parts.append(_turned_text(top + size / 2, row_label))
    parts.append(_rect("cursor", 0, 0, side, side))
    values = ";".join(
        ",".join("" if math.isnan(value) else f"{value:.1f}".removesuffix(".0") for value in row)
        for row in percents.tolist()
    )
    tips = [[f"{label} {name}" for name in names] for label in (row_label, column_label)]
    attributes = (
        f' data-values="{values}" data-names="{escape(json.dumps(tips, ensure_ascii=False))}" '
        f'data-left="{left}" data-top="{top}" data-side="{side:.4f}"'
    )
    return _svg(parts, label, math.ceil(top + size + 40), attributes)


def _cells(shades: NDArray[np.float64]) -> str:
    """Draw one path per shade, with equal neighbours joined, so that 100 x 100 cells stay small."""
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(np.ceil(np.nan_to_num(shades) * NUM_SHADES).astype(int).tolist()):
        column = 0
        for shade, equal in groupby(line):
            length = len(list(equal))
            paths.setdefault(shade, []).append(f"M{column} {row}h{length}v1h-{length}z")
            column += length
    return "".join(
        f'<path class="cell" fill-opacity="{shade / NUM_SHADES:.3f}" d="{"".join(runs)}"/>'
        for shade, runs in sorted(paths.items())
        if shade
    )


class _Axes(NamedTuple):
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)

    def frame(self, x_ticks: Iterable[float], y_ticks: Iterable[float], x_label: str, y_label: str) -> str:
        """Hairlines, tick labels and the names of both axes."""
        parts = [
            _line("grid", LEFT, WIDTH - RIGHT, self.y(tick), self.y(tick))
            + _text(LEFT - 8, self.y(tick) + 4, _tick_label(tick), "end")
            for tick in y_ticks
        ]
        parts += [_text(self.x(tick), HEIGHT - BOTTOM + 16, _tick_label(tick), "middle") for tick in x_ticks]
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "axis"))
        return "".join(parts) + _turned_text((TOP + HEIGHT - BOTTOM) / 2, y_label)


def _curve(one: Series, axes: _Axes, style: str) -> str:
    """The line, broken where a value is missing, and a dot at each point unless there are very many."""
    style += " dashed" if one.dashed else ""
    points = list(zip(one.x, one.y, strict=True))
    pieces = [
        [(axes.x(x), axes.y(y)) for x, y in piece] for known, piece in groupby(points, lambda p: _known(p[1])) if known
    ]
    drawn = "".join(
        f'<polyline class="line {style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in piece)}"/>'
        for piece in pieces
        if len(piece) > 1
    )
    dots = [point for piece in pieces for point in piece]
    if len(dots) <= MAX_DOTS:
        drawn += "".join(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in dots)
    return drawn


def _band(one: Series, axes: _Axes, style: str) -> str:
    if one.low is None or one.high is None:
        return ""
    rows = [row for row in zip(one.x, one.low, one.high, strict=True) if all(map(_known, row))]
    edge = [(x, high) for x, _, high in rows] + [(x, low) for x, low, _ in reversed(rows)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in edge)
    return f'<polygon class="band {style}" points="{path}"/>'


def _known(value: float) -> bool:
    return abs(value) < 1e100  # beyond that there is no arithmetic left for an axis


def _or_zero(value: float) -> float:
    return value if _known(value) else 0.0


def _tick_label(value: float) -> str:
    return f"{value / 1000:g}k" if 10_000 <= abs(value) < 1e7 else f"{value:g}"


def _legend(names: Sequence[tuple[str, str]]) -> Markup:
    """Names with their CSS classes; a single one needs no legend."""
    items = [Markup('<li><i class="swatch {}"></i>{}</li>').format(style, name) for name, style in names]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items)) if len(items) > 1 else Markup("")


def _svg(parts: Sequence[str], label: str, height: int = HEIGHT, attributes: str = "") -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" aria-label="{escape(label)}"'
        f"{attributes}>{''.join(parts)}</svg>"
    )


def _hit(left: float, right: float, drawn: str, tip: Sequence[str]) -> str:
    """A part that reacts to the mouse over its full height; `tip` is what it says."""
    area = _rect("area", left, TOP, right - left, HEIGHT - TOP - BOTTOM)
    return f'<g class="hit">{area}{drawn}<title>{escape(chr(10).join(tip))}</title></g>'


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}"/>'


def _text(x: float, y: float, content: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _turned_text(y: float, content: str) -> str:
    """The name of the y axis."""
    place = f'transform="translate(12 {y:.0f}) rotate(-90)"'
    return f'<text class="axis" {place} text-anchor="middle">{escape(content)}</text>'
