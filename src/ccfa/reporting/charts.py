"""Charts as inline SVG: lines with bands, stacked columns, bars. Colours are CSS variables; a script adds hover."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from ccfa.reporting.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    finite,
    frame,
    hit,
    legend,
    number,
    svg,
    text,
    ticks,
)

MAX_DOTS = 60


class Series(NamedTuple):
    """One line: y at each x, NaN where there is none, with an optional band."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int | None = None  # 0 is the accent; by default the position in the chart
    dashed: bool = False


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
    """Lines over a common x with their legend; `label` says in words what they show, `marks` are vertical hairlines."""
    series = [
        one._replace(colour=position if one.colour is None else one.colour) for position, one in enumerate(series)
    ]
    values = [value for one in series for part in (one.y, one.low, one.high) for value in part or ()]
    places = sorted({float(x) for one in series for x in one.x if math.isfinite(x)})
    if not places or not any(map(math.isfinite, values)):
        return Markup("")
    y_ticks = ticks([value for value in values if math.isfinite(value)] + ([0.0] if from_zero else []))
    axes = Axes(places[0], places[-1], y_ticks[0], y_ticks[-1])
    if len(places) == 1:
        axes = Axes(places[0] - 1, places[0] + 1, y_ticks[0], y_ticks[-1])
    whole = all(place.is_integer() for place in places)
    inside = [x for x in ticks(places, 7) if axes.x_low <= x <= axes.x_high and (x.is_integer() or not whole)]
    parts = [frame(axes, inside, y_ticks, x_label, y_label)]
    parts += [f'<line class="mark" x1="{axes.x(x):.1f}" x2="{axes.x(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
              for x in marks]  # fmt: skip
    parts += [_band(one, axes) for one in series] + [_line(one, axes) for one in series]
    parts += _columns_to_hover(series, places, axes, x_label, unit, decimals)
    names = [(one.name, one.colour or 0, one.dashed) for one in series]
    return legend(names if len(names) > 1 else []) + svg(parts, label)


def column_chart(
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    label: str,
    x_label: str,
    y_label: str,
    unit: str = "",
    decimals: int = 1,
    colours: Sequence[int] = range(NUM_COLOURS),
) -> Markup:
    """Upright columns, one a label, the series stacked on each other."""
    heights = [sum(finite(values[place]) for _, values in series) for place in range(len(labels))]
    if not labels:
        return Markup("")
    y_ticks = ticks([0.0, *heights])
    axes = Axes(0.0, float(len(labels)), y_ticks[0], y_ticks[-1])
    parts = [frame(axes, [], y_ticks, x_label, y_label)]
    step = math.ceil(len(labels) / 12)
    gap = 0.12
    for place, name in enumerate(labels):
        left, width, base = axes.x(place + gap), axes.x(1 - gap) - axes.x(gap), 0.0
        tip = [f"{x_label} {name}"]
        drawn = []
        for colour, (part, values) in zip(colours, series, strict=False):
            value = finite(values[place])
            top, bottom = axes.y(base + value), axes.y(base)
            drawn.append(
                f'<rect class="fill c{colour}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
            tip.append(f"{part}: {number(values[place], unit, decimals)}")
            base += value
        if place % step == 0:
            drawn.append(text(left + width / 2, HEIGHT - BOTTOM + 16, name, "middle"))
        parts.append(hit(axes.x(place), axes.x(place + 1), "".join(drawn), tip))
    names = [(name, colour, False) for colour, (name, _) in zip(colours, series, strict=False)]
    return legend(names if len(names) > 1 else []) + svg(parts, label)


def bar_chart(
    bars: Sequence[tuple[str, float, float]],
    label: str,
    unit: str = "",
    decimals: int = 1,
    colours: Sequence[int] = (),
) -> Markup:
    """Lying bars: name, value, and the spread drawn as a whisker (NaN for none)."""
    if not bars:
        return Markup("")
    reach = [value + sign * finite(spread) for _, value, spread in bars for sign in (-1, 1) if math.isfinite(value)]
    x_ticks = ticks([0.0, *reach], 6)
    row, top = 34, 6
    height = top + row * len(bars) + 26
    axes = Axes(x_ticks[0], x_ticks[-1], 0, 1)
    parts = [
        f'<line class="grid" x1="{axes.x(tick):.1f}" x2="{axes.x(tick):.1f}" y1="{top}" y2="{height - 26}"/>'
        + text(axes.x(tick), height - 8, f"{tick:g}", "middle")
        for tick in x_ticks
    ]
    for place, (name, value, spread) in enumerate(bars):
        y, colour = top + row * place, (colours[place] if colours else 0) % NUM_COLOURS
        left, right = sorted((axes.x(0), axes.x(finite(value))))
        drawn = f'<rect class="fill c{colour}" x="{left:.1f}" y="{y + 18}" width="{right - left:.1f}" height="10"/>'
        if math.isfinite(spread) and math.isfinite(value):
            drawn += (
                f'<line class="whisker" x1="{axes.x(value - spread):.1f}" x2="{axes.x(value + spread):.1f}" '
                f'y1="{y + 23}" y2="{y + 23}"/>'
            )
        shown = number(value, unit, decimals) + (f" ± {spread:.{decimals}f}" if math.isfinite(spread) else "")
        drawn += text(LEFT, y + 13, name, "start", "name") + text(WIDTH - RIGHT, y + 13, shown, "end", "name")
        parts.append(f'<g class="hit">{drawn}<title>{escape(name)}: {escape(shown)}</title></g>')
    return svg(parts, label, height)


def mean_of_finite(values: Sequence[float]) -> float:
    """The mean without what is not a number; NaN of nothing."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _line(one: Series, axes: Axes) -> str:
    """The line, broken where a value is missing, and a dot at each point unless there are very many."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(one.x, one.y, strict=True):
        if math.isfinite(y):
            pieces[-1].append((axes.x(x), axes.y(y)))
        elif pieces[-1]:
            pieces.append([])
    points = [point for piece in pieces for point in piece]
    style = f"c{(one.colour or 0) % NUM_COLOURS}" + (" dashed" if one.dashed else "")
    drawn = ""
    for piece in pieces:
        if len(piece) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            drawn += f'<polyline class="line {style}" points="{path}"/>'
    if len(points) <= MAX_DOTS:
        drawn += "".join(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
    return drawn


def _band(one: Series, axes: Axes) -> str:
    if one.low is None or one.high is None:
        return ""
    rows = [row for row in zip(one.x, one.low, one.high, strict=True) if all(map(math.isfinite, row))]
    edge = [(x, high) for x, _, high in rows] + [(x, low) for x, low, _ in reversed(rows)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in edge)
    return f'<polygon class="band c{(one.colour or 0) % NUM_COLOURS}" points="{path}"/>'


def _columns_to_hover(
    series: Sequence[Series], places: Sequence[float], axes: Axes, x_label: str, unit: str, decimals: int
) -> list[str]:
    """An invisible column at each x that tells every series' value there."""
    pixels = [axes.x(place) for place in places]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(pixels)), WIDTH - RIGHT]
    at = [dict(zip(one.x, one.y, strict=True)) for one in series]
    columns = []
    for place, pixel, left, right in zip(places, pixels, edges[:-1], edges[1:], strict=True):
        tip = [f"{x_label} {place:g}"]
        for one, values in zip(series, at, strict=True):
            if math.isfinite(values.get(place, math.nan)):
                tip.append(f"{one.name}: {number(values[place], unit, decimals)}")
        guide = f'<line class="guide" x1="{pixel:.1f}" x2="{pixel:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        columns.append(hit(left, right, guide, tip))
    return columns
