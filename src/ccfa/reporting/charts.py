"""Charts of the pages as inline SVG: lines with bands, points, and heat maps.

Colours are the CSS classes c0 to c7. A part that reacts to the mouse is a group `hit` with its values in a <title>;
a heat map carries its values as attributes. The page's script shows both, and without the script the titles still do.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, product
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from ccfa.reporting.tables import Table, number

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 30, 44  # margins
NUM_COLOURS = 8
MAX_DOTS = 60  # of a line
LINE = 13.0  # roughly the height of a line of text
LETTERS = dict.fromkeys("fijlrtI .,:;-()[]'/|", 5.0) | dict.fromkeys("mwMW+=<>%@&~#^", 12.0)  # widths in a wide font
LETTER, CAPITAL = 7.7, 9.5  # widths of the others
DOT = 4  # the radius of a point
ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}  # how much of a text is left of its place
PLACES = (  # of a text beside its dot, the best first: anchor, across, down
    *((anchor, across, LINE / 2 * down) for down in (0, -1, 1) for anchor, across in (("start", 8), ("end", -8))),
    *(("middle", 0, LINE * down) for down in (-1, 1)),
    *((anchor, across, LINE * down) for down in (-1, 1) for anchor, across in (("start", 8), ("end", -8))),
)
MAX_STEPS = 16  # that a number may be away from its dot
NUM_SHADES = 32  # of a heat map
MAX_CELLS_WITH_NUMBERS = 14  # on a side; smaller cells have no room
MAX_NAMES = 24  # on an axis of a heat map
MAX_NAME_WIDTH = 130.0
PHONE = 15 / 12  # how much larger the text of charts is in a narrow window


class Figure(NamedTuple):
    """A chart, empty where nothing was recorded, with its title, what its numbers mean, and its data."""

    title: str
    meaning: str
    chart: Markup = Markup("")
    table: Table | None = None


class Curve(NamedTuple):
    """One line of a chart: a value at each place, NaN where there is none, with an optional band."""

    name: str
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int | None = None  # by default the position in the chart
    dashed: bool = False


class Point(NamedTuple):
    """One named point of a chart."""

    name: str
    x: float
    y: float
    colour: int = 0


class Box(NamedTuple):
    """A rectangle of a chart; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        is_beside = self.right <= other.left or other.right <= self.left
        return not is_beside and self.top < other.bottom and other.top < self.bottom

    def nearest(self, place: tuple[float, float]) -> tuple[float, float]:
        """The place in the rectangle that is nearest to another one."""
        return min(max(place[0], self.left), self.right), min(max(place[1], self.top), self.bottom)


PLOT = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)


def ticks(values: Sequence[float], at_most: int = 6) -> list[float]:
    """Choose round numbers, at even distances, that cover the values."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(low)):
        margin = 0.1 * (abs(low) if abs(low) > 1e-6 else 1.0)
        low, high = low - margin, high + margin
    rough = (high - low) / max(at_most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{place * step:.10g}") for place in range(first, last + 1)]


def log_ticks(values: Sequence[float]) -> list[float]:
    """Choose 1, 2 and 5 times powers of ten that cover positive values; the powers alone where they are far apart.

    >>> log_ticks([1.9, 30.0]), log_ticks([0.03, 800.0])
    ([1.0, 2.0, 5.0, 10.0, 20.0, 50.0], [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0])
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    factors = (1, 2, 5) if high - low < 2 else (1,)
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)  # one more on each side: a logarithm may be rounded
    places = [float(f"{factor}e{power}") for power in powers for factor in factors]
    first = max(at for at, place in enumerate(places) if place <= min(values))
    last = min(at for at, place in enumerate(places) if place >= max(values) and at > first)
    return places[first : last + 1]


