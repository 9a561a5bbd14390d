"""What every chart is made of: axes, ticks, text, a legend, and parts that answer to the mouse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 42
NUM_COLOURS = 8


@dataclass(frozen=True)
class Axes:
    """From values to pixels."""

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


def legend(names: Sequence[tuple[str, int, bool]]) -> Markup:
    """Names with their colours: (name, colour, dashed)."""
    items = [
        Markup('<li><i class="swatch c{}{}"></i>{}</li>').format(
            colour % NUM_COLOURS, " dashed" if dashed else "", name
        )
        for name, colour, dashed in names
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items)) if items else Markup("")


def svg(parts: Sequence[str], label: str, height: int = HEIGHT, attributes: str = "") -> Markup:
    """A chart that can be focused and says what it shows; `attributes` must be safe."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" aria-label="{escape(label)}"'
        f"{attributes}>{''.join(parts)}</svg>"
    )


def number(value: float, unit: str = "", decimals: int = 1) -> str:
    """A value for people; a dash where there is none."""
    return f"{value:,.{decimals}f}{unit}" if math.isfinite(value) else "-"


def ticks(values: Sequence[float], at_most: int = 6) -> list[float]:
    """Round numbers that cover the values."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    rough = (high - low) / max(at_most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A tick's number, short enough for the margin."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def finite(value: float) -> float:
    """The value, or 0 where there is none."""
    return value if math.isfinite(value) else 0.0


def frame(axes: Axes, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    """Hairlines, tick labels and the names of both axes."""
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axes.y(tick):.1f}" y2="{axes.y(tick):.1f}"/>'
        + text(LEFT - 8, axes.y(tick) + 4, tick_label(tick), "end")
        for tick in y_ticks
    ]
    parts += [text(axes.x(tick), HEIGHT - BOTTOM + 16, tick_label(tick), "middle") for tick in x_ticks]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "axis"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<text class="axis" transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">'
    return "".join(parts) + f"{turned}{escape(y_label)}</text>"


def text(x: float, y: float, content: str, anchor: str, kind: str = "tick") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def hit(left: float, right: float, drawn: str, tip: Sequence[str]) -> str:
    """A part of a chart that answers to the mouse: its full height is sensitive, `tip` is what it says."""
    area = f'<rect class="area" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
    return f'<g class="hit">{area}{drawn}<title>{escape(chr(10).join(tip))}</title></g>'
