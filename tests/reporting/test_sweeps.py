import io
from pathlib import Path

import pytest
from rich.console import Console

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.experiments.sweep import Swept
from ccfa.reporting.sweeps import StageLines, comparisons
from comparisons import entry, podnets


def swept(entries, **refused):
    """Runs as a sweep hands them over."""
    return Swept({run.report.name: run.report for run in entries}, refused, {})


def test_a_sweep_ends_with_the_comparison_of_its_runs():
    found = comparisons(swept(podnets()), Path("out"))
    assert list(found) == [Path("out/comparison")]
    (comparison,) = found.values()
    assert [(line.name, len(line.entries)) for line in comparison.lines] == [("podnet", 3), ("podnet + CCFA", 3)]
    assert comparison.lines[1].gain.num_pairs == 3
    assert comparison.lines[0].entries[0].path == Path("out/p0")


def test_every_scenario_has_a_comparison_of_its_own():
    runs = [entry("a"), entry("b", sizes=(5, 5)), entry("c", seed=1)]
    found = comparisons(swept(runs, joint="no meaning"), Path("out"))
    assert {str(folder): [len(line.entries) for line in one.lines] for folder, one in found.items()} == {
        "out/comparison/B4-inc3": [2],
        "out/comparison/B0-inc5": [1],
    }
    assert all(one.notes == ("joint + CCFA: no meaning",) for one in found.values())


def test_a_refusal_is_a_note_with_its_reason():
    (comparison,) = comparisons(swept([entry(method="joint")], joint="CCFA has no [meaning]"), Path("out")).values()
    assert [line.name for line in comparison.lines] == ["joint"]
    assert comparison.notes == ("joint + CCFA: CCFA has no [meaning]",)


def test_nothing_but_refusals_is_an_error():
    with pytest.raises(UsageError, match=r"Nothing was run\. joint \+ CCFA: no meaning"):
        comparisons(swept([], joint="no meaning"), Path("out"))


def test_each_stage_is_one_line():
    file = io.StringIO()
    resolved = resolve(Experiment("podnet", scenario="6,2,2"))
    lines = StageLines(resolved, Console(file=file, width=20, markup=False, highlight=False))
    lines.on_stage(Stage(1, 6, 8), {"accuracy": 0.98765, "seconds": 1.26})
    assert file.getvalue() == "digits-6_2_2-podnet-seed0  stage 2/3  accuracy 98.77%  1.3 s\n"
