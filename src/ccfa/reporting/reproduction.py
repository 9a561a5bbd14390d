"""The paper's tables beside ours as a page, REPRODUCTION.md, and in short for the README."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ccfa.errors import UsageError
from ccfa.experiments.cells import Cell, Setting, Table, experiment_for
from ccfa.experiments.ledger import ORDERS, SEED, Result, can_run, measured
from ccfa.experiments.tables import TABLES, cell_for, cells
from ccfa.files import write_atomically
from ccfa.reporting.paper_tables import COST, minutes_left, ours_text, paper_text
from ccfa.reporting.values import Value, counted

CLOSE = 0.6  # points: what counts as reproduced
EXPLANATIONS = (
    "`*`: re-run by the paper's authors. copied: taken by them from another paper.",
    "ours: mean ± standard deviation over class orders, each order's seeds averaged first; the link leads to the "
    "reports, whose `metrics` hold the values of single runs.",
    "The command repeats all runs of a cell. Add `--data-dir DIR` where CIFAR-100 is not in `$CCFA_DATA`, and "
    "`--results DIR` to keep the reports.",
    "GPU min: the runs' time divided by the number of runs at once. Fewer may have been at work at the end, so it is a "
    "lower bound.",
    COST,
    "†: the commit was recorded wrongly and corrected by hand (benchmarks/RESULTS.md).",
)
BEGIN, END = "<!-- main table: written by `ccfa table --write` -->", "<!-- end of the main table -->"


def write_reproduction(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write REPRODUCTION.md and, where there is one with its marks, the README's table."""
    written = [folder / "REPRODUCTION.md"]
    write_atomically(written[0], reproduction(results))
    readme = folder / "README.md"
    if readme.exists() and BEGIN in readme.read_text():
        write_atomically(readme, with_main_table(readme.read_text(), results))
        written.append(readme)
    return written


def with_main_table(readme: str, results: Sequence[Result]) -> str:
    """The README with its table written anew between the marks."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UsageError(f"README.md has no line {END!r} after {BEGIN!r}.")
    return f"{before}{BEGIN}\n{main_table(results)}\n{END}{after}"


def main_table(results: Sequence[Result]) -> str:
    """The rows of the main table that we have measured, in Markdown: the paper's value, then ours."""
    table = TABLES["supplement"]
    lines = [_line(["CIFAR-100, percent", *table.columns]), _line(["---"] * (1 + len(table.columns)))]
    for label, row in table.rows.items():
        if any(cell and measured(cell, results) for cell in row):
            lines.append(_line([label.replace("*", ""), *(_short(cell, results) for cell in row)]))
    return "\n".join(lines)


def reproduction(results: Sequence[Result]) -> str:
    """Every cell of the paper, ours beside it, as a Markdown page."""
    distinct = cells()
    found = {cell: ours for cell in distinct if (ours := measured(cell, results))}
    targets = [cell for cell in found if cell.is_target]
    close = [cell for cell in targets if abs(found[cell].mean - cell.value) <= CLOSE]
    minutes = sum(result.gpu_minutes for result in results)
    lines = [
        "# Reproduction",
        "",
        "Every number of the paper beside ours. This page is written by `ccfa table --write` from the reports under "
        "`results/`; a test checks that it is current.",
        "",
        f"{len(found)} of {len(distinct)} different cells are measured (some are printed in several tables), by "
        f"{counted(len({cell.setting for cell in found}), 'setting')} and {counted(len(results), 'run')} of about "
        f"{minutes:.0f} GPU minutes in all. {len(close)} of them are within {CLOSE} points of the paper, "
        f"{len(targets) - len(close)} are not and are printed bold.",
        "",
        *(f"- {line}" for line in EXPLANATIONS),
        "",
        "The measured rows of methods with and without CCFA, the paper's value / ours (number of runs):",
        "",
        main_table(results),
        "",
        "## The gain of CCFA",
        "",
        "Paired: each run with CCFA minus the run without it of the same class order and seed.",
        "",
        *_gains(results),
    ]
    for table in TABLES.values():
        lines += ["", f"## {table.name}: {table.title}", "", *_page_rows(table, results)]
    return "\n".join(lines) + "\n"


