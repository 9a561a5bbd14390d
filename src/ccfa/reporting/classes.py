"""The classes of a run one by one: how well each is known, what it is taken for, and the exemplars kept of it."""

from typing import NamedTuple

import numpy as np

from ccfa.reporting.axes import number
from ccfa.reporting.confusions import Pair, confusion_counts
from ccfa.reporting.pictures import NO_THUMBNAILS, Pictures, strip
from ccfa.reporting.rendering import percent
from ccfa.reporting.rundata import RunData
from ccfa.reporting.sections import Table, shortened


class Confusion(NamedTuple):
    """A pair of classes as the page shows it."""

    true: str
    predicted: str
    stages: str
    num_images: int
    share: str
    num_pictures: int
    picture: str  # empty where there is none


class Kept(NamedTuple):
    """The exemplars of a class as the page shows them."""

    name: str
    num_exemplars: int
    num_pictures: int
    picture: str


def class_table(run: RunData) -> Table | None:
    """For each class: stage of arrival, test images, accuracy when learned and now, drop, most confused with."""
    if not run.predictions:
        return None
    counts = confusion_counts(run)
    num_images = counts.sum(axis=1)
    now = counts.diagonal() / num_images
    others = counts - np.diag(counts.diagonal())
    rows = []
    for label, (stage, learned) in enumerate(_accuracy_when_learned(run)):
        other = int(others[label].argmax())
        most = f"{run.class_name(other)} ({percent(others[label, other] / num_images[label])} %)"
        rows.append(
            [
                run.class_name(label),
                str(stage),
                str(num_images[label]),
                percent(learned),
                percent(float(now[label])),
                number(100 * (learned - float(now[label]))),
                most if others[label, other] else "-",
            ]
        )
    headings = ["class", "stage", "test images", "when learned, %", "now, %", "drop, points", "most confused with"]
    return headings, rows


def confusions(run: RunData, pairs: list[Pair], pictures: Pictures | None) -> list[Confusion]:
    """The most confused pairs with pictures of them."""
    stage_of = np.searchsorted(run.num_seen, np.arange(run.num_seen[-1] if run.num_seen else 0), side="right")
    shown = []
    for pair in pairs:
        images = pictures.of_pair(pair) if pictures else NO_THUMBNAILS
        shown.append(
            Confusion(
                run.class_name(pair.true),
                run.class_name(pair.predicted),
                f"learned at stages {stage_of[pair.true]} and {stage_of[pair.predicted]}",
                pair.num_images,
                percent(pair.share),
                len(images),
                strip(images),
            )
        )
    return shown


def exemplars(run: RunData, pictures: Pictures | None) -> list[Kept]:
    """What is kept of each class, with pictures of the first ones."""
    shown = []
    for label, rows in enumerate(run.exemplars or []):
        images = pictures.of_class(label) if pictures else NO_THUMBNAILS
        shown.append(Kept(shortened(run.class_name(label), 80), len(rows), len(images), strip(images)))
    return shown if any(kept.num_exemplars for kept in shown) else []


def _accuracy_when_learned(run: RunData) -> list[tuple[int, float]]:
    """Stage of arrival and accuracy after it, for each class."""
    found = []
    predicted = run.predicted(run.own_rule)
    for stage, (first, last) in enumerate(zip([0, *run.num_seen], run.num_seen, strict=False)):
        for label in range(first, last):
            images = run.labels[stage] == label
            found.append((stage, float(np.mean(predicted[stage][images] == label))))
    return found
