"""Metrics: against their formulas in exact fractions, and on arrays that do not fit."""

import math
import statistics
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccfa.errors import DataError
from ccfa.evaluation import Numbers, metrics


@st.composite
def runs(draw):
    """Predictions, labels and boundaries of a random run; every class has at least one test image."""
    boundaries = np.cumsum(draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))).tolist()
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_images = rng.integers(1, 6, boundaries[-1])  # per class: unequal, so that weightings differ
    labels = [rng.permutation(np.repeat(np.arange(seen), num_images[:seen])) for seen in boundaries]
    right = rng.random()
    predictions = [
        np.where(rng.random(len(true)) < right, true, rng.integers(0, seen, len(true)))
        for true, seen in zip(labels, boundaries, strict=True)
    ]
    return predictions, labels, boundaries


def slow_accuracy(predictions, labels, classes):
    """Exact accuracy on the images whose label is one of `classes`, image by image."""
    hits = [int(p) == int(y) for p, y in zip(predictions, labels, strict=True) if int(y) in classes]
    return Fraction(sum(hits), len(hits))


def slow_inclearn(predictions, labels):
    """The forgetting of PODNet's code, step by step: a dictionary of accuracies for each stage, the total in it."""
    stages = []
    for predicted, true in zip(predictions, labels, strict=True):
        accuracies = {"total": None}
        for first in range(0, max(true.tolist()) + 1, 10):
            accuracies[first] = round(float(slow_accuracy(predicted, true, range(first, first + 10))), 3)
        stages.append(accuracies)
    *earlier, last = stages
    total = 0.0
    for group in last:
        if group != "total":
            total += max([0.0] + [stage[group] for stage in earlier if group in stage]) - last[group]
    return total / len(last)


def slow_summary(predictions, labels, boundaries):
    """The matrix a[r, s] of the classes of stage r after stage s, from 1, and every metric from its formula."""
    t = len(boundaries)
    starts = [0, *boundaries]
    task = {r: set(range(starts[r - 1], starts[r])) for r in range(1, t + 1)}
    seen = {s: set(range(boundaries[s - 1])) for s in range(1, t + 1)}
    a, overall, old = {}, {}, {}
    for s in range(1, t + 1):
        overall[s] = slow_accuracy(predictions[s - 1], labels[s - 1], seen[s])
        for r in range(1, s + 1):
            a[r, s] = slow_accuracy(predictions[s - 1], labels[s - 1], task[r])
        if s > 1:
            old[s] = slow_accuracy(predictions[s - 1], labels[s - 1], seen[s - 1])
    expected = {
        "average_incremental_accuracy": sum(overall.values()) / t,
        "last_accuracy": overall[t],
    }
    if t == 1:
        return a, expected | {name: math.nan for name in metrics.DEFINITIONS if name not in expected}
    maximum = first = lee = Fraction(0)
    for r in range(1, t):
        maximum += max(a[r, s] for s in range(r, t)) - a[r, t]
        first += a[r, r] - a[r, t]
    for s in range(2, t + 1):
        for r in range(1, s):
            lee += Fraction(len(task[r]), len(seen[s])) * (a[r, r] - a[r, s])
    return a, expected | {
        "forgetting_inclearn": slow_inclearn(predictions, labels),
        "forgetting_max_minus_last": maximum / (t - 1),
        "forgetting_first_minus_last": first / (t - 1),
        "forgetting_lee2019": lee / (t - 1),
        "new_class_accuracy": sum(a[s, s] for s in range(2, t + 1)) / (t - 1),
        "old_class_accuracy": sum(old.values()) / (t - 1),
    }


@settings(max_examples=60, deadline=None)
@given(runs())
def test_metrics_equal_their_formulas(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = Numbers.of(*run)
    a, expected = slow_summary(*run)
    assert numbers.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert numbers.metrics[name] == pytest.approx(float(value), abs=1e-12, nan_ok=True), name
    for i, row in enumerate(numbers.accuracy_matrix):
        assert row == [None if j > i else float(a[j + 1, i + 1]) for j in range(len(row))]


def test_inclearn_counts_tens_of_classes():
    """Stages of 5, 10 and 10 classes: the tens 0-9, 10-19 and 20-24, of which the last is new at the end."""
    labels = [np.arange(5), np.arange(15), np.arange(25)]
    predictions = [true.copy() for true in labels]
    predictions[1][:4] = 14  # the first ten at 0.6, after 1.0 for its first half
    predictions[2][:7] = 24  # at 0.3
    predictions[2][10:12] = 24  # the second ten at 0.8, after 1.0 for its first half
    expected = ((1.0 - 0.3) + (1.0 - 0.8) + (0.0 - 1.0)) / 4
    assert Numbers.of(predictions, labels, [5, 15, 25]).metrics["forgetting_inclearn"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "labels", "boundaries", "named"),
    [
        ([[]], [[]], [1], "at least one image"),
        ([[0, 1]], [[0, 1, 1]], [2], r"\(2,\)"),
        ([[0], [0, 2]], [[0], [0, 1]], [1, 2], "predictions of stage 1"),
        ([[0], [0, -1]], [[0], [0, 1]], [1, 2], r"-1\.\.0"),
        ([[0], [1, 1]], [[0], [1, 1]], [1, 2], "seen at stage 0"),
    ],
)
def test_unfit_arrays_are_refused(predictions, labels, boundaries, named):
    arrays = [[np.array(rows) for rows in stages] for stages in (predictions, labels)]
    with pytest.raises(DataError, match=named):
        Numbers.of(*arrays, boundaries)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_spread_is_the_sample_deviation(values):
    mean, spread = metrics.mean_and_spread(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert spread == pytest.approx(statistics.stdev(values), abs=1e-9)
    assert math.isnan(metrics.mean_and_spread(values[:1])[1])
    assert math.isnan(metrics.mean_and_spread([])[0])
