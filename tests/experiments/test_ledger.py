import dataclasses
import json
import math

import pytest

from ccfa.errors import Notice, ResourceError
from ccfa.experiments.cells import Setting, experiment_for
from ccfa.experiments.ledger import (
    ORDERS,
    can_run,
    gpu_minutes,
    left_to_run,
    measured,
    priority,
    read_results,
    steps,
    store_result,
)
from ccfa.experiments.options import plain
from ccfa.experiments.tables import cell_for, cells
from stored_results import PODNET, result_report

PLUGGED = dataclasses.replace(PODNET, ccfa=True)


def test_a_stored_report_is_found_again_as_the_cell_it_measures(tmp_path):
    report = result_report(PLUGGED, "podnet-1", 0.6543)
    path = store_result(report, tmp_path / "results")
    assert path.parent.name == "cifar100-B50-inc10"
    (found,) = read_results(tmp_path / "results")
    assert (found.path, found.setting, found.experiment.order) == (path, PLUGGED, "podnet-1")
    assert measured(cell_for(PLUGGED), [found]).mean == pytest.approx(65.43)
    assert measured(cell_for(PODNET), [found]) is None


def test_orders_are_averaged_after_their_seeds(tmp_path):
    for order, seed, value in [("podnet-0", 1, 0.60), ("podnet-0", 2, 0.62), ("podnet-1", 1, 0.65)]:
        store_result(result_report(PODNET, order, value, seed), tmp_path)
    ours = measured(cell_for(PODNET), read_results(tmp_path))
    assert (ours.mean, ours.spread, len(ours.results)) == (pytest.approx(63.0), pytest.approx(4 / math.sqrt(2)), 3)


def test_one_run_has_no_spread(tmp_path):
    store_result(result_report(PODNET, "podnet-0", 0.6), tmp_path)
    assert math.isnan(measured(cell_for(PODNET), read_results(tmp_path)).spread)


@pytest.mark.parametrize("changes", [{"validation": 0.1}, {"memory": 7}, {"options": {"epochs": "3"}}])
def test_other_settings_measure_no_cell(tmp_path, changes):
    report = result_report(PODNET, "podnet-0", 0.6)
    report.config["experiment"] |= changes
    store_result(report, tmp_path)
    assert all(measured(cell, read_results(tmp_path)) is None for cell in cells())


def test_a_typed_out_memory_of_twenty_is_the_papers_setting(tmp_path):
    report = result_report(PODNET, "podnet-0", 0.6)
    report.config["experiment"]["memory"] = 20
    store_result(report, tmp_path)
    assert measured(cell_for(PODNET), read_results(tmp_path))


def test_unfinished_runs_do_not_count(tmp_path):
    report = result_report(PODNET, "podnet-0", 0.6)
    store_result(dataclasses.replace(report, finished=False), tmp_path)
    assert read_results(tmp_path) == []


def test_a_damaged_report_is_left_out_with_a_warning(tmp_path):
    store_result(result_report(PODNET, "podnet-0", 0.6), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.warns(Notice, match=r"broken\.json"):
        assert len(read_results(tmp_path)) == 1


def test_stored_accuracies_are_short(tmp_path):
    report = result_report(PODNET, "podnet-0", 1 / 3)
    stored = json.loads(store_result(report, tmp_path).read_text())["rules"]["logits"]
    assert stored["overall"][0] == 0.333333
    assert stored["metrics"]["average_incremental_accuracy"] == 1 / 3


def test_what_is_measured_is_not_run_again(tmp_path):
    wanted = [cell_for(PODNET), cell_for(PLUGGED)]
    assert len(left_to_run(wanted, [])) == 6
    store_result(result_report(PLUGGED, "podnet-1", 0.6), tmp_path)
    left = left_to_run(wanted, read_results(tmp_path))
    assert experiment_for(PLUGGED, "podnet-1", 1) not in left
    assert len(left) == 5


def test_the_most_valuable_runs_come_first():
    left = left_to_run(cells(), [])
    methods = [experiment.method for experiment in left]
    assert methods[:24] == ["podnet"] * 24
    assert [left[place].order for place in range(3)] == list(ORDERS)
    assert methods.index("afc") < methods.index("ucir") < methods.index("aanet") < methods.index("icarl")
    plain_podnet = [e for e in left if e.method == "podnet" and not (e.options or e.mix or e.memory)]
    assert plain_podnet[-1].scenario.startswith(("B20", "B30", "B40"))


def test_each_run_is_listed_once():
    left = [json.dumps(plain(experiment), sort_keys=True) for experiment in left_to_run(cells(), [])]
    assert len(set(left)) == len(left)


def test_copied_cells_of_methods_that_do_not_exist_here_are_not_run():
    assert {"mnemonics", "tpcil", "geodl"}.isdisjoint(experiment.method for experiment in left_to_run(cells(), []))


@pytest.mark.parametrize(("scenario", "thousands"), [("B50-inc10", 42), ("B50-inc5", 52), ("B50-inc2", 86)])
def test_steps_of_a_run_without_its_first_stage(scenario, thousands):
    assert steps(Setting("cifar100", scenario, "podnet", ccfa=True)) / 1000 == pytest.approx(thousands, abs=1.5)


def test_costs_are_positive_for_everything_that_can_be_run():
    assert all(gpu_minutes(cell.setting) > 0 for cell in cells() if can_run(cell.setting))


def test_every_cell_has_a_priority():
    none = priority(dataclasses.replace(PODNET, memory=7))
    assert all(priority(cell.setting) < none for cell in cells())


def test_a_run_without_an_order_is_of_the_default_order(tmp_path):
    report = result_report(PODNET, "podnet-0", 0.6)
    store_result(report, tmp_path)
    report.config["experiment"]["order"] = None
    store_result(report, tmp_path)
    ours = measured(cell_for(PODNET), read_results(tmp_path))
    assert len(ours.results) == 2
    assert math.isnan(ours.spread)


def test_other_class_orders_do_not_count(tmp_path):
    store_result(result_report(PODNET, "seed-1993", 0.6), tmp_path)
    assert read_results(tmp_path) == []


def test_a_method_that_has_changed_since_does_not_count(tmp_path):
    report = result_report(PLUGGED, "podnet-0", 0.6)
    report.config["resolved"]["method"]["feature_augmentations"][0]["steps"] = 3
    store_result(report, tmp_path)
    with pytest.warns(Notice, match="another"):
        assert read_results(tmp_path) == []


def test_a_metric_that_earlier_reports_lack_is_still_missing(tmp_path):
    setting = dataclasses.replace(PLUGGED, scenario="B50-inc1")
    report = result_report(setting, "podnet-0", 0.6)
    del report.metrics["forgetting_inclearn"]
    store_result(report, tmp_path)
    forgetting, accuracy = cell_for(setting, "forgetting_inclearn"), cell_for(setting)
    assert len(left_to_run([accuracy], read_results(tmp_path))) == 2
    assert len(left_to_run([accuracy, forgetting], read_results(tmp_path))) == 3


def test_stage_sizes_typed_out_are_the_same_scenario(tmp_path):
    report = result_report(PODNET, "podnet-0", 0.6)
    report.config["experiment"]["scenario"] = "50,10,10,10,10,10"
    store_result(report, tmp_path)
    assert measured(cell_for(PODNET), read_results(tmp_path))


def test_a_results_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(ResourceError, match="results"):
        store_result(result_report(PODNET, "podnet-0", 0.6), tmp_path / "results")
