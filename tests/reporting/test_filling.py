"""`ccfa table --fill`, `--plan` and `--slurm`, with short runs on digits in the place of the paper's."""

import shlex
import shutil
import sys
import types

import pytest

from ccfa.evaluation import Report
from ccfa.experiments import Experiment
from ccfa.experiments.ledger import store_result
from ccfa.experiments.stopping import TIME_LIMIT_CODE
from ccfa.reporting import filling
from digests import run_digest
from digit_runs import SHORT
from stored_results import PODNET, result_report

RUNS = [Experiment("podnet", ccfa, scenario="4,3,3", seed=1, options=SHORT) for ccfa in (False, True)]


@pytest.fixture
def table(call, tmp_path, monkeypatch):
    """The verb, where two runs on digits are what the paper's tables lack until their reports are kept."""

    def missing(cells, results, orders):
        return [run for run in RUNS if not (tmp_path / "results" / "digits-4,3,3" / f"{run.name}.json").exists()]

    monkeypatch.setattr(filling, "left_to_run", missing)
    return lambda *words: call("table", *words)


def reports(folder):
    return {path.name: Report.from_json(path.read_text()) for path in folder.rglob("*.json")}


def test_filling_keeps_a_report_of_each_run_and_then_has_nothing_to_do(table, tmp_path):
    code, output, _ = table("--fill", "--at-once", "2")
    assert code == 0
    kept = reports(tmp_path / "results")
    assert set(kept) == {f"{run.name}.json" for run in RUNS}
    assert all(report.finished and report.environment["at_once"] == 2 for report in kept.values())
    assert "2 runs, 2 at a time" in output
    assert "No run is missing" in table("--fill")[1]


def test_filling_that_is_stopped_goes_on_elsewhere(table, tmp_path, fail):
    code, *_ = table("--fill", "--out", "undisturbed", "--results", "other")
    assert code == 0
    fail("step:9:sigterm")
    code, _, errors = table("--fill", "--out", "here")
    assert code == 143
    assert "Still missing: 2 runs" in errors
    fail("")
    shutil.copytree("here", "there", ignore=shutil.ignore_patterns("networks"))
    assert table("--fill", "--out", "there")[0] == 0
    assert len(reports(tmp_path / "results")) == 2
    for run in RUNS:
        assert run_digest(tmp_path / "there" / run.name) == run_digest(tmp_path / "undisturbed" / run.name)


def test_no_time_is_the_time_limits_code(table):
    code, _, errors = table("--fill", "--minutes", "0")
    assert code == TIME_LIMIT_CODE
    assert "Still missing: 2 runs" in errors


def test_the_plan_is_one_command_a_line_that_may_be_repeated(table, call, tmp_path):
    code, output, _ = table("--plan")
    assert code == 0
    lines = [shlex.split(line) for line in output.splitlines()]
    assert [words[:3] for words in lines] == [["ccfa", "run", "podnet"]] * 2
    for _ in range(2):
        assert call(*lines[1][1:])[0] == 0
    assert len(reports(tmp_path / "results")) == 1
    assert len(table("--plan")[1].splitlines()) == 1


def test_the_plan_keeps_what_was_said_about_speed(table):
    code, output, _ = table("--plan", "--device", "cpu", "--no-graph", "--checkpoint-minutes", "1")
    assert code == 0
    assert all("--device cpu --no-graph --checkpoint-minutes 1.0" in line for line in output.splitlines())


def test_a_results_folder_that_cannot_be_is_refused_before_training(table, call, tmp_path):
    (tmp_path / "results").write_text("")
    assert table("--fill")[0] == 5
    assert call("run", "podnet", "--results", "results")[0] == 5
    assert not (tmp_path / "runs").exists()


def test_slurm_gets_the_plans_commands(table, monkeypatch):
    submitted = {}

    def submit(commands, folder, **settings):
        submitted.update(settings, commands=commands)
        return [types.SimpleNamespace(job_id=f"7_{number}") for number in range(len(commands))]

    monkeypatch.setitem(sys.modules, "ccfa.experiments.cluster", types.SimpleNamespace(submit=submit))
    code, output, _ = table("--slurm", "--minutes", "30", "--partition", "gpu", "--sbatch", "account=vision")
    assert code == 0
    assert "7_1" in output
    assert submitted["minutes"] == 30
    assert (submitted["partition"], submitted["options"]) == ("gpu", {"account": "vision"})
    planned = [shlex.split(line) for line in table("--plan")[1].splitlines()]
    assert submitted["commands"] == planned


def test_without_reports_the_table_says_so(call):
    code, output, _ = call("table", "main")
    assert code == 0
    assert "no reports" in output
    assert "67.24" in output


def test_a_stored_report_is_shown_without_data(call, tmp_path):
    store_result(result_report(PODNET, "podnet-0", 0.65), tmp_path / "results")
    code, output, _ = call("table", "main", "--rows", "podnet", "--columns", "5 tasks")
    assert code == 0
    assert "65.00" in output


def test_pages_are_written_where_one_stands(call, tmp_path):
    store_result(result_report(PODNET, "podnet-0", 0.65), tmp_path / "results")
    assert call("table", "--write")[0] == 0
    assert "65.00" in (tmp_path / "REPRODUCTION.md").read_text()


def test_no_reports_leave_the_pages_as_they_are(call, tmp_path):
    (tmp_path / "REPRODUCTION.md").write_text("as it was")
    assert call("table", "--write", "--results", "resluts")[0] == 3
    assert (tmp_path / "REPRODUCTION.md").read_text() == "as it was"


def test_a_plan_without_runs_says_why(call):
    code, output, errors = call("table", "imagenet100", "--plan")
    assert (code, output) == (0, "")
    assert "42 cells cannot be run" in errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("main", "--write"), "--write"),
        (("main", "--slurm", "--sbatch", "account"), "--sbatch"),
        (("mian",), "main"),
        (("--rows", "podnet"), "ccfa table main"),
        (("main", "--orders", "4"), "--orders"),
        (("main", "--fill", "--plan"), "--plan"),
        (("main", "--fill", "--minutes", "-1"), "--minutes"),
        (("main", "--fill", "--at-once", "0"), "At least one"),
    ],
)
def test_wrong_input_is_refused(table, words, named):
    code, _, errors = table(*words)
    assert code == 2
    assert named in errors
