import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS
from ccfa.evaluation import DEFINITIONS, Report
from ccfa.experiments.options import schema
from ccfa.experiments.presets import SCENARIOS
from ccfa.experiments.tables import TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.models import BACKBONES
from ccfa.reporting.comparison import compare
from ccfa.reporting.formats import summary_grid
from ccfa.reporting.tables import catalogue, definitions, metrics_table, percent, print_comparison
from comparisons import entry, podnets

METRICS = {name: (index + 1) / 10 + 0.00123 for index, name in enumerate(DEFINITIONS)}
REPORT = Report(
    name="a [bold] name",
    config={},
    num_seen=[1, 2],
    overall=[1.0, 0.5],
    accuracy_matrix=[[1.0, None], [0.5, 0.5]],
    metrics=METRICS,
    metrics_by_nearest_mean=None,
    overall_by_nearest_mean=None,
    environment={},
    seconds=12.4,
    finished=True,
)


def shown(*tables, width=400):
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, highlight=False)
    for table in tables:
        console.print(table)
    return file.getvalue()


def cells(line):
    return [cell.strip() for cell in line.strip("│\n ").split("│")]


@pytest.mark.parametrize(("value", "text"), [(0.12345, "12.35"), (1.0, "100.00"), (-0.5, "-50.00"), (math.nan, "-")])
def test_percentages(value, text):
    assert percent(value) == text


def test_every_metric_stands_beside_its_definition():
    lines = [cells(line) for line in shown(metrics_table(REPORT)).splitlines() if line.startswith("│")]
    expected = [
        [name.replace("_", " "), percent(METRICS[name]), "-", definition] for name, definition in DEFINITIONS.items()
    ]
    assert lines == expected


def test_a_metric_that_an_earlier_report_lacks_is_a_dash():
    older = {name: value for name, value in METRICS.items() if name != "forgetting_inclearn"}
    table = shown(metrics_table(replace(REPORT, metrics=older, metrics_by_nearest_mean=older)))
    (line,) = [cells(line) for line in table.splitlines() if "forgetting inclearn" in line]
    assert line[1:3] == ["-", "-"]


def test_nearest_mean_results_have_a_column():
    report = replace(REPORT, metrics_by_nearest_mean=dict.fromkeys(DEFINITIONS, 0.4321))
    assert shown(metrics_table(report)).count("43.21") == len(DEFINITIONS)


def test_names_are_shown_as_they_are():
    assert "a [bold] name" in shown(metrics_table(REPORT))


def test_numbers_stay_whole_on_a_narrow_terminal():
    text = shown(metrics_table(REPORT), width=80)
    assert all(percent(value) in text for value in METRICS.values())
    assert max(map(len, text.splitlines())) <= 80


def printed(comparison, width):
    file = io.StringIO()
    print_comparison(comparison, Console(file=file, width=width, markup=False, highlight=False))
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_comparison_stays_whole_at_any_width(width):
    long = entry("runs/x", 0.25, options={"epochs": "5", "a_long_option": "1.5"})
    comparison = compare([*podnets(), long])
    text = printed(comparison, width)
    table = text[: text.index("± :")]
    assert max(map(len, text.splitlines())) <= width
    for row in summary_grid(comparison).rows:
        assert all(str(cell) in table for cell in row[1:]), "no number is cut"
        folded = re.sub(r"\s+", "", table)
        assert all(part in folded for part in re.findall(r"\w+", str(row[0])))
    assert "…" not in text


def test_a_wide_terminal_gets_one_table():
    assert printed(compare(podnets()), 140).count("podnet + CCFA") == 1
    assert printed(compare(podnets()), 80).count("podnet + CCFA") == 2


def test_notes_are_printed_as_they_are():
    assert "note: a [bold] note\n" in printed(compare([entry()], ["a [bold] note"]), 40)


def test_a_run_is_judged_by_its_method_s_own_rule():
    config = {"resolved": {"method": {"predict": "by_nearest_mean"}}}
    nearest = replace(REPORT, config=config, metrics_by_nearest_mean=dict.fromkeys(DEFINITIONS, 0.4321))
    assert "by nearest mean (own rule)" in shown(metrics_table(nearest))
    assert "by logits (own rule)" in shown(metrics_table(REPORT))
    assert replace(nearest, metrics_by_nearest_mean=None).own_metrics == METRICS


@pytest.mark.parametrize("runs", [[entry()], podnets(), podnets(data="cifar100", sizes=(50, 10, 10, 10, 10, 10))])
def test_every_column_is_defined(runs):
    comparison = compare(runs)
    headings = set(summary_grid(comparison).headings) - {"method", "runs", "pairs"}
    assert {line.split(":")[0].strip() for line in definitions(comparison)} == headings | {"±"}


def test_methods_are_listed_with_their_memory():
    text = shown(*catalogue("methods"))
    rows = {row[0]: row for row in map(cells, text.splitlines())}
    assert set(METHODS) <= set(rows)
    assert [rows[name][3] for name in ("finetune", "podnet", "joint")] == [
        "none",
        "20 per class, needed",
        "every image",
    ]
    assert rows["icarl"][2] == "Rebuffi et al., CVPR 2017"
    assert set(cited_only()) <= set(rows)
    assert all(rows[name][1] for name in METHODS)


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
    rows = {row[0]: row for row in map(cells, shown(*catalogue(what)).splitlines())}
    assert set(names) <= set(rows)
    assert all(rows[name][1] for name in names)


def test_every_option_of_every_method_is_listed_with_type_and_default():
    tables = catalogue("options")
    assert [table.title for table in tables] == [*METHODS, "ccfa", *MIXES]
    for table, function in zip(tables, [*METHODS.values(), CCFA, *MIXES.values()], strict=True):
        rows = {row[0]: row for row in map(cells, shown(table).splitlines())}
        assert set(schema(function)) <= set(rows)
    podnet = {row[0]: row for row in map(cells, shown(tables[list(METHODS).index("podnet")]).splitlines())}
    assert podnet["epochs"] == ["epochs", "int", "160"]
    replay = {row[0]: row for row in map(cells, shown(tables[list(METHODS).index("replay")]).splitlines())}
    assert replay["lr"] == ["lr", "float", "0.1"]
