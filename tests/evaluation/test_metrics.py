import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccfa.errors import DataError
from ccfa.evaluation import metrics

NAN = math.nan
MATRIX = np.array([[0.8, NAN, NAN], [0.9, 0.8, NAN], [0.6, 0.3, 0.5]])
BOUNDARIES = [4, 6, 10]


@st.composite
def runs(draw, min_stages=1):
    """Predictions, labels and boundaries of a random run; every class has at least one test image."""
    new_classes = draw(st.lists(st.integers(1, 12), min_size=min_stages, max_size=5))
    boundaries = np.cumsum(new_classes).tolist()
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
    """Every metric from its formula, with 1-based stages, sets of classes and exact fractions."""
    t = len(boundaries)
    starts = [0, *boundaries]
    task = {r: set(range(starts[r - 1], starts[r])) for r in range(1, t + 1)}
    seen = {s: set(range(boundaries[s - 1])) for s in range(1, t + 1)}
    a, overall, old = {}, {}, {}  # a[r, s]: classes of stage r after stage s
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
        return expected | {name: NAN for name in metrics.DEFINITIONS if name not in expected}
    maximum = first = lee = Fraction(0)
    for r in range(1, t):
        maximum += max(a[r, s] for s in range(r, t)) - a[r, t]
        first += a[r, r] - a[r, t]
    for s in range(2, t + 1):
        for r in range(1, s):
            lee += Fraction(len(task[r]), len(seen[s])) * (a[r, r] - a[r, s])
    return expected | {
        "forgetting_inclearn": slow_inclearn(predictions, labels),
        "forgetting_max_minus_last": maximum / (t - 1),
        "forgetting_first_minus_last": first / (t - 1),
        "forgetting_lee2019": lee / (t - 1),
        "new_class_accuracy": sum(a[s, s] for s in range(2, t + 1)) / (t - 1),
        "old_class_accuracy": sum(old.values()) / (t - 1),
    }


@settings(max_examples=60, deadline=None)
@given(runs())
def test_summary_equals_the_formulas(run):
    ours, expected = metrics.summary(*run), slow_summary(*run)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name] == pytest.approx(float(value), abs=1e-12, nan_ok=True), name


@settings(max_examples=30, deadline=None)
@given(runs())
def test_matrix_equals_counted_accuracies(run):
    predictions, labels, boundaries = run
    matrix = metrics.accuracy_matrix(*run)
    starts = [0, *boundaries]
    for i in range(len(boundaries)):
        for j in range(len(boundaries)):
            if j > i:
                assert math.isnan(matrix[i, j])
            else:
                classes = range(starts[j], starts[j + 1])
                assert matrix[i, j] == float(slow_accuracy(predictions[i], labels[i], classes))


def value(name, matrix, boundaries=BOUNDARIES, overall=(0.9, 0.5, 0.4)):
    """A metric that needs no predictions."""
    return metrics.METRICS[name].of(metrics.Evaluated([], [], boundaries, np.array(overall), matrix))


@pytest.mark.parametrize("matrix", [MATRIX, np.where(np.isnan(MATRIX), 7.0, MATRIX)])
def test_metrics_of_a_matrix_by_hand(matrix):
    """Entries above the diagonal are never read."""
    assert value("forgetting_max_minus_last", matrix) == pytest.approx((0.3 + 0.5) / 2)
    assert value("forgetting_first_minus_last", matrix) == pytest.approx((0.2 + 0.5) / 2)
    lee = (4 / 6 * -0.1 + (4 / 10 * 0.2 + 2 / 10 * 0.5)) / 2
    assert value("forgetting_lee2019", matrix) == pytest.approx(lee)
    assert value("new_class_accuracy", matrix) == pytest.approx(0.65)
    assert value("average_incremental_accuracy", matrix) == pytest.approx(0.6), "stage 0 counts, nothing is weighted"
    assert value("last_accuracy", matrix) == 0.4


def test_inclearn_counts_tens_of_classes():
    """Stages of 5, 10 and 10 classes: the tens 0-9, 10-19 and 20-24, of which the last is new at the end."""
    labels = [np.arange(5), np.arange(15), np.arange(25)]
    predictions = [true.copy() for true in labels]
    predictions[1][:4] = 14  # the first ten at 0.6, after 1.0 for its first half
    predictions[2][:7] = 24  # at 0.3
    predictions[2][10:12] = 24  # the second ten at 0.8, after 1.0 for its first half
    expected = ((1.0 - 0.3) + (1.0 - 0.8) + (0.0 - 1.0)) / 4
    assert metrics.forgetting_inclearn(predictions, labels) == pytest.approx(expected)


