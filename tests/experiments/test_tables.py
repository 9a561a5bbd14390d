"""The paper's numbers, the way from a cell of a table to an experiment and back, and what our runs say about a cell."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ccfa.errors import Notice
from ccfa.experiments.tables import (
    FURTHER,
    ORDERS,
    PAPERS,
    TABLES,
    PaperSetting,
    can_run,
    cell_for,
    cells,
    experiment_for,
    gpu_minutes,
    left_to_run,
    measured,
    read_results,
    setting_of,
    steps,
    store_result,
)
from ccfa.methods import METHODS
from ccfa.settings import Experiment
from stored_results import PODNET, result_report

PAPER = Path(__file__).parents[2].parent / "shared" / "paper.tex"
IN_THE_PAPER = ["main", "imagenet100,imagenet1000", "ablation", "mixing", "features", "memory"]
IN_THE_PAPER += ["initial", "direction", "supplement"]  # the order of its tabulars
OURS = replace(PODNET, ccfa=True)
ONE_BY_ONE = replace(PODNET, scenario="B50-inc1")


def test_every_number_is_there():
    assert [len(table.cells) for table in TABLES.values()] == [60, 32, 42, 28, 16, 16, 15, 20, 20, 12]
    assert len(cells()) == len({(cell.setting, cell.metric, cell.source) for cell in cells()}) == 217
    assert sum(cell.deviation is not None for cell in cells()) == 32
    assert {cell.setting.method for cell in cells()} <= METHODS.keys() | {"mnemonics", "tpcil"}
    assert PAPERS.keys() <= METHODS.keys()


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside the repository")
def test_numbers_and_labels_are_those_of_the_paper():
    tabulars = re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", PAPER.read_text(), re.DOTALL)
    for text, names in zip(tabulars, IN_THE_PAPER, strict=True):
        ours = []
        for row in [row for name in names.split(",") for row in TABLES[name].rows.values()]:
            pairs = [(cell.value, cell.deviation if names == "supplement" else None) for cell in row if cell]
            ours.append([f"{number:.2f}" for pair in pairs for number in pair if number is not None])
        printed = re.sub(r"\\hspace\{[^}]*\}", "", text).split(r"\\")
        assert [found for row in printed if (found := re.findall(r"\b\d?\d\.\d\d\b", row))] == ours, names
        if names in ("main", "supplement"):
            labels = re.findall(r"^\s*(\w+)(?:\{(\*?)\})?~?\\cite\{\w+\}( *\+ *CCFA)?", text, re.MULTILINE)
            assert [name + star + " + CCFA" * bool(ccfa) for name, star, ccfa in labels] == list(TABLES[names].rows)


def test_misprints_are_no_targets():
    assert sorted((cell.setting.data, cell.setting.method, cell.value) for cell in cells() if not cell.is_target) == [
        ("imagenet100", "aanet", 74.33),
        ("imagenet1000", "afc", 67.02),
        ("imagenet1000", "afc", 67.02),
    ]
    wrong_deviations = [cell.value for cell in cells() if cell.slip and cell.is_target]
    assert wrong_deviations == [50.44, 56.61, 60.47, 63.76]


@pytest.mark.parametrize(
    ("setting", "value", "source"),
    [
        (ONE_BY_ONE, 57.84, "rerun"),
        (OURS, 67.24, "rerun"),
        (replace(ONE_BY_ONE, memory=5), 35.59, "copied"),
        (replace(OURS, scenario="B50-inc2", mix="mixup"), 64.05, "rerun"),
        (replace(OURS, scenario="B50-inc1", options=(("ccfa.count", "9"),)), 60.51, "rerun"),
        (replace(ONE_BY_ONE, method="geodl"), 52.28, "rerun"),
        (PaperSetting("cifar100", "B50-inc5", "bic", options=(("loss", "inclearn"),)), 53.21, "copied"),
        (PaperSetting("imagenet1000", "B500-inc50", "afc", memory=1), 52.36, "rerun"),
        (PaperSetting("imagenet100", "B50-inc10", "podnet", True, 1), 64.28, "rerun"),
    ],
)
def test_cells_of_settings(setting, value, source):
    cell = cell_for(setting)
    assert (cell.value, cell.source) == (value, source)


def test_other_metrics_have_cells_of_their_own():
    assert cell_for(replace(OURS, scenario="B50-inc1"), "forgetting_inclearn").value == 24.97
    assert cell_for(PaperSetting("cifar100", "B50-inc10", "il2a", True, None)) is None


def test_settings_become_experiments_and_back():
    further = [cell for table in FURTHER.values() for cell in table.cells]
    for setting in {cell.setting for cell in cells() + further if can_run(cell.setting)}:
        experiment = experiment_for(setting, "podnet-1", 3)
        assert (experiment.order, experiment.seed) == ("podnet-1", 3)
        assert setting_of(asdict(experiment)) == setting


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scenario": None}, {}),
        ({"scenario": "50,10,10,10,10,10"}, {}),
        ({"memory": 20, "order": "podnet-2", "seed": 7, "batch_seed": 8}, {}),
        ({"options": {"memory": "10"}}, {"memory": 10}),
        ({"options": {"memory": "10"}, "memory": 20}, {}),
        ({"options": {"epochs": "160", "nca": "code", "lr": "0.10"}}, {}),
        ({"options": {"nca": "paper", "epochs": "5"}}, {"options": (("epochs", "5"), ("nca", "paper"))}),
        ({"ccfa": True, "options": {"ccfa.count": "5", "ccfa.target": "most-confident"}}, {"ccfa": True}),
        ({"mix": "cutmix", "options": {"mix.alpha": "1"}}, {"mix": "cutmix"}),
        ({"validation": 0.1}, None),
        ({"memory_total": 2000}, {"memory": None, "memory_total": 2000}),
        ({"data": "digits"}, None),
        ({"method": "another"}, None),
        ({"of_another_version": 1}, None),
    ],
)
def test_settings_of_experiments(changes, expected):
    experiment = asdict(Experiment("podnet", data="cifar100", scenario="B50-inc10")) | changes
    assert setting_of(experiment) == (None if expected is None else replace(PODNET, **expected))


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
    [({"order": None}, True), ({"order": "seed-1993"}, False), ({"memory": 7}, False)],  # the default is podnet-0
)
def test_which_experiments_count(keep, tmp_path, changes, counts):
    keep(**changes)
    results = read_results(tmp_path)
    assert any(measured(cell, results) for cell in cells()) == counts


def test_unfinished_damaged_and_outdated_reports_are_left_out(keep, tmp_path):
    keep()
    store_result(replace(result_report(PODNET, "podnet-1", 0.6), finished=False), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    report = result_report(OURS, "podnet-0", 0.6)
    report.config["resolved"]["method"]["feature_augmentations"][0]["steps"] = 3
    path = store_result(report, tmp_path)
    with pytest.warns(Notice, match=r"broken\.json"), pytest.warns(Notice, match=path.name):
        assert len(read_results(tmp_path)) == 1


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
    assert {"mnemonics", "tpcil"}.isdisjoint(methods)


@pytest.mark.parametrize(
    ("setting", "thousands"),
    [
        (PODNET, 74),
        (PaperSetting("imagenet100", "B50-inc10", "podnet"), 195.4),
        (OURS, 42),
        (replace(PODNET, method="bic", options=(("loss", "inclearn"),)), 105),
    ],
)
def test_steps_of_a_run(setting, thousands):
    assert steps(setting) / 1000 == pytest.approx(thousands, abs=1.5)


def test_a_smaller_backbone_costs_less():
    rows = FURTHER["field"].rows
    wide, narrow = (rows[name][0].setting for name in ("DER without pruning", "DER without pruning, ResNet-32"))
    assert steps(narrow) == steps(wide)
    assert gpu_minutes(narrow) < gpu_minutes(wide)
