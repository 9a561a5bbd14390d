"""The metrics of a run, and what there is to choose from, as tables for the terminal."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import describe_data_sets, order_names
from ccfa.evaluation import DEFINITIONS, Report
from ccfa.experiments.experiment import SCENARIOS, schema
from ccfa.experiments.tables import PAPERS, TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING
from ccfa.models import BACKBONES
from ccfa.reporting.values import percent


def metrics_table(report: Report, with_definitions: bool = True) -> Table:
    """Every metric of a run by every rule of prediction, the method's own first; earlier reports may lack some."""
    table = Table(title=report.name, title_justify="left")
    table.add_column("percent", no_wrap=True)
    rules = [report.own, *(rule for rule in report.rules if rule != report.own)]
    for rule in rules:
        own = " (own rule)" if rule == report.own else ""
        table.add_column(f"by {rule.replace('_', ' ')}{own}", justify="right")
    if with_definitions:
        table.add_column("definition")
    for name, definition in DEFINITIONS.items():
        values = [percent(report.rules[rule].metrics.get(name)) for rule in rules]
        table.add_row(name.replace("_", " "), *values, *([definition] if with_definitions else []))
    return table


def catalogue(what: str) -> list[Table]:
    """What there is to choose from, of one kind."""
    if what == "methods":
        return [_methods()]
    if what == "options":
        factories: dict[str, Callable[..., Any]] = {**METHODS, "ccfa": CCFA, **MIXES}
        return [_options(name, function) for name, function in factories.items()]
    names: dict[str, Mapping[str, str]] = {
        "datasets": describe_data_sets(),
        "scenarios": SCENARIOS,
        "orders": order_names(),
        "backbones": {name: str(builder) for name, builder in BACKBONES.items()},
        "tables": {name: table.title for name, table in TABLES.items()},
    }
    table = Table(what, "what it is")
    for name, meaning in names[what].items():
        table.add_row(name, meaning)
    return [table]


def _methods() -> Table:
    table = Table("method", "what it is", "paper", "memory")
    for name, function in METHODS.items():
        method = function()
        kept = method.memory.quota(1)
        memory = "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"
        needed = ", needed" if method.needs_memory else ""
        table.add_row(name, _first_line(function), PAPERS.get(name, ""), memory + needed)
    for name in cited_only():
        table.add_row(name, "in tables with its published values only", "", "")
    return table


def _options(name: str, function: Callable[..., Any]) -> Table:
    table = Table("option", "type", "default", title=name, title_justify="left")
    parameters = inspect.signature(function).parameters
    for option, kind in schema(function).items():
        table.add_row(option, inspect.formatannotation(kind), str(parameters[option].default))
    return table


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]
