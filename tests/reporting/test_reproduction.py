import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ccfa.errors import UsageError
from ccfa.experiments.ledger import ORDERS, read_results, store_result
from ccfa.experiments.tables import TABLES, cells
from ccfa.reporting.paper_tables import overview_screen, selected, table_screen
from ccfa.reporting.reproduction import (
    BEGIN,
    END,
    cell_command,
    main_table,
    reproduction,
    with_main_table,
)
from stored_results import PODNET, result_report

ROOT = Path(__file__).parents[2]
PLUGGED = replace(PODNET, ccfa=True)


@pytest.fixture
def results(tmp_path):
    """Both rows of PODNet at 5 tasks, over three orders."""
    for setting, values in {PODNET: (0.64, 0.65, 0.66), PLUGGED: (0.66, 0.67, 0.69)}.items():
        for order, value in zip(ORDERS, values, strict=True):
            store_result(result_report(setting, order, value), tmp_path)
    return read_results(tmp_path)


def printed(*screens):
    console = Console(file=io.StringIO(), width=120)
    for screen in screens:
        console.print(screen)
    return console.file.getvalue()


def test_a_table_shows_paper_ours_difference_and_cost(results):
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


def test_the_page_has_every_cell_and_the_paired_gain(results):
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


def test_the_command_of_a_cell_is_one_that_can_be_typed(call):
    setting = replace(PLUGGED, memory=5, options=(("ccfa.count", "1"),))
    command = cell_command(setting)
    assert command == (
        "ccfa sweep podnet --ccfa on --orders podnet-0 podnet-1 podnet-2 --seeds 1 --data cifar100 "
        "--scenario B50-inc10 --memory 5 --set ccfa.count=1"
    )
    code, *_ = call(*command.split()[1:], "--data-dir", "nowhere")
    assert code == 3  # it is understood, and fails for want of data


def test_the_main_table_has_what_is_measured_only(results):
    lines = main_table(results).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| PODNet", "| PODNet + CCFA"]
    assert lines[3].endswith("67.24 / 67.33 ± 1.53 (3) |")


def test_the_readme_table_is_written_between_its_marks(results):
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
