"""The reports under results/, what they say about the paper's cells, and which runs are left."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ccfa.data import data_set, parse_scenario
from ccfa.errors import ModelError, Notice, ResourceError
from ccfa.evaluation import Numbers, Report, mean_and_spread
from ccfa.experiments.building import experiment_method
from ccfa.experiments.cells import NUM_CLASSES, Cell, Setting, Table, experiment_for, setting_of
from ccfa.experiments.experiment import experiment_of
from ccfa.experiments.options import describe
from ccfa.experiments.presets import default_scenario
from ccfa.experiments.tables import TABLES
from ccfa.experiments.workload import workload
from ccfa.files import write_atomically
from ccfa.methods import METHODS
from ccfa.settings import Experiment

ORDERS = ("podnet-0", "podnet-1", "podnet-2")  # the three class orders of the paper's averages
SEED = 1
IMAGES_PER_CLASS = 500
STEPS_PER_SECOND = 745.0  # PODNet's ResNet-32 on one H200, eight runs at once, in all
SLOWER = {"aanet": 2.0, "aanet-ucir": 2.0, "aanet-afc": 2.0, "il2a": 8.7, "pass": 8.7}  # steps of other networks, about
DECIMALS = 6  # of a stored accuracy


class Result(NamedTuple):
    """A finished run: its report, the file it is in, and what it measured."""

    path: Path
    report: Report
    experiment: Experiment
    setting: Setting

    @property
    def order(self) -> str:
        """The name of the class order."""
        return self.experiment.order or data_set(self.experiment.data).order

    @property
    def gpu_minutes(self) -> float:
        """The run's time divided by the number of runs at once; fewer may have been at work at its end."""
        return self.report.seconds / 60 / int(self.report.environment.get("at_once", 1))


@dataclass(frozen=True)
class Measured:
    """What our runs say about a cell, in percent."""

    mean: float  # over class orders
    spread: float  # standard deviation over class orders; NaN for one
    results: tuple[Result, ...]


def read_results(folder: Path) -> list[Result]:
    """The finished runs of the paper's settings and class orders, by path.

    A file that is damaged, or whose method is no longer what its options stand for, is left out with a warning.
    """
    results = []
    for path in sorted(folder.rglob("*.json")):
        try:
            report = Report.from_json(path.read_text())
            experiment = experiment_of(report.config)
        except (ModelError, OSError, UnicodeDecodeError) as error:
            warnings.warn(Notice(f"{path} is left out: {error}"), stacklevel=2)
            continue
        setting = setting_of(report.config["experiment"])
        if setting is None or not report.finished:
            continue
        result = Result(path, report, experiment, setting)
        if not _agree(report.config.get("resolved", {}).get("method"), describe(experiment_method(experiment))):
            told = "its method was another one than this version builds from the same options"
            warnings.warn(Notice(f"{path} is left out: {told}."), stacklevel=2)
        elif result.order in ORDERS:
            results.append(result)
    return results


def _agree(stored: Any, now: Any) -> bool:
    """Whether two descriptions of a method are the same in all that both of them have."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return all(_agree(stored[key], now[key]) for key in stored.keys() & now.keys())
    if isinstance(stored, list) and isinstance(now, list):
        return len(stored) == len(now) and all(map(_agree, stored, now))
    return bool(stored == now)


def store_result(report: Report, folder: Path) -> Path:
    """Keep a finished run's report under results/, in a folder for each scenario, its accuracies rounded."""
    experiment = experiment_of(report.config)
    scenario = experiment.scenario or default_scenario(experiment.data, len(report.config["resolved"]["class_names"]))
    path = folder / f"{Path(experiment.data).name}-{scenario}" / f"{experiment.name}.json"
    rounded = replace(report, rules={rule: _rounded(numbers) for rule, numbers in report.rules.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"Could not create {path.parent}: {error.strerror}.") from error
    write_atomically(path, rounded.to_json())
    return path


def _rounded(numbers: Numbers) -> Numbers:
    rows = [[value and round(value, DECIMALS) for value in row] for row in numbers.accuracy_matrix]
    return replace(numbers, overall=[round(value, DECIMALS) for value in numbers.overall], accuracy_matrix=rows)


def results_of(cell: Cell, results: Iterable[Result]) -> list[Result]:
    """The runs that measure a cell; earlier reports may lack its metric."""
    return [
        result
        for result in results
        if result.setting == cell.setting and math.isfinite(result.report.metrics.get(cell.metric, math.nan))
    ]


def measured(cell: Cell, results: Iterable[Result]) -> Measured | None:
    """Mean and spread over class orders, each order's seeds averaged first; None where nothing was run."""
    by_order: dict[str, list[float]] = {}
    for result in (found := results_of(cell, results)):
        by_order.setdefault(result.order, []).append(100 * result.report.metrics[cell.metric])
    if not found:
        return None
    return Measured(*mean_and_spread([float(np.mean(values)) for values in by_order.values()]), tuple(found))


def orders_left(cell: Cell, results: Iterable[Result], num_orders: int = len(ORDERS)) -> list[str]:
    """The class orders on which a cell is not measured yet."""
    done = {result.order for result in results_of(cell, results)}
    return [order for order in ORDERS[:num_orders] if order not in done]


def left_to_run(
    cells: Iterable[Cell], results: Sequence[Result], num_orders: int = len(ORDERS), seed: int = SEED
) -> list[Experiment]:
    """The experiments that cells lack, one for each setting and class order, the most valuable first."""
    lacking = {
        (cell.setting, order): None
        for cell in cells
        if cell.is_target and can_run(cell.setting)
        for order in orders_left(cell, results, num_orders)
    }
    ordered = sorted(lacking, key=lambda run: (priority(run[0]), steps(run[0]), ORDERS.index(run[1])))
    return [experiment_for(setting, order, seed) for setting, order in ordered]


def can_run(setting: Setting) -> bool:
    """Whether this package has the method and knows how to get the data."""
    return setting.method in METHODS and setting.data == "cifar100"


@cache
def priority(setting: Setting) -> int:
    """The place of a setting in the order of what to measure first: CCFA's own methods, then how it is varied."""
    methods = ("podnet", "afc", "ucir", "aanet")
    names = ("mixing", "memory", "features", "ablation", "direction", "initial", "main", "imagenet100", "imagenet1000")
    starred = _settings(TABLES["supplement"])
    # Within a group the cheaper one is run first.
    groups = [[each for each in starred if each.method == method] for method in methods]
    groups += [_settings(TABLES[name]) for name in names]
    return next((place for place, group in enumerate(groups) if setting in group), len(groups))


@cache
def steps(setting: Setting) -> int:
    """Training steps of a run; with CCFA without those of the first stage, which it shares with the run without."""
    method = experiment_method(experiment_for(setting, None, 0))
    stages = parse_scenario(setting.scenario, NUM_CLASSES[setting.data])
    works = workload(method, stages, [IMAGES_PER_CLASS] * NUM_CLASSES[setting.data])
    return sum(work.steps for work in works[1 if setting.ccfa else 0 :])


def gpu_minutes(setting: Setting) -> float:
    """What a run costs on one H200 that eight runs share, roughly."""
    return steps(setting) * SLOWER.get(setting.method, 1.0) / STEPS_PER_SECOND / 60


def _settings(table: Table) -> list[Setting]:
    return [cell.setting for row in table.rows.values() for cell in row if cell]
