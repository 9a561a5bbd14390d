"""`ccfa figure`: the paper's figures 3 and 4 and the curves of its supplement, as PNG, PDF, CSV and a caption."""

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ccfa.errors import ModelError, UsageError, installing
from ccfa.evaluation.features import Estimator
from ccfa.experiments import Run
from ccfa.experiments.analyses import KINDS, NUM_FEATURES, NUM_IMAGES, feature_plane, map_similarities
from ccfa.experiments.tables import Result
from ccfa.files import make_folder, write_atomically, write_table
from ccfa.reporting.comparison import Comparison, common_folder, compare_entries, families, gather, grouped, setting
from ccfa.reporting.tables import Value, method_name, sentence

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D
    from matplotlib.textpath import text_to_path
    from matplotlib.ticker import FixedLocator, MaxNLocator
except ModuleNotFoundError as error:
    raise UsageError(
        "Figures need the package matplotlib, which is not installed. "
        f"Install it with: {installing('figures')} (or pip install matplotlib)."
    ) from error

COLUMN_WIDTH = 3.33  # inches, of a paper in two columns
TEXT_WIDTH = 7.0
MOST_TICKS = 6
FEW_CURVES = 4
MARGIN = 0.6  # inches beside a title, for the axis, or beside a name, for its line
# Okabe & Ito's colours for lines; Tol's "muted" and black for classes. Shapes repeat what colours say.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CLASS_COLOURS = "#332288 #CC6677 #117733 #88CCEE #882255 #DDCC77 #44AA99 #AA4499 #999933 #000000".split()  # noqa: SIM905
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
    "text.parse_math": False,  # a $ in a class name is a dollar
}
Row = dict[str, Any]
Drawn = tuple[Figure, list[Row], str, Sequence[str]]  # with the rows of its table, its caption, and notes
TITLES = dict(zip(KINDS, ("Memory features", "Augmented features", "Train-data features"), strict=True))
BANDS = " Lines are means over class orders and seeds, bands one sample standard deviation to either side."
ESTIMATORS = {
    "biased": "biased estimator; its level falls with the number of images",
    "unbiased": "unbiased estimator; 0 for independent maps",
}


class FigureOptions(NamedTuple):
    data_dir: Path | None = None
    device: torch.device = torch.device("cpu")
    num_images: int | None = None
    seed: int = 0
    estimator: Estimator = "biased"  # of CKA


class FigureFiles(NamedTuple):
    """The files of a figure, its caption, and notes on what was left out of it."""

    paths: list[Path]
    caption: str
    notes: list[str]


def write_figure(
    kind: str, runs: Sequence[Path], out: Path | None = None, options: FigureOptions | None = None
) -> FigureFiles:
    """Draw a figure of runs and write it as PNG and PDF, its numbers as CSV, and its caption as text.

    Args:
        kind: "tsne", "cka" or "accuracy".
        runs: Run directories; "accuracy" takes report files, too.
        out: Where to write; by default `figures` in the run, beside several runs or, for report files, in `runs`.
        options: Where the data are, the device, the number of images and the seed.
    """
    options = options or FigureOptions()
    if options.num_images is not None and options.num_images < 2:
        raise UsageError(f"A figure needs at least 2 images, got --images {options.num_images}.")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"The seed of a figure must be from 0 to 2^32 - 1, got {options.seed}.")
    entries, notes = gather(runs)
    alone = len(entries) == 1 and entries[0].path.is_dir()
    folder = out or (entries[0].path / "figures" if alone else common_folder(entries).with_name("figures"))
    figure, rows, caption, more = FIGURES[kind](entries, options)
    make_folder(folder)
    paths = {suffix: folder / f"{kind}.{suffix}" for suffix in ("png", "pdf", "csv", "txt")}
    replaced = ["the figure that was there before is replaced."] if paths["png"].exists() else []
    # Without a date, the same figure gives the same bytes.
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    for suffix, facts in metadata.items():
        content = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure.savefig(content, format=suffix, dpi=300, metadata=facts)
        write_atomically(paths[suffix], content.getvalue())
    write_table(paths["csv"], rows)
    write_atomically(paths["txt"], caption + "\n")
    return FigureFiles([*paths.values()], caption, [*notes, *more, *replaced])


def _tsne(entries: Sequence[Result], options: FigureOptions) -> Drawn:
    if len(entries) > 1:
        raise UsageError(f"t-SNE takes one run, got {len(entries)}: the positions of two runs cannot be compared.")
    limit, experiment = options.num_images or NUM_FEATURES, entries[0].experiment
    plane = feature_plane(_run(entries[0]), options.data_dir, options.device, limit, options.seed)
    facts = {"perplexity": round(plane.perplexity, 4), "seed": options.seed}
    counts = [sum(point["kind"] == kind for point in plane.points) for kind in KINDS]
    ccfa, (low, high) = plane.ccfa, plane.step_size
    caption = (
        f"t-SNE (perplexity {plane.perplexity:.4g}, seed {options.seed}) of features of {len(plane.class_names)} "
        f"random classes after the first stage of {method_name(experiment)} on {experiment.data} "
        f"(seed {experiment.seed}): the {counts[0]:,} exemplars in memory; {counts[1]:,} features that CCFA makes "
        f"from the next stage's training images and labels as one of the classes "
        f"(count {ccfa.count}, {ccfa.steps} steps of {low:.4g} to {high:.4g}, targets {ccfa.target}); "
        f"{counts[2]:,} training images of the classes. One embedding of all features, "
        f"at unit length; grey: the points of the other panels."
    )
    figure = draw_plane(plane.points, plane.class_names)
    return figure, [{**point, **facts} for point in plane.points], caption, ()