def test_maximum_leaves_the_last_stage_out():
    risen = np.array([[0.5, NAN, NAN], [0.7, 0.8, NAN], [0.9, 0.8, 0.5]])
    assert value("forgetting_max_minus_last", risen) == pytest.approx((0.7 - 0.9) / 2)
    assert value("forgetting_first_minus_last", risen) == pytest.approx((0.5 - 0.9) / 2)


def test_lee_weighs_by_classes_and_not_by_images():
    twice_the_classes = [2 * boundary for boundary in BOUNDARIES]
    assert metrics.forgetting_lee2019(MATRIX, twice_the_classes) == pytest.approx(
        metrics.forgetting_lee2019(MATRIX, BOUNDARIES)
    )
    assert metrics.forgetting_lee2019(MATRIX, [8, 9, 10]) > metrics.forgetting_lee2019(MATRIX, BOUNDARIES)


def test_old_classes_count_by_image():
    labels = [np.array([0]), np.array([0, 1]), np.array([0, 1, 1, 1, 2])]
    predictions = [np.array([0]), np.array([0, 0]), np.array([2, 1, 1, 0, 0])]
    assert metrics.old_class_accuracy(predictions, labels, [1, 2, 3]) == pytest.approx((1 + 2 / 4) / 2)


@settings(max_examples=40, deadline=None)
@given(runs(min_stages=2))
def test_accuracies_add_up(run):
    predictions, labels, boundaries = run
    matrix = metrics.accuracy_matrix(*run)
    overall = metrics.overall_accuracies(predictions, labels)
    for i, true in enumerate(labels):
        num_images = np.histogram(true, bins=[0, *boundaries[: i + 1]])[0]
        assert np.average(matrix[i, : i + 1], weights=num_images) == pytest.approx(overall[i])
    values = metrics.summary(*run)
    assert values["forgetting_max_minus_last"] >= values["forgetting_first_minus_last"] - 1e-12
    if len(boundaries) == 2:
        share = boundaries[0] / boundaries[1]
        assert values["forgetting_max_minus_last"] == values["forgetting_first_minus_last"]
        assert values["forgetting_lee2019"] == pytest.approx(share * values["forgetting_first_minus_last"])


@settings(max_examples=20, deadline=None)
@given(runs(min_stages=2))
def test_perfect_predictions_forget_nothing(run):
    _, labels, boundaries = run
    for name, value in metrics.summary(labels, labels, boundaries).items():
        if name != "forgetting_inclearn":
            assert value == (0.0 if name.startswith("forgetting") else 1.0), name


def test_always_the_newest_class_forgets_everything():
    labels = [np.arange(seen) for seen in (1, 2, 3)]
    newest = [np.full(seen, seen - 1) for seen in (1, 2, 3)]
    values = metrics.summary(newest, labels, [1, 2, 3])
    assert values["forgetting_max_minus_last"] == values["forgetting_first_minus_last"] == 1
    assert values["forgetting_lee2019"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert values["new_class_accuracy"] == 1
    assert values["old_class_accuracy"] == 0
    assert values["last_accuracy"] == pytest.approx(1 / 3)


def test_one_stage_has_no_forgetting():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = metrics.summary([np.array([0, 1, 1])], [np.array([0, 1, 0])], [2])
    assert values["average_incremental_accuracy"] == values["last_accuracy"] == pytest.approx(2 / 3)
    undefined = {name for name, value in values.items() if math.isnan(value)}
    assert undefined == set(metrics.DEFINITIONS) - {"average_incremental_accuracy", "last_accuracy"}


@pytest.mark.parametrize(
    ("predictions", "labels", "boundaries", "named"),
    [
        ([[0]], [[0], [0, 1]], [1, 2], "1 stages"),
        ([], [], [], "at least one stage"),
        ([[]], [[]], [1], "at least one image"),
        ([[0, 1]], [[0, 1, 1]], [2], r"\(2,\)"),
        ([[0], [0, 1]], [[0], [0, 1]], [1], "2 stages"),
        ([[0], [0, 1]], [[0], [0, 1]], [1, 1], r"\[1, 1\]"),
        ([[0], [0, 2]], [[0], [0, 1]], [1, 2], "predictions of stage 1"),
        ([[0], [0, 1]], [[0], [0, 2]], [1, 2], "labels of stage 1"),
        ([[0], [0, -1]], [[0], [0, 1]], [1, 2], r"-1\.\.0"),
        ([[0], [0.0, 1.0]], [[0], [0, 1]], [1, 2], "float64"),
        ([[0], [1, 1]], [[0], [1, 1]], [1, 2], "seen at stage 0"),
        ([[0], [0, 0]], [[0], [0, 0]], [1, 2], "seen at stage 1"),
    ],
)
def test_unfit_arrays_are_refused(predictions, labels, boundaries, named):
    arrays = [[np.array(rows) for rows in stages] for stages in (predictions, labels)]
    with pytest.raises(DataError, match=named):
        metrics.summary(*arrays, boundaries)
