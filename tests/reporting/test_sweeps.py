import io

import numpy as np
import pytest
from rich.console import Console

from ccfa.data import Stage
from ccfa.evaluation import DEFINITIONS, Report
from ccfa.experiments.sweep import Cell
from ccfa.reporting.sweeps import StageLines, averages, sweep_table

ALONE = {("0,1", 0): 0.6012, ("0,1", 1): 0.6234, ("1,0", 0): 0.5871}
PLUGGED = {("1,0", 0): 0.6102, ("0,1", 0): 0.6011, ("0,1", 1): 0.6459}  # the same runs in another order
HEADINGS = ["method", "runs", "alone", "with CCFA", "gain"]


def report(value, nearest=None, predict="by_logits"):
    return Report(
        name="run",
        config={"resolved": {"method": {"predict": predict}}},
        num_seen=[1, 2],
        overall=[1.0, 0.5],
        accuracy_matrix=[[1.0, None], [0.5, 0.5]],
        metrics=dict.fromkeys(DEFINITIONS, 0.0) | {"average_incremental_accuracy": value},
        metrics_by_nearest_mean=None if nearest is None else {"average_incremental_accuracy": nearest},
        overall_by_nearest_mean=None,
        environment={},
        seconds=1.0,
        finished=True,
    )


def cell(values):
    return Cell({key: report(value) for key, value in values.items()})


def shown(table):
    """Headings and rows of a table."""
    file = io.StringIO()
    Console(file=file, width=400, markup=False, highlight=False).print(table)
    lines = [line.strip("│┃") for line in file.getvalue().splitlines() if line.startswith(("│", "┃"))]
    headings, *rows = [[part.strip() for part in line.replace("┃", "│").split("│")] for line in lines]
    return headings, {row[0]: row[1:] for row in rows}


def expected(values, sign=""):
    percents = 100 * np.array(list(values))
    return f"{percents.mean():{sign}.2f} ± {percents.std(ddof=1):.2f}"


def test_mean_spread_and_paired_gain():
    cells = {("podnet", False): cell(ALONE), ("podnet", True): cell(PLUGGED)}
    headings, rows = shown(sweep_table(cells, "digits", "B5-inc1"))
    assert headings == HEADINGS
    gain = expected([PLUGGED[key] - ALONE[key] for key in ALONE], "+")
    assert rows == {"podnet": ["3 + 3", expected(ALONE.values()), expected(PLUGGED.values()), gain]}
    assert rows["podnet"][3].startswith("+1.52 ± ")


def test_only_runs_of_both_kinds_are_paired():
    fewer = {key: PLUGGED[key] for key in list(PLUGGED)[:2]}
    cells = {("podnet", False): cell(ALONE), ("podnet", True): cell(fewer)}
    _, rows = shown(sweep_table(cells, "digits", "B5-inc1"))
    assert rows["podnet"][0] == "3 + 2"
    assert rows["podnet"][3] == expected([fewer[key] - ALONE[key] for key in fewer], "+")


def test_a_loss_has_its_sign():
    cells = {("podnet", False): cell(PLUGGED), ("podnet", True): cell(ALONE)}
    assert shown(sweep_table(cells, "digits", "B5-inc1"))[1]["podnet"][3].startswith("-1.52 ± ")


def test_one_run_has_no_spread():
    cells = {("podnet", False): cell({("", 0): 0.5}), ("podnet", True): cell({("", 0): 0.625})}
    assert shown(sweep_table(cells, "digits", "B5-inc1"))[1]["podnet"] == ["1 + 1", "50.00", "62.50", "+12.50"]


def test_runs_that_do_not_pair_have_no_gain():
    cells = {("podnet", False): cell({("", 0): 0.5}), ("podnet", True): cell({("", 1): 0.625})}
    assert shown(sweep_table(cells, "digits", "B5-inc1"))[1]["podnet"] == ["1 + 1", "50.00", "62.50", ""]


@pytest.mark.parametrize("ccfa", [False, True])
def test_half_a_sweep_leaves_the_other_half_empty(ccfa):
    values = ["", ""]
    values[ccfa] = "50.00"
    _, rows = shown(sweep_table({("podnet", ccfa): cell({("", 0): 0.5})}, "digits", "B5-inc1"))
    assert rows == {"podnet": ["1", *values, ""]}


def test_a_refusal_is_a_dash_with_its_reason():
    cells = {("joint", False): cell({("", 0): 0.9}), ("joint", True): Cell({}, "CCFA has no [meaning] for joint")}
    _, rows = shown(sweep_table(cells, "digits", "B5-inc1"))
    assert rows == {"joint": ["1 + 0", "90.00", "- (CCFA has no [meaning] for joint)", ""]}


def test_a_method_counts_by_its_own_rule():
    nearest = Cell({("", 0): report(0.3, nearest=0.7, predict="by_nearest_mean")})
    logits = Cell({("", 0): report(0.3, nearest=0.7)})
    assert averages(nearest) == {("", 0): pytest.approx(70)}
    assert averages(logits) == {("", 0): pytest.approx(30)}


def test_the_paper_s_values_stand_beside_ours():
    one = cell({("", 0): 0.5})
    cells = {("podnet", False): one, ("podnet", True): one, ("icarl", False): one, ("finetune", False): one}
    headings, rows = shown(sweep_table(cells, "cifar100", "B50-inc10"))
    assert headings == [*HEADINGS, "paper: alone, with CCFA"]
    assert {name: row[-1] for name, row in rows.items()} == {
        "podnet": "64.62, 67.24",
        "icarl": "58.08, -",
        "finetune": "-, -",
        "Mnemonics": "63.34 (published value only)",
        "TPCIL": "65.34 (published value only)",
        "GeoDL": "65.34 (published value only)",
    }
    assert rows["Mnemonics"][:4] == [""] * 4


@pytest.mark.parametrize(("data", "scenario"), [("digits", "B5-inc1"), ("cifar100", "B0-inc10")])
def test_without_published_values_there_is_no_column_and_no_cited_row(data, scenario):
    headings, rows = shown(sweep_table({("podnet", False): cell({("", 0): 0.5})}, data, scenario))
    assert headings == HEADINGS
    assert list(rows) == ["podnet"]


def test_each_stage_is_one_line():
    file = io.StringIO()
    lines = StageLines("a [bold] run", 3, Console(file=file, width=20, markup=False, highlight=False))
    lines.on_stage(Stage(1, 6, 8), {"accuracy": 0.98765, "seconds": 1.26})
    assert file.getvalue() == "a [bold] run  stage 2/3  accuracy 98.77%  1.3 s\n"
