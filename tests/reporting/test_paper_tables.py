"""`ccfa table`: what it shows and writes; and what it runs, with short runs on digits in the place of the paper's."""

import io
import shlex
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from ccfa.errors import UsageError
from ccfa.evaluation import Report
from ccfa.experiments import Experiment
from ccfa.experiments.ledger import ORDERS, read_results, store_result
from ccfa.experiments.stopping import TIME_LIMIT_CODE
from ccfa.experiments.tables import TABLES, cells
from ccfa.reporting import paper_tables
from ccfa.reporting.paper_tables import (
    BEGIN,
    END,
    cell_command,
    main_table,
    overview_screen,
    reproduction,
    selected,
    table_screen,
    with_main_table,
)
from ccfa.reporting.terminal import Output
from digests import run_digest
from digit_runs import SHORT
from stored_results import PODNET, result_report

ROOT = Path(__file__).parents[2]
PLUGGED = replace(PODNET, ccfa=True)
RUNS = [Experiment("podnet", ccfa, scenario="4,3,3", seed=1, options=SHORT) for ccfa in (False, True)]


@pytest.fixture
def table(call, tmp_path, monkeypatch):
    """The verb, where two runs on digits are what the paper's tables lack until their reports are kept."""

    def missing(cells, results, orders):
        return [run for run in RUNS if not (tmp_path / "results" / "digits-4,3,3" / f"{run.name}.json").exists()]

    monkeypatch.setattr(paper_tables, "left_to_run", missing)
    return lambda *words: call("table", *words)


def reports(folder):
    return {path.name: Report.from_json(path.read_text()) for path in folder.rglob("*.json")}


def test_filling_keeps_every_report(table, tmp_path):
    code, output, _ = table("--fill", "--at-once", "2")
    assert code == 0
    kept = reports(tmp_path / "results")
    assert set(kept) == {f"{run.name}.json" for run in RUNS}
    assert all(report.finished and report.environment["at_once"] == 2 for report in kept.values())
    assert "2 runs, 2 at a time" in output
    assert "No run is missing" in table("--fill")[1]


def test_stopped_filling_goes_on_elsewhere(table, tmp_path, fail):
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


def test_planned_commands_may_be_repeated(table, call, tmp_path):
    code, output, _ = table("--plan")
    assert code == 0
    lines = [shlex.split(line) for line in output.splitlines()]
    assert [words[:3] for words in lines] == [["ccfa", "run", "podnet"]] * 2
    for _ in range(2):
        assert call(*lines[1][1:])[0] == 0
    assert len(reports(tmp_path / "results")) == 1
    assert len(table("--plan")[1].splitlines()) == 1


def test_the_plan_keeps_options_of_speed(table):
    code, output, _ = table("--plan", "--device", "cpu", "--no-graph", "--checkpoint-minutes", "1")
    assert code == 0
    words = ("--device cpu", "--no-graph", "--checkpoint-minutes 1.0")
    assert all(word in line for line in output.splitlines() for word in words)


def test_a_bad_results_folder_is_refused(table, call, tmp_path):
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


def test_orders_limit_what_is_shown(call, tmp_path):
    for order, value in zip(ORDERS, (0.61, 0.65, 0.69), strict=True):
        store_result(result_report(PODNET, order, value), tmp_path / "results")
    words = ("table", "main", "--rows", "podnet", "--columns", "5 tasks")
    assert "65.00±4.00" in call(*words)[1]
    assert "63.00±2.83" in call(*words, "--orders", "2")[1]
    assert "61.00" in call(*words, "--orders", "1")[1]


def test_pages_are_written_where_one_stands(call, tmp_path):
    store_result(result_report(PODNET, "podnet-0", 0.65), tmp_path / "results")
    assert call("table", "--write")[0] == 0
    assert "65.00" in (tmp_path / "REPRODUCTION.md").read_text()


def test_no_reports_leave_pages_alone(call, tmp_path):
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
        (("main", "--fill", "--minutes", "-1"), "-minutes"),
        (("main", "--fill", "--at-once", "0"), "At least one"),
        (("--write", "--orders", "1"), "--orders"),
        (("main", "--partition", "gpu"), "--slurm"),
        (("main", "--fill", "--sbatch", "account=vision"), "--slurm"),
        (("main", "--plan", "--minutes", "5"), "--minutes"),
    ],
)
def test_wrong_input_is_refused(table, words, named):
    code, _, errors = table(*words)
    assert code == 2
    assert named in errors


