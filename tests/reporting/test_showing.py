"""What a person is shown of runs and sweeps: while they end early, when they were finished, or cannot begin."""

import io
import json
import shutil
from pathlib import Path

import pytest

from ccfa.errors import LockedError, ResourceError, UsageError
from ccfa.evaluation import DEFINITIONS, Numbers, Report
from ccfa.experiments import Experiment, Run
from ccfa.experiments.run_directory import locked
from ccfa.experiments.sweep import Swept
from ccfa.reporting.showing import (
    _run_shown,
    _show_page,
    comparisons,
    require_ready,
    show_finished,
    show_result,
)
from ccfa.reporting.tables import percent, plain
from ccfa.reporting.terminal import Output
from ccfa.settings import Running
from comparisons import entry, podnets
from toy_runs import toy_resolved, toy_run

SWEEP = ("sweep", "finetune", "replay", "--ccfa", "off", "--scenario", "6,2,2", "--seeds", "0", "--set", "epochs=0")
NAMES = [Experiment(name, scenario="6,2,2", options={"epochs": "0"}).name for name in ("finetune", "replay")]


@pytest.fixture
def console():
    return Output(file=io.StringIO(), width=200)


def shown(path, console):
    return _run_shown(toy_resolved(), Run(path), Running(device="cpu"), console)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("step:6:raise", RuntimeError), ("step:6:oom", ResourceError), ("step:6:sigterm", SystemExit)],
)
def test_a_run_that_ends_early_has_a_page(tmp_path, console, fail, fault, kind):
    fail(fault)
    with pytest.raises(kind):
        shown(tmp_path / "run", console)
    assert str(tmp_path / "run" / "report.html") in console.file.getvalue()
    assert "1 of 3 stages" in (tmp_path / "run" / "report.html").read_text()


VALUES = {name: (index + 1) / 10 + 0.00123 for index, name in enumerate(DEFINITIONS)}
RULES = {"logits": Numbers([0.5], {"last_accuracy": 0.4321}), "nearest_mean": Numbers([0.5], VALUES)}
REPORT = Report("a [bold] name", {}, [2], "nearest_mean", RULES, {}, 12.4, finished=True)


@pytest.mark.parametrize("width", [80, 400])
def test_metrics_of_every_rule(tmp_path, width):
    console = Output(file=io.StringIO(), width=width)
    show_result(REPORT, tmp_path, None, console)
    text = console.file.getvalue().partition("Run directory")[0]
    assert REPORT.name in text
    assert max(map(len, text.splitlines())) <= width
    assert text.index("nearest mean (own rule)") < text.index("by logits")
    rows = {row[0]: row[1:] for row in map(cells, text.splitlines())}
    for name, definition in DEFINITIONS.items():
        values = [percent(VALUES[name]), "43.21" if name == "last_accuracy" else "-"]
        assert rows[plain(name)] == [*values, definition][: 3 if width == 400 else 2]


def cells(line):
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_a_run_without_a_stage_has_no_page(tmp_path, console, fail):
    fail("step:2:raise")
    with pytest.raises(RuntimeError):
        shown(tmp_path / "run", console)
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_page_that_fails_hides_no_error(tmp_path, console, fail, monkeypatch):
    monkeypatch.setattr("ccfa.reporting.page.write_report", lambda *arguments: 1 / 0)
    fail("step:6:oom")
    with pytest.raises(ResourceError):
        shown(tmp_path / "run", console)
    assert "division by zero" in console.file.getvalue()
    assert f"ccfa report {tmp_path / 'run'}" in console.file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "run"
    toy_run(path)
    return path


def test_no_page_where_another_process_works(finished, tmp_path, console):
    shutil.copytree(finished, tmp_path / "run")
    with locked(tmp_path / "run"):
        _show_page(Run(tmp_path / "run"), toy_resolved(), console, None)
        with pytest.raises(LockedError):
            shown(tmp_path / "run", console)
    assert not (tmp_path / "run" / "report.html").exists()