def line_figure(
    title: str,
    meaning: str,
    x_label: str,
    x: Sequence[int],
    curves: Sequence[Curve],
    y_label: str = "percent",
    unit: str = " %",
    decimals: int = 1,
    marks: Sequence[int] = (),
    from_zero: bool = False,
    covered: Sequence[float] = (),
) -> Figure:
    """Draw curves over common, ascending places, with a legend and the same numbers as a table.

    `unit` and `decimals` are of the values in hints and in the table. `marks` are places of vertical hairlines. With
    `from_zero` the y axis includes 0; it always includes the values `covered`, so that figures can share a scale. Of a
    single place, the numbers are shown instead of dots.
    """
    known = [value for one in curves for part in (one.y, one.low, one.high) for value in part if math.isfinite(value)]
    if not known:
        return Figure(title, meaning)
    if len(x) == 1:
        return Figure(title, meaning, _numbers(f"{x_label} {x[0]}", curves, unit, decimals))
    y_ticks = ticks([*known, *covered, 0.0] if from_zero else [*known, *covered])
    across = _scale(x[0], x[-1], LEFT, WIDTH - RIGHT)
    up = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    x_ticks = [tick for tick in ticks(x, 7) if x[0] <= tick <= x[-1] and tick.is_integer()]
    parts = _axes({tick: across(tick) for tick in x_ticks}, {tick: up(tick) for tick in y_ticks}, x_label, y_label)
    parts += [_line("mark", across(place), across(place), TOP, HEIGHT - BOTTOM) for place in marks]
    places = [across(place) for place in x]
    bands, lines, legend = [], [], []
    for at, one in enumerate(curves):
        colour = at if one.colour is None else one.colour
        style = f"c{colour % NUM_COLOURS}{' dashed' if one.dashed else ''}"
        edge = [*zip(places, one.high, strict=False), *reversed([*zip(places, one.low, strict=False)])]
        points = " ".join(f"{place:.1f},{up(value):.1f}" for place, value in edge if math.isfinite(value))
        bands.append(f'<polygon class="band {style}" points="{points}"/>' if points else "")
        lines.append(_drawn(places, one.y, up, style))
        legend.append((f"swatch {style}", "", one.name))
    parts += [*bands, *lines]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - RIGHT]
    for at, place in enumerate(x):
        values = [f"{one.name}: {number(one.y[at], unit, decimals)}" for one in curves if math.isfinite(one.y[at])]
        area = _rect("area", edges[at], TOP, edges[at + 1] - edges[at], HEIGHT - TOP - BOTTOM)
        guide = _line("guide", places[at], places[at], TOP, HEIGHT - BOTTOM)
        tip = "\n".join([f"{x_label} {place}", *values])
        parts.append(f'<g class="hit">{area}{guide}<title>{escape(tip)}</title></g>')
    ends = [f"{one.name} from {number(one.y[0], unit)} to {number(one.y[-1], unit)}" for one in curves]
    label = f"{title} over {len(x)} points: {'; '.join(ends)}."
    rows = [[str(place), *(number(one.y[at], decimals=decimals) for one in curves)] for at, place in enumerate(x)]
    names = _legend(legend) if len(legend) > 1 else Markup("")
    return Figure(title, meaning, names + _svg(parts, label), Table([x_label, *(one.name for one in curves)], rows))


def _numbers(place: str, curves: Sequence[Curve], unit: str, decimals: int) -> Markup:
    """List the values of curves that have a single place, with their bands."""
    items = []
    for one in curves:
        band = f" ({number(one.low[0])} to {number(one.high[0])})" if one.low and one.high else ""
        name = f"{one.name}, {place}" if len(curves) == 1 else one.name
        text = number(one.y[0], unit, decimals) + band
        items.append(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, text))
    return Markup('<dl class="numbers">{}</dl>').format(Markup("").join(items))


