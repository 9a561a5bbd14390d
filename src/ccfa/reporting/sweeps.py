"""Many runs as one table: methods with and without CCFA, mean and spread over class orders and seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from ccfa.data import Stage
from ccfa.evaluation import mean_and_spread
from ccfa.experiments.sweep import Cell
from ccfa.experiments.tables import CITED_ONLY, published
from ccfa.learning import Progress


class StageLines:
    """Tells of each stage of one run among several, a line each."""

    def __init__(self, name: str, num_stages: int, console: Console) -> None:
        self.name = name
        self.num_stages = num_stages
        self.console = console

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Nothing: several runs would talk at once."""

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Nothing."""

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """The stage's accuracy."""
        self.console.print(
            f"{self.name}  stage {stage.index + 1}/{self.num_stages}  accuracy {result['accuracy']:.2%}  "
            f"{result['seconds']:.1f} s",
            soft_wrap=True,
        )


def sweep_table(cells: Mapping[tuple[str, bool], Cell], data: str, scenario: str) -> Table:
    """Average incremental accuracy in percent, mean +- standard deviation, CCFA's paired gain, the paper's values."""
    shown = [published(method, ccfa, data, scenario) for method, ccfa in cells]
    with_paper = any(value is not None for value in shown)
    table = Table(title=f"average incremental accuracy, percent · {data} {scenario}", title_justify="left")
    for heading in ("method", "runs", "alone", "with CCFA", "gain"):
        table.add_column(heading, no_wrap=heading != "with CCFA")
    if with_paper:
        table.add_column("paper: alone, with CCFA")
    for method in dict.fromkeys(name for name, _ in cells):
        alone, plugged = cells.get((method, False)), cells.get((method, True))
        counts = [str(len(cell.reports)) for cell in (alone, plugged) if cell]
        row = [method, " + ".join(counts), _value(alone), _value(plugged), _gain(alone, plugged)]
        if with_paper:
            row.append(_paper(published(method, False, data, scenario), published(method, True, data, scenario)))
        table.add_row(*row)
    if with_paper:
        for name, values in CITED_ONLY.items():
            table.add_row(name, "", "", "", "", f"{_paper(values.cell(scenario))} (published value only)")
    return table


def averages(cell: Cell) -> dict[tuple[str, int], float]:
    """Each run's average incremental accuracy by the method's own rule, in percent."""
    return {key: 100 * report.own_metrics["average_incremental_accuracy"] for key, report in cell.reports.items()}


def _value(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.reason:
        return f"- ({cell.reason})"
    return _mean_and_spread(list(averages(cell).values()))


def _gain(alone: Cell | None, plugged: Cell | None) -> str:
    """The mean difference of runs with the same order and seed."""
    if alone is None or plugged is None or plugged.reason:
        return ""
    before, after = averages(alone), averages(plugged)
    differences = [after[key] - before[key] for key in before if key in after]
    return _mean_and_spread(differences, sign="+") if differences else ""


def _mean_and_spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    mean, spread = mean_and_spread(values)
    return f"{mean:{sign}.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")


def _paper(*values: float | None) -> str:
    return ", ".join("-" if value is None else f"{value:.2f}" for value in values)
