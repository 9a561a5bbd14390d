import doctest
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ccfa.experiments import cells as conversions
from ccfa.experiments import tables
from ccfa.experiments.building import experiment_method
from ccfa.experiments.options import schema
from ccfa.experiments.tables import (
    PAPERS,
    TABLES,
    Cell,
    Setting,
    cell_for,
    cells,
    cited_only,
    experiment_for,
    setting_of,
)
from ccfa.methods import METHODS
from ccfa.settings import Experiment

PAPER = Path(__file__).parents[2].parent / "shared" / "paper.tex"
PRINTED = {  # numbers in each table, and those among them that no earlier table has
    "main": (60, 60),
    "supplement": (32, 8),
    "imagenet100": (42, 42),
    "imagenet1000": (28, 28),
    "ablation": (16, 11),
    "mixing": (16, 14),
    "features": (15, 14),
    "memory": (20, 15),
    "initial": (20, 15),
    "direction": (12, 10),
}
IN_THE_PAPER = [  # the order of its tabulars
    ("main",),
    ("imagenet100", "imagenet1000"),
    ("ablation",),
    ("mixing",),
    ("features",),
    ("memory",),
    ("initial",),
    ("direction",),
    ("supplement",),
]
PODNET = Setting("cifar100", "B50-inc1", "podnet")


def printed(name):
    return [cell for row in TABLES[name].rows.values() for cell in row if cell]


def is_runnable(cell):
    """Whether the cell's method exists here with the options it needs."""
    method = cell.setting.method
    own = {name for name, _ in cell.setting.options if not name.startswith("ccfa.")}
    return method in METHODS and own <= schema(METHODS[method]).keys()


def test_every_table_has_its_numbers():
    earlier = set()
    counts = {}
    for name in TABLES:
        counts[name] = len(printed(name)), len(set(printed(name)) - earlier)
        earlier |= set(printed(name))
    assert counts == PRINTED
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [261, 217]


def test_distinct_cells():
    assert len(cells()) == len(set(cells())) == 217
    assert sum(cell.deviation is not None for cell in cells()) == 32
    measured = [(cell.setting, cell.metric, cell.source) for cell in cells()]
    assert len(set(measured)) == 217, "a number for each setting, metric and source"


def test_tables_are_rectangular():
    for name, table in TABLES.items():
        assert table.name == name
        assert table.title
        assert all(len(row) == len(table.columns) for row in table.rows.values())


def numbers(text):
    """The accuracies of each row of a tabular, in order."""
    rows = re.sub(r"\\hspace\{[^}]*\}", "", text).split(r"\\")
    return [found for row in rows if (found := re.findall(r"\d\.\d\d\b|\d\d\.\d\d\b", row))]


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside the repository")
def test_numbers_are_those_of_the_paper():
    tabulars = re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", PAPER.read_text(), re.DOTALL)
    assert len(tabulars) == len(IN_THE_PAPER)
    for text, names in zip(tabulars, IN_THE_PAPER, strict=True):
        ours = []
        for row in [row for name in names for row in TABLES[name].rows.values()]:
            known = [cell for cell in row if cell]
            deviations = [cell.deviation for cell in known] if names == ("supplement",) else [None] * len(known)
            pairs = zip([cell.value for cell in known], deviations, strict=True)
            ours.append([f"{number:.2f}" for pair in pairs for number in pair if number is not None])
        assert numbers(text) == ours, names


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside the repository")
@pytest.mark.parametrize(("place", "name"), [(0, "main"), (-1, "supplement")])
def test_labels_are_those_of_the_paper(place, name):
    tabular = re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", PAPER.read_text(), re.DOTALL)[place]
    labels = re.findall(r"^\s*(\w+)(?:\{(\*?)\})?~?\\cite\{\w+\}( *\+ *CCFA)?", tabular, re.MULTILINE)
    assert [method + star + " + CCFA" * bool(ccfa) for method, star, ccfa in labels] == list(TABLES[name].rows)


def test_slips_are_no_targets():
    slips = {(cell.setting.data, cell.setting.scenario, cell.setting.method) for cell in cells() if not cell.is_target}
    assert slips == {
        ("imagenet100", "B50-inc5", "aanet"),
        ("imagenet1000", "B500-inc100", "afc"),
        ("imagenet1000", "B500-inc50", "afc"),
    }
    assert sorted(cell.value for cell in cells() if not cell.is_target) == [67.02, 67.02, 74.33]


def test_a_wrong_deviation_leaves_a_target():
    wrong = [cell for cell in cells() if cell.slip and cell.is_target]
    assert [(cell.value, cell.deviation) for cell in wrong] == [(v, 0.32) for v in (50.44, 56.61, 60.47, 63.76)]


@pytest.mark.parametrize(
    ("setting", "value", "source"),
    [
        (PODNET, 57.84, "rerun"),
        (replace(PODNET, ccfa=True), 60.69, "rerun"),
        (replace(PODNET, ccfa=True, scenario="B50-inc10"), 67.24, "rerun"),
        (replace(PODNET, memory=5), 35.59, "copied"),
        (replace(PODNET, scenario="B20-inc1"), 47.68, "copied"),
        (replace(PODNET, scenario="B50-inc5", memory=1), 35.18, "rerun"),
        (replace(PODNET, scenario="B50-inc2", ccfa=True, mix="mixup"), 64.05, "rerun"),
        (replace(PODNET, ccfa=True, options=(("ccfa.count", "9"),)), 60.51, "rerun"),
        (Setting("cifar100", "B50-inc1", "ucir"), 50.44, "rerun"),
        (Setting("cifar100", "B50-inc2", "gdumb"), 59.97, "rerun"),
        (Setting("cifar100", "B50-inc1", "geodl"), 52.28, "rerun"),
        (Setting("cifar100", "B50-inc5", "icarl"), 53.78, "copied"),
        (Setting("cifar100", "B50-inc5", "il2a", True, None), 60.78, "rerun"),
        (Setting("imagenet1000", "B500-inc50", "afc", memory=1), 52.36, "rerun"),
        (Setting("cifar100", "B50-inc10", "il2a", True, None), None, None),
        (Setting("cifar100", "B0-inc10", "podnet"), None, None),
    ],
)
def test_cells_of_settings(setting, value, source):
    cell = cell_for(setting)
    assert (cell.value, cell.source) == (value, source) if value else cell is None


