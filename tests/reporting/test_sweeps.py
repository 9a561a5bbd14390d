import io
from pathlib import Path

import pytest
from rich.console import Console

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.experiments.sweep import Cell
from ccfa.reporting.sweeps import StageLines, sweep_comparison
from comparisons import entry, podnets


def cells(entries):
    """Runs as a sweep hands them over."""
    found = {}
    for run in entries:
        key = run.experiment["method"], run.ccfa
        found.setdefault(key, Cell({})).reports["order", run.experiment["seed"]] = run.report
    return found


def test_a_sweep_ends_with_the_comparison_of_its_runs():
    comparison = sweep_comparison(cells(podnets()), Path("out"))
    assert [(line.name, len(line.entries)) for line in comparison.lines] == [("podnet", 3), ("podnet + CCFA", 3)]
    assert comparison.lines[1].gain.num_pairs == 3
    assert comparison.lines[0].entries[0].path == Path("out/p0")


def test_a_refusal_is_a_note_with_its_reason():
    found = cells([entry(method="joint")]) | {("joint", True): Cell({}, "CCFA has no [meaning] for joint")}
    comparison = sweep_comparison(found, Path("out"))
    assert [line.name for line in comparison.lines] == ["joint"]
    assert comparison.notes == ("joint + CCFA: CCFA has no [meaning] for joint",)


def test_nothing_but_refusals_is_an_error():
    with pytest.raises(UsageError, match=r"Nothing was run\. joint \+ CCFA: no meaning"):
        sweep_comparison({("joint", True): Cell({}, "no meaning")}, Path("out"))


def test_each_stage_is_one_line():
    file = io.StringIO()
    resolved = resolve(Experiment("podnet", scenario="6,2,2"))
    lines = StageLines(resolved, Console(file=file, width=20, markup=False, highlight=False))
    lines.on_stage(Stage(1, 6, 8), {"accuracy": 0.98765, "seconds": 1.26})
    assert file.getvalue() == "digits-6_2_2-podnet-seed0  stage 2/3  accuracy 98.77%  1.3 s\n"