def scatter_figure(title: str, meaning: str, x_label: str, y_label: str, points: Sequence[Point]) -> Figure:
    """Draw points with their names beside them, over a logarithmic x axis, and the same numbers as a table.

    Where a name finds no room, all points have numbers, and a legend has the names. A single point is not drawn.
    """
    known = [point for point in points if 0 < point.x < math.inf and math.isfinite(point.y)]
    if len(known) < 2:
        return Figure(title, meaning)
    x_ticks, y_ticks = log_ticks([point.x for point in known]), ticks([point.y for point in known])
    along = _scale(math.log(x_ticks[0]), math.log(x_ticks[-1]), LEFT, WIDTH - RIGHT)
    up = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    places = {tick: along(math.log(tick)) for tick in x_ticks}
    parts = _axes(places, {tick: up(tick) for tick in y_ticks}, x_label, y_label)
    known.sort(key=lambda point: -point.y)
    dots = [(along(math.log(point.x)), up(point.y)) for point in known]
    texts, legend = [point.name for point in known], []
    placed = place_names(texts, dots)
    if None in placed:  # colours alone would repeat, and say nothing in black and white
        texts = [str(number) for number in range(1, len(known) + 1)]
        placed = place_names(texts, dots, MAX_STEPS)
        legend = [
            (f"number c{one.colour % NUM_COLOURS}", text, one.name) for one, text in zip(known, texts, strict=True)
        ]
    for point, text, (x, y), place in zip(known, texts, dots, placed, strict=True):
        colour, name = f"c{point.colour % NUM_COLOURS}", ""
        if place:
            anchor, box = place
            start = box.left + ANCHORS[anchor] * (box.right - box.left)
            name = _text(start, box.bottom - LINE / 2 + 4, text, anchor, f"name {colour}")
            near_x, near_y = box.nearest((x, y))
            gap = math.dist((x, y), (near_x, near_y))
            others = (math.dist(dot, box.nearest(dot)) for dot in dots if dot != (x, y))
            if legend and (gap > 9 or min(others, default=math.inf) <= gap):
                name += _line(f"leader {colour}", x, near_x, y, near_y)
        dot = f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>'
        tip = f"{point.name}\n{x_label}: {number(point.x, decimals=3)}\n{y_label}: {number(point.y, decimals=2)}"
        parts.append(f'<g class="hit">{dot}{name}<title>{escape(tip)}</title></g>')
    rows = [[point.name, number(point.x, decimals=3), number(point.y, decimals=2)] for point in points]
    label = f"{title}: {y_label} over {x_label}; the values are in the table below it."
    return Figure(title, meaning, _legend(legend) + _svg(parts, label), Table(["", x_label, y_label], rows))


