"""The metrics of a run, and what there is to choose from, on the terminal."""

import io
from dataclasses import replace

import pytest

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS
from ccfa.evaluation import DEFINITIONS, Numbers, Report
from ccfa.experiments.experiment import SCENARIOS, schema
from ccfa.experiments.tables import TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.models import BACKBONES
from ccfa.reporting.tables import catalogue, metrics_table
from ccfa.reporting.terminal import Output
from ccfa.reporting.values import percent

VALUES = {name: (index + 1) / 10 + 0.00123 for index, name in enumerate(DEFINITIONS)}
RULES = {"logits": Numbers([0.5], dict.fromkeys(DEFINITIONS, 0.4321)), "nearest_mean": Numbers([0.5], VALUES)}
REPORT = Report("a [bold] name", {}, [2], "nearest_mean", RULES, {}, 12.4, finished=True)


def shown(*tables, width=400):
    console = Output(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def rows(*tables):
    """The cells of each row, by the first cell."""
    lines = [[cell.strip() for cell in line.strip("│┃\n ").split("│")] for line in shown(*tables).splitlines()]
    return {row[0]: row for row in lines}


def test_metrics_stand_beside_their_definitions():
    found = rows(metrics_table(REPORT))
    for name, definition in DEFINITIONS.items():
        plain = name.replace("_", " ")
        assert found[plain] == [plain, percent(VALUES[name]), "43.21", definition]
    text = shown(metrics_table(REPORT))
    assert REPORT.name in text
    assert text.index("nearest mean (own rule)") < text.index("by logits")


def test_narrow_terminals_and_missing_metrics():
    text = shown(metrics_table(REPORT), width=80)
    assert all(percent(value) in text for value in VALUES.values())
    assert max(map(len, text.splitlines())) <= 80
    assert (
        rows(metrics_table(replace(REPORT, own="logits", rules={"logits": Numbers([0.5], {})})))["last accuracy"][1]
        == "-"
    )


def test_methods_are_listed_with_their_memory():
    found = rows(*catalogue("methods"))
    assert {*METHODS, *cited_only()} <= set(found)
    memories = [found[name][3] for name in ("finetune", "podnet", "joint")]
    assert memories == ["none", "20 per class, needed", "every image"]
    assert all(found[name][1] for name in METHODS)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("datasets", [*DATASETS, "PATH"]),
        ("scenarios", SCENARIOS),
        ("orders", ["natural", "seed-N", "podnet-0"]),
        ("backbones", BACKBONES),
        ("tables", TABLES),
    ],
)
def test_catalogues_are_complete(what, names):
    found = rows(*catalogue(what))
    assert all(found[name][1] for name in names)


def test_options_have_type_and_default():
    functions = {**METHODS, "ccfa": CCFA, **MIXES}
    tables = {table.title: table for table in catalogue("options")}
    assert tables.keys() == functions.keys()
    for name, function in functions.items():
        assert set(schema(function)) <= set(rows(tables[name]))
    assert rows(tables["podnet"])["epochs"] == ["epochs", "int", "160"]