@pytest.fixture
def results(tmp_path):
    """Both rows of PODNet at 5 tasks, over three orders."""
    for setting, values in {PODNET: (0.64, 0.65, 0.66), PLUGGED: (0.66, 0.67, 0.69)}.items():
        for order, value in zip(ORDERS, values, strict=True):
            store_result(result_report(setting, order, value), tmp_path)
    return read_results(tmp_path)


def printed(screen):
    console = Output(file=io.StringIO(), width=120)
    console.print(screen)
    return console.file.getvalue()


def test_a_cell_shows_paper_and_ours(results):
    text = printed(table_screen(selected("main", ["podnet"], ["5 tasks", "10 tasks"]), results))
    assert "67.24±" in text
    assert "67.33±1.53" in text
    assert "+0.09 (3)" in text
    assert text.count(" min ") == 3  # what the three rows lack at 10 tasks


def test_rows_and_columns_can_be_chosen():
    assert list(selected("main", ["PODNet* + CCFA"]).rows) == ["PODNet* + CCFA"]
    assert selected("memory", columns=["m=5"]).columns == ("m=5",)


@pytest.mark.parametrize(
    ("choice", "name"),
    [(("mian",), "main"), (("main", ["podnett"]), "podnet"), (("main", [], ["5 task"]), "5 tasks")],
)
def test_unknown_names_suggest_the_right_one(choice, name):
    with pytest.raises(UsageError, match=name):
        selected(*choice)


def test_the_overview_counts_cells(results):
    text = printed(overview_screen(results))
    assert all(name in text for name in TABLES)


def test_the_page_has_every_cell(results):
    page = reproduction(results)
    printed_cells = sum(cell is not None for table in TABLES.values() for row in table.rows.values() for cell in row)
    lines = page.split("## The gain of CCFA")[1].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| row", "| ---"))]
    gains = [line for line in rows if line.startswith("| podnet | B50-inc10")]
    assert len(rows) - len(gains) - 1 == printed_cells  # the heading of the gains
    assert gains == ["| podnet | B50-inc10 | +2.62 | +2.33 ± 0.58 | 3 |"]
    assert f" of {len(cells())} different cells" in page


def test_forgetting_is_shown_by_both_definitions(tmp_path):
    setting = replace(PLUGGED, scenario="B50-inc1")
    store_result(result_report(setting, "podnet-0", 0.25), tmp_path)
    (row,) = [line for line in reproduction(read_results(tmp_path)).splitlines() if "by Lee et al." in line]
    assert row.startswith(
        "| Forgetting | 5 features | 24.97 | [25.00](results/cifar100-B50-inc1) (by Lee et al. 2019: 25.00) | +0.03"
    )


def test_misses_are_marked(tmp_path):
    store_result(result_report(PLUGGED, "podnet-0", 0.60), tmp_path)
    assert "**-7.24**" in reproduction(read_results(tmp_path))


def test_a_cell_s_command_can_be_typed(call):
    setting = replace(PLUGGED, memory=5, options=(("ccfa.count", "1"),))
    command = cell_command(setting)
    assert command == (
        "ccfa sweep podnet --ccfa on --orders podnet-0 podnet-1 podnet-2 --seeds 1 --data cifar100 "
        "--scenario B50-inc10 --memory 5 --set ccfa.count=1"
    )
    code, *_ = call(*command.split()[1:], "--data-dir", "nowhere")
    assert code == 3  # it is understood, and fails for want of data


def test_the_main_table_has_measured_rows(results):
    lines = main_table(results).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| PODNet", "| PODNet + CCFA"]
    assert lines[3].endswith("67.24 / 67.33 ± 1.53 (3) |")


def test_the_readme_s_table_is_replaced(results):
    readme = with_main_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", results)
    assert readme.startswith(f"before\n{BEGIN}\n| CIFAR-100")
    assert readme.endswith(f"{END}\nafter\n")
    assert "old" not in readme
    with pytest.raises(UsageError):
        with_main_table(f"{BEGIN} and no end", results)


def test_reproduction_and_readme_are_current():
    stored = read_results(ROOT / "results")
    assert (ROOT / "REPRODUCTION.md").read_text() == reproduction(stored), "run `ccfa table --write`"
    readme = (ROOT / "README.md").read_text()
    assert readme == with_main_table(readme, stored), "run `ccfa table --write`"