def place_names(
    names: Sequence[str], dots: Sequence[tuple[float, float]], num_steps: int = 1
) -> list[tuple[str, Box] | None]:
    """Give each name an anchor and a box beside its dot, or some steps away; None where there is no room.

    The boxes are inside the plot, and clear of all dots and of each other.
    """
    taken = [Box(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in dots]
    places = []
    for name, (x, y) in zip(names, dots, strict=True):
        boxes = _boxes(text_width(name), x, y, num_steps)
        place = next(((anchor, box) for anchor, box in boxes if not any(map(box.overlaps, taken))), None)
        places.append(place)
        if place:
            taken.append(place[1])
    return places


def _axis_width(name: str) -> float:
    """The width of a name on an axis, whose letters are larger on a phone."""
    return PHONE * text_width(name)


def _shortened(name: str) -> str:
    """Cut a name that is too long for an axis."""
    if _axis_width(name) <= MAX_NAME_WIDTH:
        return name
    return next(cut for end in range(len(name), -1, -1) if _axis_width(cut := name[:end] + "…") <= MAX_NAME_WIDTH)


def text_width(text: str) -> float:
    """Estimate the width of a text, rather too wide than too narrow."""
    return sum(LETTERS.get(letter, CAPITAL if letter.isupper() else LETTER) for letter in text)


def _boxes(length: float, x: float, y: float, num_steps: int) -> Iterator[tuple[str, Box]]:
    """Give the places of a name, moved into the plot: one that leaves its side of the dot lies over the dot."""
    if length > PLOT.right - PLOT.left:
        return
    for step, (anchor, across, down) in product(range(1, num_steps + 1), PLACES):
        left = min(max(x + step * across - ANCHORS[anchor] * length, PLOT.left), PLOT.right - length)
        top = min(max(y + step * down - LINE / 2, PLOT.top), PLOT.bottom - LINE)
        yield anchor, Box(left, top, left + length, top + LINE)


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

    Rows and columns have the same names, which are on the axes if they fit; otherwise there are numbers. `label` says
    in words what is shown, `row_label` and `column_label` what a row and a column are. A line is drawn before each row
    and column of `lines`. With `faint` the shade grows with the square root, so that small values show, and zeros have
    no number.
    """
    if not percents.size:
        return Markup("")
    num, top = len(percents), 8
    short = [_shortened(name) for name in names]
    width = max(map(_axis_width, short))
    fit = num <= MAX_NAMES and len(set(short)) == num
    flat = fit and width <= (WIDTH - 36 - width) / max(num, 3)  # below their columns, else turned
    left = math.ceil(max(44.0, width + 28)) if fit else 44
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
    step = 1 if fit else next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * side >= 24 or step == 1000)
    below = 36 if flat or not fit else math.ceil(width + 28)
    for place in range(0, num, step):
        middle, name = (place + 0.5) * side, short[place] if fit else str(place)
        parts.append(_text(left - 6, top + middle + 4, name, "end"))
        if flat or not fit:
            parts.append(_text(left + middle, top + size + 15, name, "middle"))
        else:
            parts.append(_turned_text(top + size + 6, name, left + middle + 4, "end", "tick"))
    parts.append(_text(left + size / 2, top + size + below, column_label, "middle", "axis"))
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
    return _svg(parts, label, math.ceil(top + size + below + 6), attributes)


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


def _axes(x_ticks: Mapping[float, float], y_ticks: Mapping[float, float], x_label: str, y_label: str) -> list[str]:
    """Draw the values at their places on both axes, lines across, and what the axes are."""
    parts = [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "axis")]
    parts.append(_text(0, 14, y_label, "start", "axis"))  # above the values, which have any width
    for tick, place in y_ticks.items():
        end = max(LEFT - 8, _axis_width(_tick_label(tick)))
        parts += [_line("grid", LEFT, WIDTH - RIGHT, place, place), _text(end, place + 4, _tick_label(tick), "end")]
    for tick, place in x_ticks.items():
        middle = min(place, WIDTH - _axis_width(_tick_label(tick)) / 2)
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, _tick_label(tick), "middle"))
    return parts


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / ((high - low) or 1.0)


def _drawn(places: Sequence[float], values: Sequence[float], up: Callable[[float], float], style: str) -> str:
    """Draw a line, broken where a value is missing, and a dot at each point unless there are very many."""
    points = zip(places, values, strict=True)
    pieces = [list(piece) for known, piece in groupby(points, lambda point: math.isfinite(point[1])) if known]
    drawn = "".join(
        f'<polyline class="line {style}" points="{" ".join(f"{x:.1f},{up(y):.1f}" for x, y in piece)}"/>'
        for piece in pieces
        if len(piece) > 1
    )
    dots = [f'<circle class="dot {style}" cx="{x:.1f}" cy="{up(y):.1f}" r="2.5"/>' for part in pieces for x, y in part]
    return drawn + "".join(dots if len(dots) <= MAX_DOTS else [])


def _legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """List names, each after a mark of a class and a text."""
    items = Markup("").join(Markup('<li><i class="{}">{}</i>{}</li>').format(*entry) for entry in entries)
    return Markup('<ul class="legend">{}</ul>').format(items) if items else items


def _tick_label(value: float) -> str:
    return f"{value / 1000:g}k" if 10_000 <= abs(value) < 1e7 else f"{value:g}"


def _svg(parts: Sequence[str], label: str, height: int = HEIGHT, attributes: str = "") -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" aria-label="{escape(label)}"'
        f"{attributes}>{''.join(parts)}</svg>"
    )


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}"/>'


def _text(x: float, y: float, content: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _turned_text(y: float, content: str, x: float = 14, anchor: str = "middle", kind: str = "axis") -> str:
    place = f'transform="translate({x:.0f} {y:.0f}) rotate(-90)"'
    return f'<text class="{kind}" {place} text-anchor="{anchor}">{escape(content)}</text>'
