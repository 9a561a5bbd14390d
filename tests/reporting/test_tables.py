"""The metrics of a run, and what there is to choose from, on the terminal."""

import io
from dataclasses import replace

import pytest

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS
from ccfa.evaluation import DEFINITIONS, Numbers, Report
from ccfa.experiments.options import schema
from ccfa.experiments.presets import SCENARIOS
from ccfa.experiments.tables import TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.models import BACKBONES
from ccfa.reporting.tables import catalogue, metrics_table
from ccfa.reporting.terminal import Output
from ccfa.reporting.values import percent

VALUES = {name: (index + 1) / 10 + 0.00123 for index, name in enumerate(DEFINITIONS)}
REPORT = Report(
    name="a [bold] name",
    config={},
    num_seen=[1, 2],
    own="nearest_mean",
    rules={
        "logits": Numbers([1.0, 0.5], dict.fromkeys(DEFINITIONS, 0.4321)),
        "nearest_mean": Numbers([1.0, 0.5], VALUES),
    },
    environment={},
    seconds=12.4,
    finished=True,
)


def shown(*tables, width=400):
    console = Output(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def cells(line):
    return [cell.strip() for cell in line.strip("│\n ").split("│")]


def rows(*tables):
    return {row[0]: row for row in map(cells, shown(*tables).splitlines())}


def test_metrics_stand_beside_their_definitions():
    lines = [cells(line) for line in shown(metrics_table(REPORT)).splitlines() if line.startswith("│")]
    assert lines == [
        [name.replace("_", " "), percent(VALUES[name]), "43.21", definition] for name, definition in DEFINITIONS.items()
    ]
    assert REPORT.name in shown(metrics_table(REPORT))
    (heading,) = [line for line in shown(metrics_table(REPORT)).splitlines() if "by logits" in line]
    assert heading.index("nearest mean (own rule)") < heading.index("by logits")


def test_a_metric_that_lacks_is_a_dash():
    older = {name: value for name, value in VALUES.items() if name != "forgetting_inclearn"}
    found = rows(metrics_table(replace(REPORT, own="logits", rules={"logits": Numbers([0.5], older)})))
    assert found["forgetting inclearn"][1] == "-"


def test_numbers_stay_whole_on_narrow_terminals():
    text = shown(metrics_table(REPORT), width=80)
    assert all(percent(value) in text for value in VALUES.values())
    assert max(map(len, text.splitlines())) <= 80


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
def test_what_there_is_to_choose_from(what, names):
    found = rows(*catalogue(what))
    assert all(found[name][1] for name in names)


def test_options_have_type_and_default():
    tables = dict(zip([*METHODS, "ccfa", *MIXES], catalogue("options"), strict=True))
    for (name, table), function in zip(tables.items(), [*METHODS.values(), CCFA, *MIXES.values()], strict=True):
        assert table.title == name
        assert set(schema(function)) <= set(rows(table))
    assert rows(tables["podnet"])["epochs"] == ["epochs", "int", "160"]
    assert rows(tables["replay"])["lr"] == ["lr", "float", "0.1"]