def _gains(results: Sequence[Result]) -> Iterator[str]:
    """What CCFA adds, paired by class order and seed, beside the gain that the paper's own two runs have."""
    yield _line(["method", "scenario", "paper", "ours, paired", "pairs"])
    yield _line(["---"] * 5)
    for plugged in cells():
        alone = cell_for(replace(plugged.setting, ccfa=False, options=()))
        if not plugged.setting.ccfa or plugged.setting.options or not alone or alone.metric != plugged.metric:
            continue
        pairs = _paired(plugged.setting, alone.setting, results)
        if pairs and plugged.is_target:
            setting = plugged.setting
            memory = "" if setting.memory in (20, None) else f", {setting.memory} exemplars"
            name = f"{setting.method}{f' + {setting.mix}' if setting.mix else ''}{memory}"
            gain = f"{plugged.value - alone.value:+.2f}"
            yield _line([name, setting.scenario, gain, str(Value.of(pairs, sign="+")), str(len(pairs))])


def _paired(plugged: Setting, alone: Setting, results: Sequence[Result]) -> list[float]:
    def averages(setting: Setting) -> dict[tuple[str, int], float]:
        return {
            (result.order, result.experiment.seed): result.report.own_metrics["average_incremental_accuracy"]
            for result in results
            if result.setting == setting
        }

    before, after = averages(alone), averages(plugged)
    return [100 * (after[key] - before[key]) for key in before if key in after]


def _page_rows(table: Table, results: Sequence[Result]) -> Iterator[str]:
    headings = [
        "row",
        "column",
        "paper",
        "ours",
        "difference",
        "orders; seeds",
        "GPU min",
        "device",
        "commit",
        "command",
    ]
    yield _line(headings)
    yield _line(["---"] * len(headings))
    for label, row in table.rows.items():
        for column, cell in zip(table.columns, row, strict=True):
            if cell:
                yield _line([label.replace("*", "\\*"), column, *_page_cell(cell, results)])


def _page_cell(cell: Cell, results: Sequence[Result]) -> list[str]:
    ours, setting = measured(cell, results), cell.setting
    paper = (
        paper_text(cell) + (", copied" if cell.source == "copied" else "") + (f" ({cell.slip})" if cell.slip else "")
    )
    command = f"`{cell_command(setting)}`" if can_run(setting) else ""
    if ours is None:
        cost = f"~{minutes_left(cell, results):.0f}" if can_run(setting) else ""
        return [paper, "", "", "", cost, "", "", command]
    difference = f"{ours.mean - cell.value:+.2f}"
    if cell.is_target and abs(ours.mean - cell.value) > CLOSE:
        difference = f"**{difference}**"
    folders = sorted({result.path.parent.name for result in ours.results})
    value = f"[{Value(ours.mean, ours.spread)}](results/{folders[0]})"
    if cell.metric == "forgetting_inclearn":  # the paper cites Lee et al., whose equation cannot give its numbers
        by_lee = measured(replace(cell, metric="forgetting_lee2019"), results)
        value += f" (by Lee et al. 2019: {Value(by_lee.mean, by_lee.spread)})" if by_lee else ""
    runs = ours.results
    seeds = sorted({result.experiment.seed for result in runs})
    orders = sorted({result.order for result in runs})
    environments = [result.report.environment for result in runs]
    return [
        paper,
        value,
        difference,
        f"{', '.join(orders)}; {', '.join(map(str, seeds))}",
        f"{sum(result.gpu_minutes for result in runs):.1f}",
        ", ".join(sorted({str(each.get("device")) for each in environments})),
        ", ".join(sorted({f"{each.get('commit')}{'†' if 'commit_note' in each else ''}" for each in environments})),
        command,
    ]


def cell_command(setting: Setting) -> str:
    """The command that runs a cell again, on the paper's three class orders."""
    method, *rest = experiment_for(setting, None, SEED).arguments()
    rest = [word for word in rest if word != "--ccfa"]
    place = rest.index("--seed")
    rest[place : place + 2] = []
    words = ["ccfa", "sweep", method, "--ccfa", "on" if setting.ccfa else "off", "--orders", *ORDERS]
    return shlex.join([*words, "--seeds", str(SEED), *rest])


def _short(cell: Cell | None, results: Sequence[Result]) -> str:
    ours = measured(cell, results) if cell else None
    return "" if not cell else f"{cell.value:.2f} / {ours_text(ours) if ours else '-'}"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
