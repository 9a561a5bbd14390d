"""Heat maps as inline SVG: cells of one shade are one path, so that 100 x 100 of them stay small."""

import json
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from ccfa.reporting.axes import WIDTH, svg

NUM_SHADES = 32
MAX_CELLS_WITH_NUMBERS = 14  # a side; smaller cells have no room
LEFT, TOP, BOTTOM = 44, 8, 40


def heat_map(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    row_label: str,
    column_label: str,
    unit: str = "",
    decimals: int = 1,
    highest: float | None = None,
    lines: Sequence[int] = (),
    faint: bool = False,
) -> Markup:
    """A matrix in shades of one colour, 0 to `highest`; NaN is left out; `lines` part rows and columns before these.

    With `faint` the shade grows with the square root, so that small values are seen, and zeros bear no number.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0 or np.isnan(values).all():
        return Markup("")
    highest = highest or float(np.nanmax(values)) or 1.0
    shades = np.clip(values / highest, 0, 1) ** (0.5 if faint else 1.0)
    num_rows, num_columns = values.shape
    side = (WIDTH - LEFT - 8) / max(num_columns, 3)
    width, height = side * num_columns, side * num_rows
    parts = [f'<g transform="translate({LEFT} {TOP}) scale({side:.4f})">{_cells(shades)}</g>']
    if max(values.shape) <= MAX_CELLS_WITH_NUMBERS:
        parts += _numbers(np.where(values == 0, np.nan, values) if faint else values, shades, side)
    for place in lines:
        x, y = LEFT + place * side, TOP + place * side
        parts.append(f'<line class="part" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height:.1f}"/>')
        parts.append(f'<line class="part" x1="{LEFT}" x2="{LEFT + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(f'<rect class="outline" x="{LEFT}" y="{TOP}" width="{width:.1f}" height="{height:.1f}"/>')
    parts += _names(num_rows, num_columns, side)
    parts.append(_axis(LEFT + width / 2, TOP + height + 36, column_label))
    parts.append(_axis(12, TOP + height / 2, row_label, turned=True))
    parts.append(f'<rect class="cursor" width="{side:.2f}" height="{side:.2f}"/>')
    return svg(parts, label, math.ceil(TOP + height + BOTTOM), _data(values, rows, columns, side, unit, decimals))


def _cells(shades: NDArray[np.float64]) -> str:
    """One path for each shade, runs of equal cells joined."""
    steps = np.ceil(np.nan_to_num(shades) * NUM_SHADES).astype(int)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(steps.tolist()):
        column = 0
        while column < len(line):
            end = column + 1
            while end < len(line) and line[end] == line[column]:
                end += 1
            if line[column] > 0:
                run = end - column
                paths.setdefault(line[column], []).append(f"M{column} {row}h{run}v1h-{run}z")
            column = end
    return "".join(
        f'<path class="cell" fill-opacity="{shade / NUM_SHADES:.3f}" d="{"".join(runs)}"/>'
        for shade, runs in sorted(paths.items())
    )


def _numbers(values: NDArray[np.float64], shades: NDArray[np.float64], side: float) -> list[str]:
    size = min(13.0, side * 0.4)
    return [
        f'<text class="{"on-dark" if shades[row, column] > 0.55 else "on-light"}" font-size="{size:.1f}" '
        f'text-anchor="middle" x="{LEFT + (column + 0.5) * side:.1f}" '
        f'y="{TOP + (row + 0.5) * side + size * 0.36:.1f}">{value:.0f}</text>'
        for (row, column), value in np.ndenumerate(values)
        if not math.isnan(value)
    ]


def _names(num_rows: int, num_columns: int, side: float) -> list[str]:
    """Row and column numbers, as many as fit."""
    drawn = []
    for count, is_row in ((num_rows, True), (num_columns, False)):
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * side >= 24 or step == 1000)
        for place in range(0, count, step):
            middle = (place + 0.5) * side
            x, y = (LEFT - 6, TOP + middle + 4) if is_row else (LEFT + middle, TOP + num_rows * side + 15)
            anchor = "end" if is_row else "middle"
            drawn.append(f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{place}</text>')
    return drawn


def _axis(x: float, y: float, text: str, turned: bool = False) -> str:
    place = f'transform="translate({x:.0f} {y:.0f}) rotate(-90)"' if turned else f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text class="axis" {place} text-anchor="middle">{escape(text)}</text>'


def _data(
    values: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str], side: float, unit: str, decimals: int
) -> str:
    """What the script needs to tell a cell's value."""
    table = ";".join(
        ",".join("" if math.isnan(value) else f"{value:.{decimals}f}".removesuffix(".0") for value in row)
        for row in values.tolist()
    )
    names = escape(json.dumps([list(rows), list(columns)], ensure_ascii=False))
    return (
        f' data-values="{table}" data-names="{names}" data-unit="{escape(unit)}" '
        f'data-left="{LEFT}" data-top="{TOP}" data-side="{side:.4f}"'
    )