def _cka(entries: Sequence[Result], options: FigureOptions) -> Drawn:
    comparison, limit = _compared(entries), options.num_images or NUM_IMAGES
    measured = {
        entry.path: map_similarities(
            _run(entry), options.data_dir, options.device, limit, options.seed, options.estimator
        )
        for line in comparison.lines
        for entry in line.entries
    }
    depths = {len(values[0]) for values, _ in measured.values()}
    if len(depths) > 1:
        raise UsageError(f"These runs' backbones have different numbers of levels {sorted(depths)}: draw them apart.")
    (num_images,) = {number for _, number in measured.values()}
    facts = {"images": num_images, "seed": options.seed, "estimator": options.estimator}
    panels = []
    for level in range(depths.pop()):
        values = [
            [
                Value.of([measured[entry.path][0][stage][level] for entry in line.entries])
                for stage in range(len(comparison.num_seen) - 1)
            ]
            for line in comparison.lines
        ]
        rows = [{"level": level + 1, **row, **facts} for row in _rows(comparison, values)]
        panels.append((f"After level {level + 1}", rows))
    caption = (
        f"Linear CKA ({ESTIMATORS[options.estimator]}) between the maps of the network after the first stage "
        f"and after each later stage, {comparison.title}, on {num_images:,} test images of the first stage's "
        f"classes. Maps are flattened: every channel at every position is a feature.{_below(comparison)}"
    )
    figure = draw_curves(panels, "stage", "Stage", "CKA")
    return figure, [row for _, rows in panels for row in rows], caption, comparison.notes


def _accuracy(entries: Sequence[Result], options: FigureOptions) -> Drawn:
    compared = [_compared(group) for group in grouped(entries, setting).values()]
    panels = []
    for number, one in enumerate(compared, start=1):
        rows = _rows(one, [line.curve for line in one.lines])
        panels.append((one.title, [{"panel": number, "scenario": one.title, **row} for row in rows]))
    caption = (
        "Accuracy on the test images of all classes seen so far after each stage, by each method's own rule of "
        f"prediction: {'; '.join(title for title, _ in panels)}.{_below(*compared)}"
    )
    figure = draw_curves(panels, "num_seen", "Number of classes", "Accuracy (%)")
    notes = [note for one in compared for note in one.notes]
    return figure, [row for _, rows in panels for row in rows], caption, notes


FIGURES: dict[str, Callable[[Sequence[Result], FigureOptions], Drawn]] = {
    "tsne": _tsne,
    "cka": _cka,
    "accuracy": _accuracy,
}


def _compared(entries: Sequence[Result]) -> Comparison:
    comparison = compare_entries(entries)
    if not comparison.lines:
        names = ", ".join(str(entry.path) for entry in entries)
        raise ModelError(f"No finished run among {names}: a figure shows whole runs. Finish one with ccfa resume.")
    return comparison


def _run(entry: Result) -> Run:
    if not entry.path.is_dir():
        raise ModelError(f"{entry.path} is a report alone; this figure needs the run directory with its networks.")
    return Run(entry.path)


def _rows(comparison: Comparison, values: Sequence[Sequence[Value]]) -> list[Row]:
    """Make a row for each line and stage; fewer values than stages are those of the last stages."""
    rows = []
    for line, own in zip(comparison.lines, values, strict=True):
        first, num_runs = len(comparison.num_seen) - len(own), len(line.entries)
        for stage, value in enumerate(own, start=first):
            row = {"name": line.name, "stage": stage, "num_seen": comparison.num_seen[stage], "runs": num_runs}
            rows.append({**row, "mean": value.mean, "spread": value.spread if num_runs > 1 else None})
    return rows


def _below(*compared: Comparison) -> str:
    """Return the end of a caption: what bands are, and how the runs were set."""
    banded = any(len(line.entries) > 1 for comparison in compared for line in comparison.lines)
    notes = dict.fromkeys(note for comparison in compared for note in comparison.settings)
    told = []
    for note in notes:
        held = [comparison.title for comparison in compared if note in comparison.settings]
        told.append(sentence(note if len(held) == len(compared) else f"{'; '.join(held)}: {note}"))
    return " ".join([BANDS if banded else "", *told]).rstrip()


