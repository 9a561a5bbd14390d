"""Figures 3 and 4 of the paper and its supplement's curves, from runs: what is drawn, its numbers, its caption."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ccfa.errors import ModelError, UsageError
from ccfa.experiments import RunDirectory
from ccfa.experiments.feature_plane import KINDS, NUM_FEATURES, feature_plane
from ccfa.experiments.map_similarity import NUM_IMAGES, map_similarities
from ccfa.reporting.comparison import Comparison, Entry, Line, compare, grouped, hashed, identity, setting, without_ccfa
from ccfa.reporting.figures import Wish
from ccfa.reporting.plots import Cloud, Curve, Panel, draw_clouds, draw_curves, rendered
from ccfa.reporting.values import Value

SPREAD = " Lines are means over class orders and seeds, bands one sample standard deviation to either side."
ESTIMATORS = {
    "biased": "biased estimator; its level falls with the number of images",
    "unbiased": "unbiased estimator; 0 for independent maps",
}
TITLES = dict(zip(KINDS, ("Memory features", "Augmented features", "Train-data features"), strict=True))


class Drawn(NamedTuple):
    """A figure as PNG and PDF, the numbers in it, what to write under it, and what is not in it."""

    contents: dict[str, bytes]
    rows: list[dict[str, Any]]
    caption: str
    notes: Sequence[str] = ()


def _tsne(entries: Sequence[Entry], wish: Wish) -> Drawn:
    """Figure 3: features of the first stage's classes in a plane."""
    if len(entries) > 1:
        raise UsageError(f"A t-SNE is of one run, got {len(entries)}: positions in two of them cannot be compared.")
    plane = feature_plane(
        _directory(entries[0]), wish.data_dir, wish.device, wish.num_images or NUM_FEATURES, wish.seed
    )
    clouds = [
        Cloud(
            TITLES[kind],
            np.array([(point["x"], point["y"]) for point in plane.points if point["kind"] == kind]),
            np.array([point["class"] for point in plane.points if point["kind"] == kind]),
        )
        for kind in KINDS
    ]
    facts = {"perplexity": round(plane.perplexity, 4), "seed": wish.seed}
    ccfa, (low, high), counts = plane.ccfa, plane.step_size, [len(cloud.points) for cloud in clouds]
    caption = (
        f"t-SNE (perplexity {plane.perplexity:.4g}, seed {wish.seed}) of features of {len(plane.class_names)} random "
        f"classes after the first stage of {_said(entries[0])}: the {counts[0]:,} exemplars in memory; {counts[1]:,} "
        f"features that CCFA makes from the next stage's training images and labels as one of the classes "
        f"(count {ccfa.count}, {ccfa.steps} steps of {low:.4g} to {high:.4g}, targets {ccfa.target}); "
        f"{counts[2]:,} training images of the classes. One embedding of all features, "
        f"at unit length; grey: the points of the other panels."
    )
    return Drawn(
        rendered(draw_clouds(clouds, plane.class_names)), [{**point, **facts} for point in plane.points], caption
    )


def _cka(entries: Sequence[Entry], wish: Wish) -> Drawn:
    """Figure 4: similarity of each level's maps with those of the first stage."""
    comparison = _compared(entries)
    limit = wish.num_images or NUM_IMAGES
    measured = {
        entry.path: map_similarities(_directory(entry), wish.data_dir, wish.device, limit, wish.seed, wish.estimator)
        for line in comparison.lines
        for entry in line.entries
    }
    depths = {len(found.values[0]) for found in measured.values()}
    if len(depths) > 1:
        raise UsageError(f"These runs' backbones have different numbers of levels {sorted(depths)}: draw them apart.")
    rows = [
        {"level": level + 1, "name": line.name, "stage": stage + 1, "num_seen": num_seen}
        | _numbers([measured[entry.path].values[stage][level] for entry in line.entries])
        for level in range(depths.pop())
        for line in comparison.lines
        for stage, num_seen in enumerate(comparison.num_seen[1:])
    ]
    (num_images,) = {found.num_images for found in measured.values()}
    for row in rows:
        row |= {"images": num_images, "seed": wish.seed, "estimator": wish.estimator}
    panels = [
        Panel(f"After level {level}", [_curve(line, rows, "stage", level=level) for line in comparison.lines])
        for level in dict.fromkeys(row["level"] for row in rows)
    ]
    caption = (
        f"Linear CKA ({ESTIMATORS[wish.estimator]}) between the maps of the network after the first stage "
        f"and after each later stage, {comparison.title}, on {num_images:,} test images of the first stage's "
        f"classes. Maps are flattened: every channel at every position is a feature.{_spread(comparison.lines)}"
    )
    return Drawn(rendered(draw_curves(panels, "Stage", "CKA")), rows, caption, comparison.notes)


