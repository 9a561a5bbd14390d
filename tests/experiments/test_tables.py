"""The paper's numbers, and the way from a cell of a table to an experiment and back."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ccfa.experiments.tables import PAPERS, TABLES, Setting, can_run, cell_for, cells, experiment_for, setting_of
from ccfa.methods import METHODS
from ccfa.settings import Experiment

PAPER = Path(__file__).parents[2].parent / "shared" / "paper.tex"
IN_THE_PAPER = ["main", "imagenet100,imagenet1000", "ablation", "mixing", "features", "memory"]
IN_THE_PAPER += ["initial", "direction", "supplement"]  # the order of its tabulars
PODNET = Setting("cifar100", "B50-inc1", "podnet")
OURS = replace(PODNET, ccfa=True)


def test_every_number_is_there():
    assert [len(table.cells) for table in TABLES.values()] == [60, 32, 42, 28, 16, 16, 15, 20, 20, 12]
    assert len(cells()) == len({(cell.setting, cell.metric, cell.source) for cell in cells()}) == 217
    assert sum(cell.deviation is not None for cell in cells()) == 32
    assert {cell.setting.method for cell in cells()} <= METHODS.keys() | {"mnemonics", "tpcil", "geodl"}
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
    wrong_deviations = [cell for cell in cells() if cell.slip and cell.is_target]
    assert [(cell.value, cell.deviation) for cell in wrong_deviations] == [
        (value, 0.32) for value in (50.44, 56.61, 60.47, 63.76)
    ]


@pytest.mark.parametrize(
    ("setting", "value", "source"),
    [
        (PODNET, 57.84, "rerun"),
        (replace(OURS, scenario="B50-inc10"), 67.24, "rerun"),
        (replace(PODNET, memory=5), 35.59, "copied"),
        (replace(PODNET, scenario="B20-inc1"), 47.68, "copied"),
        (replace(PODNET, scenario="B50-inc5", memory=1), 35.18, "rerun"),
        (replace(OURS, scenario="B50-inc2", mix="mixup"), 64.05, "rerun"),
        (replace(OURS, options=(("ccfa.count", "9"),)), 60.51, "rerun"),
        (replace(PODNET, method="geodl"), 52.28, "rerun"),
        (Setting("cifar100", "B50-inc5", "icarl"), 53.78, "copied"),
        (Setting("cifar100", "B50-inc5", "bic", options=(("loss", "inclearn"),)), 53.21, "copied"),
        (Setting("cifar100", "B50-inc5", "il2a", True, None), 60.78, "rerun"),
        (Setting("imagenet1000", "B500-inc50", "afc", memory=1), 52.36, "rerun"),
        (Setting("imagenet100", "B50-inc10", "podnet", True, 1, None, (("ccfa.count", "1"),)), 64.28, "rerun"),
        (Setting("cifar100", "B50-inc10", "il2a", True, None), None, None),
    ],
)
def test_cells_of_settings(setting, value, source):
    cell = cell_for(setting)
    assert (cell.value, cell.source) == (value, source) if value else cell is None


def test_other_metrics_have_cells_of_their_own():
    assert cell_for(OURS, "forgetting_inclearn").value == 24.97
    assert cell_for(OURS, "new_class_accuracy").value == 68.94


def test_settings_become_experiments_and_back():
    for setting in {cell.setting for cell in cells() if can_run(cell.setting)}:
        experiment = experiment_for(setting, "podnet-1", 3)
        assert (experiment.order, experiment.seed) == ("podnet-1", 3)
        assert setting_of(asdict(experiment)) == setting


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scenario": None}, {"scenario": "B50-inc10"}),
        ({"scenario": "50,10,10,10,10,10"}, {"scenario": "B50-inc10"}),
        ({"memory": 20}, {}),
        ({"memory": 5}, {"memory": 5}),
        ({"options": {"memory": "10"}}, {"memory": 10}),
        ({"options": {"memory": "10"}, "memory": 20}, {}),
        ({"options": {"epochs": "160", "nca": "code", "lr": "0.10"}}, {}),
        ({"options": {"nca": "paper", "epochs": "5"}}, {"options": (("epochs", "5"), ("nca", "paper"))}),
        ({"ccfa": True, "options": {"ccfa.count": "5", "ccfa.target": "most-confident"}}, {"ccfa": True}),
        ({"mix": "cutmix", "options": {"mix.alpha": "1"}}, {"mix": "cutmix"}),
        ({"order": "podnet-2", "seed": 7, "batch_seed": 8}, {}),
        ({"method": "afc", "options": {"batch_size": "128"}}, {"method": "afc"}),  # the default of PODNet
        ({"validation": 0.1}, None),
        ({"memory_total": 2000}, None),
        ({"data": "digits"}, None),
        ({"method": "another"}, None),
        ({"options": {"of_another_version": "1"}}, None),
        ({"of_another_version": 1}, None),
    ],
)
def test_settings_of_experiments(changes, expected):
    experiment = asdict(Experiment("podnet", data="cifar100", scenario="B50-inc1")) | changes
    assert setting_of(experiment) == (None if expected is None else replace(PODNET, **expected))
