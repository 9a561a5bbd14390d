"""Curves and clouds of points as a paper prints them, with matplotlib: legible at its width, in every kind of sight."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

COLUMN_WIDTH = 3.33  # inches, of a paper in two columns
TEXT_WIDTH = 7.0
MOST_TICKS = 6
FEW_CURVES = 4
# Okabe & Ito's colours for lines; Tol's "muted" and black for classes. Shapes repeat what colours say.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CLASS_COLOURS = (
    *("#332288", "#CC6677", "#117733", "#88CCEE", "#882255", "#DDCC77", "#44AA99", "#AA4499", "#999933", "#000000"),
)
MARKERS = "osD^vPX<>p"
STYLE: Any = {  # matplotlib types its keys one by one
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,  # two dashes
    "figure.constrained_layout.h_pad": 0.05,
    "pdf.fonttype": 42,  # TrueType: text stays text, and submission systems accept it
}


class Curve(NamedTuple):
    """A line with its band, for each x the mean and the spread of several runs (NaN where there was one)."""

    name: str
    family: str  # curves of one family have one colour
    ccfa: bool
    x: Sequence[float]
    means: Sequence[float]
    spreads: Sequence[float]


class Panel(NamedTuple):
    """Axes of their own with a title."""

    title: str
    curves: Sequence[Curve]


def draw_curves(panels: Sequence[Panel], x_label: str, y_label: str) -> Figure:
    """Panels of curves over one legend: solid and filled with CCFA, dashed and open without."""
    looks = _looks([curve for panel in panels for curve in panel.curves])
    num_columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    num_rows = -(-len(panels) // num_columns)
    wide = num_columns > 2 or (num_columns == 2 and len(looks) > FEW_CURVES)
    width, legend_columns = (TEXT_WIDTH, 4) if wide else (COLUMN_WIDTH, 2)
    row_height = 2.25 if num_columns == 1 or (wide and num_columns == 2) else 1.75
    height = row_height * num_rows + 0.16 * -(-len(looks) // legend_columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height + 0.1), layout="constrained")
        axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
        for place, panel in zip(axes, panels, strict=False):
            _draw_panel(place, panel, looks)
        for number, place in enumerate(axes):
            if number >= len(panels):
                place.remove()
            place.set_ylabel("" if number % num_columns else y_label)
            place.set_xlabel(x_label if number + num_columns >= len(panels) else "")
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(legend_columns, len(handles)))
    return figure


def _looks(curves: Sequence[Curve]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each name: by family, or by name where all are of one family."""
    families = list(dict.fromkeys(curve.family for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    looks = {}
    for curve in curves:
        number = families.index(curve.family) if len(families) > 1 else names.index(curve.name)
        looks[curve.name] = {
            "color": LINE_COLOURS[number % len(LINE_COLOURS)],
            "linestyle": "-" if curve.ccfa else (0, (4, 1.5)),
            "marker": MARKERS[number % len(MARKERS)],
            "markerfacecolor": LINE_COLOURS[number % len(LINE_COLOURS)] if curve.ccfa else "white",
        }
    return looks


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, dict[str, Any]]) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve, looks[curve.name], opacity=0.18 if len(panel.curves) <= FEW_CURVES else 0.1)
    axes.set_title(panel.title)
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    few = len(ticks) <= MOST_TICKS
    axes.xaxis.set_major_locator(
        FixedLocator(ticks) if few else MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10])
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _draw_curve(axes: Axes, curve: Curve, look: dict[str, Any], opacity: float) -> None:
    means, spreads = np.asarray(curve.means), np.asarray(curve.spreads)
    axes.plot(curve.x, means, markevery=max(1, len(means) // 12), **look)
    if not np.isnan(spreads).all():
        axes.fill_between(curve.x, means - spreads, means + spreads, color=look["color"], alpha=opacity, linewidth=0)


class Cloud(NamedTuple):
    """Points (n, 2) of several classes, under a title."""

    title: str
    points: np.ndarray[Any, np.dtype[np.float64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]


def draw_clouds(clouds: Sequence[Cloud], class_names: dict[int, str]) -> Figure:
    """One plane, once for each cloud: its points in the colours of their classes, the others' in grey."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(TEXT_WIDTH, 2.75 if len(class_names) > 5 else 2.6), layout="constrained")
        panels = figure.subplots(1, len(clouds), sharex=True, sharey=True, squeeze=False).flatten().tolist()
        everything = np.concatenate([cloud.points for cloud in clouds])
        for axes, cloud in zip(panels, clouds, strict=True):
            axes.scatter(*everything.T, s=2, color="#E0E0E0", linewidths=0, rasterized=True)
            size = float(np.clip(3000 / len(cloud.points), 5, 14))  # few points larger, so that they are seen
            for number, label in enumerate(class_names):
                points = cloud.points[cloud.labels == label]
                axes.scatter(*points.T, s=size, edgecolors="white", linewidths=0.15, **_class_look(number))
            axes.set_title(f"{cloud.title} ({len(cloud.points):,})")
            axes.set(xticks=[], yticks=[])
        handles = [
            Line2D([], [], linestyle="", markersize=4, label=name, **_class_look(number))
            for number, name in enumerate(class_names.values())
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(5, len(handles)), handletextpad=0.1, columnspacing=1
        )
    return figure


def _class_look(number: int) -> dict[str, Any]:
    colour = CLASS_COLOURS[number % len(CLASS_COLOURS)]
    return {"color": colour, "marker": MARKERS[number % len(MARKERS)]}


def rendered(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG (300 dpi) and PDF; the same figure gives the same bytes."""
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    contents = {}
    for kind, facts in metadata.items():
        content = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure.savefig(content, format=kind, dpi=300, metadata=facts)
        contents[kind] = content.getvalue()
    return contents