def test_the_metrics_have_cells_of_their_own():
    ours = replace(PODNET, ccfa=True)
    assert cell_for(ours, "forgetting_inclearn").value == 24.97
    assert cell_for(ours, "new_class_accuracy").value == 68.94
    assert sum(cell.metric != "average_incremental_accuracy" for cell in cells()) == 10


def test_comparisons_are_with_the_published_podnet():
    published = TABLES["main"].rows["PODNet"]
    assert TABLES["ablation"].rows["(d) PODNet"] == published[:1]
    assert TABLES["memory"].rows["PODNet"][2] == TABLES["initial"].rows["PODNet"][3] == published[0]
    assert TABLES["direction"].rows["PODNet"][3] == published[2]
    assert {cell.source for cell in published} == {"copied"}


def test_imagenet_has_one_feature_per_image():
    settings = [cell.setting for cell in printed("imagenet100") + printed("imagenet1000")]
    assert {(setting.ccfa, setting.options) for setting in settings} == {(False, ()), (True, (("ccfa.count", "1"),))}


def test_only_methods_that_do_not_exist_here_are_cited():
    assert {name.lower() for name in cited_only()} == {"mnemonics", "tpcil", "geodl"} - METHODS.keys()
    assert [cell and cell.value for cell in cited_only()["TPCIL"]] == [None, None, 63.58, 65.34]


def test_the_papers_are_of_methods_that_exist():
    assert set(PAPERS) <= set(METHODS)
    assert {cell.setting.method for cell in cells()} <= set(METHODS) | {"mnemonics", "tpcil", "geodl"}


@pytest.mark.parametrize("name", TABLES)
def test_cells_become_experiments_and_back(name):
    runnable = [cell for cell in printed(name) if is_runnable(cell)]
    assert runnable
    for cell in runnable:
        if cell.setting.data != "cifar100":
            continue  # ImageNet is not among the data sets yet
        experiment = experiment_for(cell, "podnet-1", 3)
        assert (experiment.order, experiment.seed) == ("podnet-1", 3)
        assert (experiment_method(experiment).memory.per_class or None) == cell.setting.memory
        assert setting_of(asdict(experiment)) == cell.setting


def test_the_default_memory_is_not_typed_out():
    memories = {experiment_for(cell, None, 0).memory for cell in printed("memory") if is_runnable(cell)}
    assert memories == {5, 10, None, 50}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        ({"scenario": None}, {"scenario": "B50-inc10"}),
        ({"memory": 20}, {}),
        ({"memory": 5}, {"memory": 5}),
        ({"options": {"memory": "20"}}, {}),
        ({"options": {"memory": "10"}}, {"memory": 10}),
        ({"options": {"memory": "10"}, "memory": 20}, {}),
        ({"options": {"epochs": "160", "nca": "code", "lr": "0.10"}}, {}),
        ({"options": {"nca": "paper", "epochs": "5"}}, {"options": (("epochs", "5"), ("nca", "paper"))}),
        ({"ccfa": True, "options": {"ccfa.count": "5", "ccfa.target": "most-confident"}}, {"ccfa": True}),
        ({"mix": "cutmix", "options": {"mix.alpha": "1"}}, {"mix": "cutmix"}),
        ({"order": "podnet-2", "seed": 7, "batch_seed": 8}, {}),
        ({"validation": 0.1}, None),
        ({"memory_total": 2000}, None),
        ({"data": "digits"}, None),
        ({"method": "another"}, None),
        ({"options": {"of_another_version": "1"}}, None),
        ({"options": {"epochs": 5}}, None),
        ({"of_another_version": 1}, None),
    ],
)
def test_settings_of_experiments(asked, expected):
    experiment = asdict(Experiment("podnet", data="cifar100", scenario="B50-inc1")) | asked
    assert setting_of(experiment) == (None if expected is None else replace(PODNET, **expected))


@pytest.mark.parametrize("method", ["afc", "aanet", "replay"])
def test_defaults_of_a_method_built_on_another_are_dropped(method):
    asked = {"method": method, "data": "cifar100"}
    assert setting_of({**asked, "options": {"batch_size": "128"}}) == setting_of(asked)
    assert setting_of({**asked, "options": {"batch_size": "64"}}).options == (("batch_size", "64"),)


def test_a_method_without_exemplars_has_no_memory():
    assert setting_of({"method": "il2a", "data": "cifar100"}).memory is None


def test_ccfa_improves_most_reruns():
    """All of CIFAR-100's main tables; in the paper one cell of ImageNet-100 is lower with CCFA."""
    lower = []
    for name in ("main", "supplement", "imagenet100", "imagenet1000"):
        rows = TABLES[name].rows
        for label in [label for label in rows if "CCFA" in label]:
            for plugged, alone in zip(rows[label], rows[label.replace(" + CCFA", "")], strict=True):
                assert isinstance(plugged, Cell)
                assert isinstance(alone, Cell)
                lower += [(label, plugged.value)] if plugged.value < alone.value else []
    assert lower == [("AFC* + CCFA, 5 tasks", 76.75)]


def test_examples_are_true():
    for module in (tables, conversions):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed
