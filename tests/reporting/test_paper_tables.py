"""`ccfa table`: what it shows and writes; and what it runs, with short runs on digits in the place of the paper's."""

import shlex
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from ccfa.evaluation import Report
from ccfa.experiments import Experiment
from ccfa.experiments.running import TIME_LIMIT_CODE
from ccfa.experiments.tables import FURTHER, ORDERS, TABLES, read_results, store_result
from ccfa.reporting import paper_tables
from ccfa.reporting.paper_tables import CATALOGUE, MAIN, reproduction, with_generated
from stored_results import PODNET, result_report

ROOT = Path(__file__).parents[2]
OURS = replace(PODNET, ccfa=True)
RUNS = [Experiment("finetune", scenario="5,5", seed=seed, options={"epochs": "0"}) for seed in (1, 2)]


@pytest.fixture
def table(call, tmp_path, monkeypatch):
    """The verb, with two runs on digits as what is missing until their reports are kept."""

    def missing(cells, results, orders):
        return [run for run in RUNS if not (tmp_path / "results" / "digits-5,5" / f"{run.name}.json").exists()]

    monkeypatch.setattr(paper_tables, "left_to_run", missing)
    return lambda *words: call("table", *words)


@pytest.fixture
def results(tmp_path):
    """Reports of PODNet with and without CCFA at 5 tasks, over three orders."""
    for setting, values in {PODNET: (0.61, 0.65, 0.69), OURS: (0.66, 0.67, 0.69)}.items():
        for order, value in zip(ORDERS, values, strict=True):
            store_result(result_report(setting, order, value), tmp_path / "results")
    return read_results(tmp_path / "results")


def kept(folder):
    return {path.stem: Report.from_json(path.read_text()) for path in folder.rglob("*.json")}


def test_filling_keeps_every_report(table, tmp_path):
    assert table("--fill", "--at-once", "8")[0] == 0
    reports = kept(tmp_path / "results")
    assert set(reports) == {run.name for run in RUNS}
    assert all(report.finished and report.environment["at_once"] == len(RUNS) for report in reports.values())
    assert "No run is missing" in table("--fill")[1]


def test_stopped_filling_continues_elsewhere(table, tmp_path, fail):
    code, _, errors = table("--fill", "--out", "here", "--minutes", "0")
    assert code == TIME_LIMIT_CODE
    assert "2 runs" in errors
    fail("evaluate:2:sigterm")
    assert table("--fill", "--out", "here")[0] == 143
    fail("")
    shutil.move("here", "there")
    assert table("--fill", "--out", "there")[0] == 0
    assert len(kept(tmp_path / "results")) == 2


def test_planned_commands_may_be_repeated(table, call, tmp_path):
    code, output, _ = table("--plan", "--device", "cpu", "--no-graph", "--checkpoint-minutes", "1")
    assert code == 0
    lines = [shlex.split(line) for line in output.splitlines()]
    assert [words[:3] for words in lines] == [["ccfa", "run", "finetune"]] * 2
    assert all(words in output for words in ("--device cpu", "--no-graph", "--checkpoint-minutes 1.0"))
    for _ in range(2):
        assert call(*lines[1][1:])[0] == 0
    assert len(kept(tmp_path / "results")) == 1
    assert len(table("--plan")[1].splitlines()) == 1


def test_a_plan_without_runs_says_why(call):
    code, output, errors = call("table", "main", "--rows", "Mnemonics", "--plan")
    assert (code, output) == (0, "")
    assert "3 cells" in errors


def test_imagenet_is_planned_by_name(call):
    code, output, _ = call("table", "imagenet100", "--rows", "PODNet* + CCFA, 5 tasks", "--plan")
    lines = output.splitlines()
    assert (code, len(lines)) == (0, 3)
    assert "--data imagenet100 --seed 1 --ccfa --order podnet --scenario B50-inc10 --memory 1" in lines[0]
    assert "imagenet" not in call("table", "--plan")[1]
    assert "needs ImageNet" in call("table", "imagenet1000")[1]
    assert call("table")[1].count("needs ImageNet") == 2


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
    assert submitted.pop("commands") == [shlex.split(line) for line in table("--plan")[1].splitlines()]
    assert submitted == {"minutes": 30, "partition": "gpu", "at_once": 1, "options": {"account": "vision"}}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("mian",), "main"),
        (("main", "--rows", "podnett"), "podnet"),
        (("field", "--rows", "Foo"), "'DER without pruning, ResNet-32'"),
        (("--rows", "podnet"), "ccfa table main"),
        (("main", "--orders", "4"), "--orders"),
        (("main", "--fill", "--plan"), "--plan"),
        (("main", "--fill", "--at-once", "0"), "At least one"),
        (("main", "--plan", "--minutes", "5"), "--minutes"),
        (("main", "--slurm", "--sbatch", "account"), "--sbatch"),
        (("main", "--partition", "gpu"), "--slurm"),
        (("main", "--write"), "--write"),
        (("--write", "--orders", "1"), "--orders"),
    ],
)
def test_wrong_input_is_refused(table, words, named):
    code, _, errors = table(*words)
    assert code == 2
    assert named in errors


def test_a_table_shows_paper_and_ours(results, call):
    words = ("table", "main", "--rows", "podnet", "--columns", "5 tasks")
    output = call(*words, "10 tasks")[1]
    assert all(text in output for text in ("67.24±", "67.33±1.53", "+0.09 (3)", "65.00±4.00"))
    assert output.count(" GPU min ") == 3  # what the three rows lack at 10 tasks
    assert "63.00±2.83" in call(*words, "--orders", "2")[1]
    overview = call("table")[1]
    assert all(name in overview for name in TABLES | FURTHER)


def test_without_reports_there_is_the_paper(call, tmp_path):
    code, output, _ = call("table", "main", "--rows", "PODNet* + CCFA")
    assert code == 0
    assert "67.24" in output
    assert "64.62" not in output, "of another row"
    (tmp_path / "REPRODUCTION.md").write_text("as it was")
    assert call("table", "--write", "--results", "resluts")[0] == 3
    assert (tmp_path / "REPRODUCTION.md").read_text() == "as it was"


def test_pages_are_written_in_the_current_folder(results, call, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(["before", MAIN[0], "old", MAIN[1], "after", *CATALOGUE]))
    assert call("table", "--write")[0] == 0
    assert "67.33" in (tmp_path / "REPRODUCTION.md").read_text()
    text, methods = readme.read_text().split(CATALOGUE[0])
    assert [line.split(" |")[0] for line in methods.splitlines() if line.endswith("✓ |")] == ["| `podnet`"]
    before, _, *rows, _, after = text.splitlines()
    assert (before, after) == ("before", "after")
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| PODNet", "| PODNet + CCFA"]
    assert rows[3].endswith("67.24 / 67.33 ± 1.53 (3) |")
    readme.write_text(f"{MAIN[0]} and no end")
    assert call("table", "--write")[0] == 2


def test_the_page_has_every_cell(results):
    _, gains, *tables, further = reproduction(results).split("\n## ")
    assert gains.splitlines()[-1] == "| podnet | B50-inc10 | +2.62 | +2.33 ± 2.52 | 3 |"
    assert [sum(line.startswith("| ") for line in table.splitlines()) - 2 for table in tables] == [
        len(table.cells) for table in TABLES.values()
    ]
    assert sum("`ccfa sweep" in line for line in further.splitlines()) == sum(
        len(table.cells) for table in FURTHER.values()
    )


def test_a_further_table_says_what_is_above_the_paper(tmp_path, call):
    setting = next(
        cell.setting
        for cell in FURTHER["readouts"].rows["ACIL, 300 epochs with TrivialAugment"]
        if cell and cell.value > 0
    )
    sizes = {"parameters_mb": 2.0, "remembered_mb": 5.5, "exemplars_mb": 0.0}
    store_result(replace(result_report(setting, "podnet-0", 0.70), **sizes), tmp_path / "results")
    page = reproduction(read_results(tmp_path / "results"))
    (row,) = [
        line for line in page.splitlines() if line.startswith("| ACIL, 300 epochs with TrivialAugment | 25 tasks")
    ]
    assert [text.strip() for text in row.split(" | ")][2:7] == [
        "71.05",
        "[70.00](results/cifar100-B50-inc2)",
        "-1.05",
        "+5.12",
        "7.5",
    ]
    assert page.splitlines()[4].startswith("0 of 217 different cells are measured")
    assert "-1.05 (1)" in call("table", "readouts", "--rows", "acil")[1]


def test_the_command_of_a_cell_can_be_typed(results, call):
    (row,) = [
        line for line in reproduction(results).splitlines() if line.startswith("| PODNet + CCFA towards GT | m=5")
    ]
    command = row.split("`")[1]
    assert "--ccfa on --orders podnet-0 podnet-1 podnet-2 --seeds 1" in command
    assert "--memory 5 --set ccfa.target=own-label --at-once 8" in command
    code, *_ = call(*command.split()[1:], "--data-dir", "nowhere")
    assert code == 3  # it is understood, and fails for want of data


def test_reproduction_and_readme_are_current():
    stored = read_results(ROOT / "results")
    assert (ROOT / "REPRODUCTION.md").read_text() == reproduction(stored), "run `ccfa table --write`"
    for path in (ROOT / "README.md", ROOT / "docs" / "methods" / "README.md"):
        page = path.read_text()
        assert CATALOGUE[0] in page
        assert page == with_generated(page, stored, path), "run `ccfa table --write`"
