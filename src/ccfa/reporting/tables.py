"""Results as tables for the terminal."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS, order_names
from ccfa.evaluation import DEFINITIONS, Report
from ccfa.experiments.options import schema
from ccfa.experiments.presets import SCENARIOS
from ccfa.experiments.tables import CITED_ONLY, NOT_MEASURED, PAPERS, REPRODUCED
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING
from ccfa.models import BACKBONES

COLUMNS = {
    "average_incremental_accuracy": "average",
    "last_accuracy": "last",
    "new_class_accuracy": "new",
    "old_class_accuracy": "old",
    "forgetting_max_minus_last": "forgetting max-last",
}


def metrics_table(report: Report) -> Table:
    """Every metric of a run with its definition, by logits and by nearest mean."""
    table = Table(title=report.name, title_justify="left")
    table.add_column("percent", no_wrap=True)
    for rule in ("logits", "nearest mean"):
        own = " (own rule)" if rule == report.own_rule else ""
        table.add_column(f"by {rule}{own}", justify="right")
    table.add_column("definition")
    for name, definition in DEFINITIONS.items():
        nearest = report.metrics_by_nearest_mean
        by_mean = percent(nearest[name]) if nearest else "-"
        table.add_row(name.replace("_", " "), percent(report.metrics[name]), by_mean, definition)
    return table


def comparison_table(runs: Sequence[tuple[Path, Report]]) -> Table:
    """Runs side by side, a line each, by the rule that its method predicts with."""
    table = Table(title="percent", title_justify="left")
    table.add_column("run", overflow="fold")  # a name cut short is no name
    for heading in ("by", *COLUMNS.values(), "time"):
        table.add_column(heading)
    for path, report in runs:
        values = [percent(report.own_metrics[name]) for name in COLUMNS]
        name = f"{path}" if report.finished else f"{path} (unfinished)"
        table.add_row(
            name, report.own_rule, *values, f"{report.seconds:.0f} s", style=None if report.finished else "dim"
        )
    return table


def definitions() -> list[str]:
    """What each column of the comparison means."""
    return [f"{heading}: {DEFINITIONS[name]}" for name, heading in COLUMNS.items()]


def percent(value: float) -> str:
    """A fraction as a percentage; a dash where the metric has no value."""
    return "-" if value != value else f"{100 * value:.2f}"


def catalogue(what: str) -> list[Table]:
    """What there is to choose from, of one kind."""
    if what == "methods":
        return [_methods()]
    if what == "options":
        factories: dict[str, Callable[..., Any]] = {**METHODS, "ccfa": CCFA, **MIXES}
        return [_options(name, function) for name, function in factories.items()]
    names: dict[str, Mapping[str, str]] = {
        "datasets": {**DATASETS, "PATH": "an image folder: train/<class>/ and test/<class>/, or <class>/"},
        "scenarios": SCENARIOS,
        "orders": order_names(),
        "backbones": {name: str(builder) for name, builder in BACKBONES.items()},
    }
    table = Table(what, "what it is")
    for name, meaning in names[what].items():
        table.add_row(name, meaning)
    return [table]


def _methods() -> Table:
    table = Table("method", "what it is", "paper", "memory", "published number reproduced")
    for name, function in METHODS.items():
        method = function()
        kept = method.memory.quota(1)
        memory = "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"
        needed = ", needed" if method.needs_memory else ""
        reproduced = REPRODUCED.get(name, NOT_MEASURED) if name in PAPERS else ""
        table.add_row(name, _first_line(function), PAPERS.get(name, ""), memory + needed, reproduced)
    for name in CITED_ONLY:
        table.add_row(name, "in tables with its published values only", "", "", "")
    return table


def _options(name: str, function: Callable[..., Any]) -> Table:
    table = Table("option", "type", "default", title=name, title_justify="left")
    parameters = inspect.signature(function).parameters
    for option, kind in schema(function).items():
        default = parameters[option].default if option in parameters else "as the method it builds on"
        table.add_row(option, inspect.formatannotation(kind), str(default))
    return table


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]