def draw_curves(panels: Sequence[tuple[str, Sequence[Row]]], x: str, x_label: str, y_label: str) -> Figure:
    """Draw titled panels of curves over one legend: solid and filled with CCFA, dashed and open without.

    A row has the name of its curve, its mean and spread over runs, and its place on the x axis, in the column `x`.
    """
    looks = curve_looks(dict.fromkeys(row["name"] for _, rows in panels for row in rows))
    num_columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    num_rows = -(-len(panels) // num_columns)
    wide = num_columns > 2 or (num_columns == 2 and len(looks) > FEW_CURVES)
    width = TEXT_WIDTH if wide else COLUMN_WIDTH
    titles = [_folded(title, width / num_columns - MARGIN) for title, _ in panels]
    row_height = 2.25 if num_columns == 1 or (wide and num_columns == 2) else 1.75
    row_height += 0.14 * max(title.count("\n") for title in titles)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, row_height * num_rows + 0.1), layout="constrained")
        for number, (title, (_, rows)) in enumerate(zip(titles, panels, strict=True)):
            axes = figure.add_subplot(num_rows, num_columns, number + 1)
            names = list(dict.fromkeys(row["name"] for row in rows))
            for name in names:
                own = [row for row in rows if row["name"] == name]
                places, means, spreads = (np.array([row[key] for row in own], float) for key in (x, "mean", "spread"))
                axes.plot(places, means, markevery=max(1, len(means) // 12), **looks[name])
                if not np.isnan(spreads).all():
                    opacity = 0.18 if len(names) <= FEW_CURVES else 0.1
                    colour = looks[name]["color"]
                    axes.fill_between(
                        places, means - spreads, means + spreads, color=colour, alpha=opacity, linewidth=0
                    )
            ticks = sorted({row[x] for row in rows})
            many = MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10])
            axes.xaxis.set_major_locator(FixedLocator(ticks) if len(ticks) <= MOST_TICKS else many)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
            axes.set_title(title)
            axes.set_ylabel("" if number % num_columns else y_label)
            axes.set_xlabel(x_label if number + num_columns >= len(panels) else "")
        _add_legend(figure, [Line2D([], [], label=name, **look) for name, look in looks.items()], 4 if wide else 2)
    return figure


def _add_legend(figure: Figure, handles: Sequence[Line2D], most_columns: int, **form: Any) -> None:
    """Add a legend below the panels, in as many columns as fit, and make the figure higher by as much as it needs."""
    width, height = figure.get_size_inches()
    for handle in handles:
        handle.set_label(_folded(str(handle.get_label()), width - MARGIN))
    for num_columns in range(min(most_columns, len(handles)), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, **form)
        canvas: Any = FigureCanvasAgg(figure)  # which is untyped
        box = legend.get_window_extent(canvas.get_renderer())
        if num_columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _folded(text: str, inches: float) -> str:
    """Break a text into lines that are at most so many inches wide, between words where that is possible."""
    letters = int(len(text) * inches / max(_inches(text), inches))
    for fewer in range(letters, 3, -1):
        lines = textwrap.wrap(text, fewer)
        if all(_inches(line) <= inches for line in lines):
            return "\n".join(lines)
    return text


@cache
def _inches(text: str) -> float:
    """Return the width of a line of text."""
    font = FontProperties(size=STYLE["font.size"])
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def curve_looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Choose colour, dashes and marker by name; a method with and without CCFA shares them, where there are several."""
    looks = {}
    for name, number in families(names).items():
        colour, ccfa = LINE_COLOURS[number % len(LINE_COLOURS)], " + CCFA" in name
        looks[name] = {
            "color": colour,
            "linestyle": "-" if ccfa else (0, (4, 1.5)),
            "marker": MARKERS[number % len(MARKERS)],
            "markerfacecolor": colour if ccfa else "white",
        }
    return looks


def draw_plane(points: Sequence[Row], class_names: dict[int, str]) -> Figure:
    """Draw one plane once per kind of feature: its points in the colours of their classes, the others' in grey."""
    looks: dict[int, Any] = {
        label: {"color": CLASS_COLOURS[number % len(CLASS_COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        for number, label in enumerate(class_names)
    }
    places = np.array([(point["x"], point["y"]) for point in points])
    kinds, labels = (np.array([point[name] for point in points]) for name in ("kind", "class"))
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(TEXT_WIDTH, 2.4), layout="constrained")
        panels = figure.subplots(1, len(TITLES), sharex=True, sharey=True).tolist()
        for axes, (kind, title) in zip(panels, TITLES.items(), strict=True):
            axes.scatter(*places.T, s=2, color="#E0E0E0", linewidths=0, rasterized=True)
            own = kinds == kind
            size = float(np.clip(3000 / own.sum(), 5, 14))  # few points larger, so that they are seen
            for label, look in looks.items():
                axes.scatter(*places[own & (labels == label)].T, s=size, edgecolors="white", linewidths=0.15, **look)
            axes.set_title(f"{title} ({own.sum():,})")
            axes.set(xticks=[], yticks=[])
        handles = [
            Line2D([], [], linestyle="", markersize=4, label=class_names[label], **look)
            for label, look in looks.items()
        ]
        _add_legend(figure, handles, 5, handletextpad=0.1, columnspacing=1)
    return figure