def _accuracy(entries: Sequence[Entry], wish: Wish) -> Drawn:
    """The supplement's curves: accuracy on the seen classes after each stage, a panel for each scenario."""
    compared = [_compared(group) for group in grouped(entries, setting).values()]
    rows = [
        {"panel": panel, "scenario": comparison.title, "name": line.name, "stage": stage, "num_seen": num_seen}
        | _numbers([100 * entry.report.overall[stage] for entry in line.entries])
        for panel, comparison in enumerate(compared, start=1)
        for line in comparison.lines
        for stage, num_seen in enumerate(comparison.num_seen)
    ]
    panels = [
        Panel(comparison.title, [_curve(line, rows, "num_seen", panel=panel) for line in comparison.lines])
        for panel, comparison in enumerate(compared, start=1)
    ]
    caption = (
        "Accuracy on the test images of all classes seen so far after each stage, by each method's own rule of "
        f"prediction: {'; '.join(comparison.title for comparison in compared)}."
        f"{_spread([line for comparison in compared for line in comparison.lines])}"
    )
    notes = [note for comparison in compared for note in comparison.notes]
    return Drawn(rendered(draw_curves(panels, "Number of classes", "Accuracy (%)")), rows, caption, notes)


FIGURES: dict[str, Callable[[Sequence[Entry], Wish], Drawn]] = {"tsne": _tsne, "cka": _cka, "accuracy": _accuracy}


def _numbers(values: Sequence[float]) -> dict[str, Any]:
    """The values of several runs as columns."""
    value = Value.of(values)
    return {"runs": len(values), "mean": value.mean, "spread": value.spread if len(values) > 1 else None}


def _spread(lines: Sequence[Line]) -> str:
    """What lines and bands are, where there is a band."""
    return SPREAD if any(len(line.entries) > 1 for line in lines) else ""


def _compared(entries: Sequence[Entry]) -> Comparison:
    """The finished runs grouped by experiment."""
    comparison = compare(entries)
    if not comparison.lines:
        names = ", ".join(str(entry.path) for entry in entries)
        raise ModelError(f"No finished run among {names}: a figure shows whole runs. Finish one with ccfa resume.")
    return comparison


def _curve(line: Line, rows: Sequence[dict[str, Any]], x: str, **where: object) -> Curve:
    """The curve of a line, from the rows of its name."""
    own = [row for row in rows if row["name"] == line.name and all(row[key] == value for key, value in where.items())]
    spreads = [np.nan if row["spread"] is None else row["spread"] for row in own]
    family = str(hashed(without_ccfa(identity(line.entries[0]))["method"]))
    return Curve(
        line.name, family, line.entries[0].ccfa, [row[x] for row in own], [row["mean"] for row in own], spreads
    )


def _directory(entry: Entry) -> RunDirectory:
    if not entry.path.is_dir():
        raise ModelError(f"{entry.path} is a report alone; this figure needs the run directory with its networks.")
    return RunDirectory(entry.path)


def _said(entry: Entry) -> str:
    asked = entry.experiment
    return (
        f"{asked['method']}{' + CCFA' if entry.ccfa else ''} on {asked.get('data', '')} (seed {asked.get('seed', 0)})"
    )
