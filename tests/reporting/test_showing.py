"""What a person is shown of runs that end early, were finished before, or cannot begin."""

import io
import json
import re

import pytest
from rich.console import Console

from ccfa.errors import DivergedError, LockedError, ResourceError, UsageError
from ccfa.experiments import Experiment, Run
from ccfa.experiments.run_directory import locked
from ccfa.experiments.schedule import Job, Outcome
from ccfa.learning.acceleration import Acceleration
from ccfa.reporting.showing import require_ready, run_shown, show_finished
from ccfa.reporting.sweeps import failure, show_end
from toy_runs import CPU, Silent, toy_resolved, toy_run

COURSE = {"first_stages": None, "checkpoint_minutes": 5.0, "max_minutes": None, "tensorboard": False}
SWEEP = ("sweep", "finetune", "replay", "--ccfa", "off", "--scenario", "6,2,2", "--seeds", "0", "--set", "epochs=1")
NAMES = [Experiment(name, scenario="6,2,2", options={"epochs": "1"}).name for name in ("finetune", "replay")]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200, markup=False, highlight=False)


def shown(path, console, **course):
    resolved = toy_resolved()
    return run_shown(resolved, Run(path), CPU, Acceleration(), console, **{**COURSE, **course})


@pytest.mark.parametrize(
    ("fault", "kind", "state"),
    [
        ("step:6:raise", RuntimeError, "Failed: 1 of 3 stages"),
        ("step:6:oom", ResourceError, "Failed: 1 of 3 stages"),
        ("step:6:sigterm", SystemExit, "Interrupted: 1 of 3 stages"),
    ],
)
def test_a_run_that_ends_early_has_a_page(tmp_path, console, fail, fault, kind, state):
    fail(fault)
    with pytest.raises(kind):
        shown(tmp_path / "run", console)
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in console.file.getvalue()
    assert state in (tmp_path / "run" / "report.html").read_text()


def test_a_run_without_a_stage_has_no_page(tmp_path, console, fail):
    fail("step:2:raise")
    with pytest.raises(RuntimeError):
        shown(tmp_path / "run", console)
    assert "Report" not in console.file.getvalue()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_page_that_fails_hides_no_error(tmp_path, console, fail, monkeypatch):
    monkeypatch.setattr("ccfa.reporting.page.write_report", lambda *arguments: 1 / 0)
    fail("step:6:oom")
    with pytest.raises(ResourceError, match="Out of memory"):
        shown(tmp_path / "run", console)
    assert "note: the report page was not written (division by zero)" in console.file.getvalue()


def test_no_page_is_written_where_another_process_is_at_work(tmp_path, console):
    resolved = toy_resolved()
    toy_run(tmp_path / "run", resolved)
    job = Job(resolved, Run(tmp_path / "run"), Silent(), {})
    with locked(tmp_path / "run"):
        show_end(Outcome(job, Run(tmp_path / "run").report(), None), console)
        with pytest.raises(LockedError):
            shown(tmp_path / "run", console)
    assert "is being written by another process" in console.file.getvalue()
    assert not (tmp_path / "run" / "report.html").exists()


def test_pictures_that_a_finished_run_lacks_are_made_again(call, tmp_path):
    call("run", "replay", "--scenario", "5,5", "--set", "epochs=1", "--out", "run")
    page = (tmp_path / "run" / "report.html").read_bytes()
    assert page.count(b"data:image/png") > 3
    (tmp_path / "run" / "pictures.npz").unlink()
    (tmp_path / "run" / "report.html").unlink()
    code, out, _ = call("resume", "run")
    assert (code, "note:" in out) == (0, False)
    assert (tmp_path / "run" / "report.html").read_bytes() == page


@pytest.mark.parametrize("data", ["cifar100", "gone"])
def test_without_the_data_the_page_says_why_it_has_no_pictures(tmp_path, console, monkeypatch, data):
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))  # where it would be downloaded to
    toy_run(tmp_path / "run")
    directory = Run(tmp_path / "run")
    config = directory.read_json("config.json")
    config["experiment"]["data"] = data if data == "cifar100" else str(tmp_path / data)
    directory.write_json("config.json", config)
    show_finished(directory, None, console)
    told = console.file.getvalue()
    assert re.search(r"note: the report page has no pictures\. .*(not found|does not exist)", told)
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("option", ["checkpoint_minutes", "max_minutes"])
@pytest.mark.parametrize("minutes", [float("nan"), float("inf"), -1.0, -1e-9])
def test_minutes_that_are_none_are_refused(option, minutes):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} takes a number of minutes"):
        require_ready(**{**COURSE, option: minutes})
    require_ready(**{**COURSE, option: 0.0})


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_bad_place_for_first_stages_is_refused_before_anything_is_done(call, tmp_path, verb):
    (tmp_path / "file").write_text("mine")
    code, out, err = call(verb, "finetune", "--first-stages", "file/below", "--out", "out")
    assert (code, out) == (5, "")
    assert err.startswith("error: Could not create file/below: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert call(verb, "finetune", "--max-minutes", "nan")[0] == 2


def test_runs_of_a_sweep_that_fail_are_named_and_the_others_compared(call, tmp_path, fail):
    fail("evaluate:2:raise")  # the second stage of the first run
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 1
    told = f"{NAMES[0]}: RuntimeError: asked for at evaluate. The traceback is in out/{NAMES[0]}/errors.txt."
    assert told in out
    assert told in err
    assert "Traceback" not in err
    reports = [line for line in out.splitlines() if line.startswith("Report: ")]
    assert reports == [f"Report: out/{name}/report.html" for name in NAMES]  # of one stage, and of all
    assert "Comparison: out/comparison/index.html" in out
    assert json.loads((tmp_path / "out" / NAMES[1] / "status.json").read_text())["state"] == "finished"
    code, out, err = call(*SWEEP, "--out", "out")
    assert (code, err) == (0, "")


def test_where_every_run_fails_each_is_named_and_the_first_decides_the_code(call, fail):
    fail("step:1:oom,step:2:raise")
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 5
    for name in NAMES:
        assert re.search(rf"^{name}: ", out, re.MULTILINE)
        assert re.search(rf"^  {name}: ", err, re.MULTILINE)
    assert "Comparison" not in out


def test_a_stopped_sweep_leaves_pages_of_what_was_done(call, tmp_path, fail):
    fail("evaluate:2:sigterm")
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 143
    assert f"Report: out/{NAMES[0]}/report.html" in out
    assert "Repeat the command" in err


def test_one_error_for_many_has_the_first_code():
    error = failure({"b": DivergedError("too steep"), "a": ResourceError("full")})
    assert error.exit_code == 6
    assert str(error).splitlines()[1:] == ["  b: too steep", "  a: full"]