def test_missing_pictures_are_made_again(call, tmp_path):
    call("run", "replay", "--scenario", "5,5", "--set", "epochs=0", "--out", "run")
    page = (tmp_path / "run" / "report.html").read_bytes()
    assert page.count(b"data:image/png") > 3
    (tmp_path / "run" / "pictures.npz").unlink()
    (tmp_path / "run" / "report.html").unlink()
    assert call("resume", "run")[0] == 0
    assert (tmp_path / "run" / "report.html").read_bytes() == page


@pytest.mark.parametrize("data", ["cifar100", "gone"])
def test_without_data_the_page_has_no_pictures(finished, tmp_path, console, monkeypatch, data):
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))  # where it would be downloaded to
    shutil.copytree(finished, tmp_path / "run")
    directory = Run(tmp_path / "run")
    config = directory.read_json("config.json")
    config["experiment"]["data"] = data if data == "cifar100" else str(tmp_path / data)
    directory.write_json("config.json", config)
    show_finished(directory, None, console)
    assert "no pictures" in console.file.getvalue()
    assert (tmp_path / "run" / "report.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("option", ["checkpoint_minutes", "max_minutes"])
@pytest.mark.parametrize("minutes", [float("nan"), float("inf"), -1e-9])
def test_bad_minutes_are_refused(option, minutes):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}"):
        require_ready(Running(**{option: minutes}))
    require_ready(Running(**{option: 0.0}))


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_bad_folder_is_refused_at_once(call, tmp_path, verb):
    (tmp_path / "file").write_text("mine")
    code, out, err = call(verb, "finetune", "--first-stages", "file/below", "--out", "out")
    assert (code, out) == (5, "")
    assert "file/below" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failed_runs_are_named_and_others_compared(call, tmp_path, fail):
    fail("evaluate:2:raise")  # the second stage of the first run
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 1
    assert all(f"{NAMES[0]}: RuntimeError" in told for told in (out, err))
    assert "Traceback" not in err
    assert all(f"out/{name}/report.html" in out for name in NAMES)  # of one stage, and of all
    assert "out/comparison/index.html" in out
    assert json.loads((tmp_path / "out" / NAMES[1] / "status.json").read_text())["state"] == "finished"
    code, out, err = call(*SWEEP, "--out", "out")
    assert (code, err) == (0, "")


def test_the_first_failure_decides_the_code(call, fail):
    fail("evaluate:1:oom,evaluate:2:raise")
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 5
    assert all(name in out and name in err for name in NAMES)


def test_a_stopped_sweep_leaves_pages(call, tmp_path, fail):
    fail("evaluate:2:sigterm")
    assert call(*SWEEP, "--out", "out")[0] == 143
    assert (tmp_path / "out" / NAMES[0] / "report.html").exists()


def swept(entries, **refused):
    """Runs as a sweep hands them over."""
    return Swept({run.report.name: run.report for run in entries}, refused, {})


def test_a_sweep_ends_with_a_comparison():
    ((folder, comparison),) = comparisons(swept(podnets()), Path("out")).items()
    assert folder == Path("out/comparison")
    assert [(line.name, len(line.gains)) for line in comparison.lines] == [("podnet", 0), ("podnet + CCFA", 3)]
    assert comparison.lines[0].entries[0].path == Path("out/p0")


def test_every_scenario_has_a_comparison():
    runs = [entry("a"), entry("b", sizes=(5, 5)), entry("c", seed=1)]
    found = comparisons(swept(runs, joint="no meaning"), Path("out"))
    assert {str(folder): [len(line.entries) for line in one.lines] for folder, one in found.items()} == {
        "out/comparison/B4-inc3": [2],
        "out/comparison/B0-inc5": [1],
    }
    assert all(["joint" in note for note in one.notes] == [True] for one in found.values())


def test_nothing_but_refusals_is_an_error():
    with pytest.raises(UsageError, match="joint"):
        comparisons(swept([], joint="no meaning"), Path("out"))
