"""Reports of runs become values of cells, and what they do not cover is left to run."""

import json
import math
from dataclasses import replace

import pytest

from ccfa.errors import Notice, ResourceError
from ccfa.experiments.tables import (
    ORDERS,
    Setting,
    cell_for,
    cells,
    experiment_for,
    left_to_run,
    measured,
    read_results,
    steps,
    store_result,
)
from stored_results import PODNET, result_report

OURS = replace(PODNET, ccfa=True)


@pytest.fixture
def keep(tmp_path):
    """Store the report of a run, with changes to its experiment; return the file."""

    def kept(setting=PODNET, order="podnet-0", value=0.6, seed=1, **changes):
        report = result_report(setting, order, value, seed)
        report.config["experiment"] |= changes
        return store_result(report, tmp_path)

    return kept


def test_stored_reports_measure_their_cells(keep, tmp_path):
    path = keep(OURS, "podnet-1", 0.6543)
    assert path.parent.name == "cifar100-B50-inc10"
    (found,) = read_results(tmp_path)
    assert (found.path, found.setting, found.order) == (path, OURS, "podnet-1")
    ours = measured(cell_for(OURS), [found])
    assert ours.mean == pytest.approx(65.43)
    assert math.isnan(ours.spread)
    assert measured(cell_for(PODNET), [found]) is None


def test_orders_are_averaged_after_their_seeds(keep, tmp_path):
    for order, seed, value in [("podnet-0", 1, 0.60), ("podnet-0", 2, 0.62), ("podnet-1", 1, 0.65)]:
        keep(PODNET, order, value, seed)
    ours = measured(cell_for(PODNET), read_results(tmp_path))
    assert (ours.mean, ours.spread, len(ours.results)) == (pytest.approx(63.0), pytest.approx(4 / math.sqrt(2)), 3)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"memory": 20, "scenario": "50,10,10,10,10,10"}, True),
        ({"order": None}, True),  # the default is podnet-0
        ({"order": "seed-1993"}, False),
        ({"memory": 7}, False),
        ({"validation": 0.1}, False),
    ],
)
def test_which_experiments_count(keep, tmp_path, changes, counts):
    keep(**changes)
    results = read_results(tmp_path)
    assert any(measured(cell, results) for cell in cells()) == counts


def test_unfinished_and_damaged_reports_are_left_out(keep, tmp_path):
    keep()
    store_result(replace(result_report(PODNET, "podnet-1", 0.6), finished=False), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.warns(Notice, match=r"broken\.json"):
        assert len(read_results(tmp_path)) == 1


def test_a_method_that_has_changed_does_not_count(tmp_path):
    report = result_report(OURS, "podnet-0", 0.6)
    report.config["resolved"]["method"]["feature_augmentations"][0]["steps"] = 3
    path = store_result(report, tmp_path)
    with pytest.warns(Notice, match=path.name):
        assert read_results(tmp_path) == []


def test_stored_accuracies_are_short(keep):
    stored = json.loads(keep(value=1 / 3).read_text())["rules"]["logits"]
    assert stored["overall"][0] == 0.333333
    assert stored["metrics"]["average_incremental_accuracy"] == 1 / 3


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(ResourceError, match="results"):
        store_result(result_report(PODNET, "podnet-0", 0.6), tmp_path / "results")


def test_measured_runs_are_not_left(keep, tmp_path):
    both = [cell_for(PODNET), cell_for(OURS)]
    assert len(left_to_run(both, [])) == 6
    keep(OURS, "podnet-1")
    left = left_to_run(both, read_results(tmp_path))
    assert len(left) == 5
    assert experiment_for(OURS, "podnet-1", 1) not in left


def test_a_metric_that_earlier_reports_lack_is_missing(tmp_path):
    setting = replace(OURS, scenario="B50-inc1")
    report = result_report(setting, "podnet-0", 0.6)
    del report.metrics["forgetting_inclearn"]
    store_result(report, tmp_path)
    forgetting, accuracy = cell_for(setting, "forgetting_inclearn"), cell_for(setting)
    assert len(left_to_run([accuracy], read_results(tmp_path))) == 2
    assert len(left_to_run([accuracy, forgetting], read_results(tmp_path))) == 3


def test_the_most_valuable_runs_come_first():
    left = left_to_run(cells(), [])
    assert len({experiment.name for experiment in left}) == len(left)
    methods = [experiment.method for experiment in left]
    assert methods[:24] == ["podnet"] * 24
    assert [experiment.order for experiment in left[:3]] == list(ORDERS)
    assert methods.index("afc") < methods.index("ucir") < methods.index("aanet") < methods.index("icarl")
    assert {"mnemonics", "tpcil", "geodl"}.isdisjoint(methods)


@pytest.mark.parametrize(
    ("setting", "thousands"),
    [
        (Setting("cifar100", "B50-inc10", "podnet", ccfa=True), 42),
        (Setting("cifar100", "B50-inc2", "podnet", ccfa=True), 86),
        (Setting("cifar100", "B50-inc10", "podnet"), 74),
        (Setting("cifar100", "B50-inc10", "bic", options=(("loss", "inclearn"),)), 105),
    ],
)
def test_steps_of_a_run(setting, thousands):
    assert steps(setting) / 1000 == pytest.approx(thousands, abs=1.5)
