import re

import numpy as np
import pytest

from ccfa.reporting import costs, sections
from ccfa.reporting.classes import class_table
from ccfa.reporting.confusions import by_stage, confused_pairs, confusion_counts, old_and_new
from ccfa.reporting.rundata import read_run
from synthetic_runs import synthetic_resolved, synthetic_run

NUM_SEEN = [2, 4, 6, 8]


@pytest.fixture(scope="module", params=["podnet", "icarl"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    resolved = synthetic_resolved([f"c{number}" for number in range(8)], side=8, method=request.param, ccfa=False)
    synthetic_run(path, resolved)
    return read_run(path)


def predictions(run, stage):
    """Read apart from the page's own reader."""
    rule = "by_nearest_mean" if run.config["experiment"]["method"] == "icarl" else "by_logits"
    return run.predictions[stage]["labels"], run.predictions[stage][rule]


def numbers(figure, column):
    return [float(row[column]) for row in figure.table[1]]


def test_accuracy_after_each_stage(run):
    expected = [100 * np.mean(np.equal(*predictions(run, stage))) for stage in range(4)]
    figure = sections.accuracy_figure(run)
    np.testing.assert_allclose(numbers(figure, 2), expected, atol=0.051)
    assert len(figure.table[0]) == 4  # stage, classes seen, the method's own rule, the other
    for value in expected:
        assert f"rule: {value:.1f} %" in figure.chart


def test_accuracy_matrix(run):
    figure = sections.matrix_figure(run)
    for after, row in enumerate(figure.table[1]):
        labels, predicted = predictions(run, after)
        for stage in range(4):
            images = labels // 2 == stage
            if stage > after:
                assert row[stage + 1] == ""
            else:
                assert float(row[stage + 1]) == pytest.approx(
                    100 * np.mean(predicted[images] == labels[images]), abs=0.051
                )


def test_heat_map_carries_the_values_it_draws(run):
    values = re.search(r'data-values="([^"]*)"', sections.matrix_figure(run).chart).group(1)
    cells = [row.split(",") for row in values.split(";")]
    table = [row[1:] for row in sections.matrix_figure(run).table[1]]
    assert [[cell and float(cell) for cell in row] for row in cells] == [[c and float(c) for c in row] for row in table]


def test_forgetting_is_the_mean_drop_from_the_best_earlier_accuracy(run):
    matrix = np.full((4, 4), np.nan)
    for after in range(4):
        labels, predicted = predictions(run, after)
        for stage in range(after + 1):
            matrix[after, stage] = np.mean(predicted[labels // 2 == stage] == labels[labels // 2 == stage])
    expected = [
        100 * np.mean([max(matrix[i, j] for i in range(j, last)) - matrix[last, j] for j in range(last)])
        for last in range(1, 4)
    ]
    np.testing.assert_allclose(numbers(sections.forgetting_figure(run), 1), expected, atol=0.051)


def test_shares_of_old_and_new_images(run):
    for one in old_and_new(run):
        labels, predicted = predictions(run, one.stage)
        num_old = NUM_SEEN[one.stage - 1]
        old = [(t, p) for t, p in zip(labels, predicted, strict=True) if t < num_old]
        new = [(t, p) for t, p in zip(labels, predicted, strict=True) if t >= num_old]
        assert one.old_right == pytest.approx(sum(t == p for t, p in old) / len(old))
        assert one.old_as_new == pytest.approx(sum(p >= num_old for t, p in old) / len(old))
        assert one.new_as_old == pytest.approx(sum(p < num_old for t, p in new) / len(new))
        assert one.old_right + one.old_as_other_old + one.old_as_new == pytest.approx(1)
        assert one.new_right + one.new_as_other_new + one.new_as_old == pytest.approx(1)


def test_confusion_counts_and_pairs(run):
    labels, predicted = predictions(run, 3)
    counts = np.zeros((8, 8), dtype=int)
    for true, other in zip(labels, predicted, strict=True):
        counts[true, other] += 1
    np.testing.assert_array_equal(confusion_counts(run), counts)
    pairs = confused_pairs(run)
    off_diagonal = sorted((counts[t, p] for t in range(8) for p in range(8) if t != p), reverse=True)
    assert [pair.num_images for pair in pairs] == [count for count in off_diagonal[:10] if count]
    for pair in pairs:
        assert pair.num_images == counts[pair.true, pair.predicted] == len(pair.rows)
        assert pair.share == pair.num_images / counts[pair.true].sum()
        assert all(labels[row] == pair.true and predicted[row] == pair.predicted for row in pair.rows)
    grouped = by_stage(counts, NUM_SEEN)
    assert grouped.sum() == counts.sum()
    assert grouped[1, 2] == counts[2:4, 4:6].sum()


def test_table_of_classes(run):
    headings, rows = class_table(run)
    labels, predicted = predictions(run, 3)
    for label, row in enumerate(rows):
        cells = dict(zip(headings, row, strict=True))
        then_labels, then = predictions(run, label // 2)
        learned = 100 * np.mean(then[then_labels == label] == label)
        now = 100 * np.mean(predicted[labels == label] == label)
        assert cells["class"] == f"c{label}"
        assert cells["stage"] == str(label // 2)
        assert float(cells["when learned, %"]) == pytest.approx(learned, abs=0.051)
        assert float(cells["now, %"]) == pytest.approx(now, abs=0.051)
        assert float(cells["drop, points"]) == pytest.approx(learned - now, abs=0.051)


def test_time_throughput_and_losses(run):
    assert numbers(costs.time_figure(run), 1) == [10.0, 11.0, 12.0, 13.0]
    assert "46.0 s in all" in costs.time_figure(run).meaning
    assert costs.throughput_figure(run).table[1] == [[str(stage), "1,000"] for stage in range(4)]
    loss, parts = costs.loss_figures(run)
    assert loss.table[0] == ["last epoch of stage", "main", "balanced"]
    assert loss.table[1][0] == ["0", f"{2 / 20 + 0.5:.4f}", f"{2 / 5 + 0.5:.4f}"]
    assert parts.table[0] == ["last epoch of stage", "classification", "pod_flat"]


def test_many_epochs_are_joined_within_a_stage_and_phase(tmp_path):
    resolved = synthetic_resolved(["a", "b", "c", "d"], side=8)
    synthetic_run(tmp_path / "run", resolved, epochs=800)
    loss, _ = costs.loss_figures(read_run(tmp_path / "run"))
    assert "mean of up to 5 epochs" in loss.meaning
    first = np.mean([2 / (epoch + 1) + 0.5 for epoch in range(5)])
    assert f"epoch of the run 0\nmain: {first:.3f}<" in loss.chart
    assert f"epoch of the run 800\nbalanced: {first:.3f}<" in loss.chart
