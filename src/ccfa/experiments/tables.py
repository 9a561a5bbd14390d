"""The paper's tables: every number that the paper prints, what we measured of it, and the runs that are missing.

`paper_tables.toml` holds the numbers, each with the setting in which it was measured. A `PaperSetting` is an experiment
without class order and seeds; `setting_of` and `experiment_for` convert between the two. results/ has our reports.
`further_tables.toml` has tables of the same form for other methods and settings.
"""

import math
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ccfa.data import data_set, parse_scenario
from ccfa.errors import ModelError, Notice, UsageError
from ccfa.evaluation import Numbers, Report, mean_and_spread
from ccfa.experiments.experiment import build_method, describe, experiment_method, experiment_of
from ccfa.files import make_folder, write_atomically
from ccfa.learning.loop import num_batches
from ccfa.methods import METHODS
from ccfa.methods.bic import held_out_exemplars, not_a_tenth, num_held_out
from ccfa.methods.fetril import translated_samples
from ccfa.methods.method import RowSelector
from ccfa.methods.parts import balanced_exemplars
from ccfa.settings import Experiment, Mix

ORDERS = ("podnet-0", "podnet-1", "podnet-2")  # the three class orders of the paper's averages on CIFAR-100
SEED = 1
CIFAR100 = "cifar100"  # the only data set of the paper that can be downloaded
SIZES = {CIFAR100: (100, 500), "imagenet100": (100, 1300), "imagenet1000": (1000, 1281)}  # classes, images per class
AT_ONCE = 8  # runs that share one H200 wherever a cost is estimated
STEPS_PER_SECOND = 1600.0  # of PODNet with ResNet-32, over all of these runs; 1,480 to 1,740 with 3 to 9 of them
# Roughly how much longer a step of other methods takes; a backbone that is not the method's own follows its name.
# Not measured: GDumb's, GeoDL's, which is not captured, and DER's with ResNet-18.
SLOWER = {"aanet": 2.1, "gdumb": 2.0, "il2a": 19, "geodl": 21, "der": 21, "der resnet32-pycil": 1.0, "fetril": 0.2}
DECIMALS = 6  # of stored accuracies
PAPERS: dict[str, str] = {
    "ucir": "Hou et al., CVPR 2019",
    "geodl": "Simon et al., CVPR 2021",
    "podnet": "Douillard et al., ECCV 2020",
    "afc": "Kang et al., CVPR 2022",
    "aanet": "Liu et al., CVPR 2021, over PODNet",
    "aanet-ucir": "Liu et al., CVPR 2021, over UCIR",
    "aanet-afc": "Liu et al., CVPR 2021, over AFC",
    "icarl": "Rebuffi et al., CVPR 2017",
    "bic": "Wu et al., CVPR 2019",
    "wa": "Zhao et al., CVPR 2020",
    "lwf": "Li and Hoiem, ECCV 2016",
    "ewc": "Kirkpatrick et al., PNAS 2017",
    "gdumb": "Prabhu et al., ECCV 2020",
    "der": "Yan et al., CVPR 2021, without pruning",
    "foster": "Wang et al., ECCV 2022",
    "il2a": "Zhu et al., NeurIPS 2021",
    "pass": "Zhu et al., CVPR 2021",
    "ranpac": "McDonnell et al., NeurIPS 2023",
    "acil": "Zhuang et al., NeurIPS 2022",
    "simplecil": "Zhou et al., IJCV 2024",
    "slda": "Hayes and Kanan, CVPRW 2020",
    "fecam": "Goswami et al., NeurIPS 2023",
    "fetril": "Petit et al., WACV 2023",
}


@dataclass(frozen=True)
class PaperSetting:
    """What a number was measured on: everything that an experiment has except its class order and seeds."""

    data: str
    scenario: str
    method: str  # a name in METHODS, or of a method that the paper only cites
    ccfa: bool = False
    memory: int | None = 20  # exemplars per class; None for methods that keep none
    mix: Mix | None = None
    options: tuple[tuple[str, str], ...] = ()  # sorted; only those that differ from the defaults
    memory_total: int | None = None  # exemplars of all classes together, instead of `memory`

    def quota(self, num_classes: int) -> int:
        """Return the exemplars of a class while the memory is shared by some classes."""
        return (self.memory or 0) if self.memory_total is None else self.memory_total // max(num_classes, 1)


@dataclass(frozen=True)
class Cell:
    """A published number, in percent, with its setting and who measured it."""

    setting: PaperSetting
    value: float  # NaN in a further table if nothing is published
    source: Literal["rerun", "copied"]  # measured by the paper's authors, or copied by them from another paper
    metric: str = "average_incremental_accuracy"
    deviation: float | None = None  # over three class orders
    slip: str = ""  # what is wrong with the printed number; it begins with "deviation" if the value is right

    @property
    def is_target(self) -> bool:
        """Whether a run should reach the value, because it is not a misprint."""
        return not self.slip or self.slip.startswith("deviation")


Row = tuple[Cell | None, ...]
"""The cells of a row; None for a dash."""


@dataclass(frozen=True)
class Table:
    """A table: a row of cells for each label.

    A further table, which is not in the paper, has `notes`: for each label, where its published numbers come from.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, Row]
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """The cells that hold a number, row by row."""
        return [cell for row in self.rows.values() for cell in row if cell]


def cells() -> list[Cell]:
    """Return the distinct cells of the paper's tables; a cell that is printed twice occurs once."""
    return list(dict.fromkeys(cell for table in TABLES.values() for cell in table.cells))


def cell_for(setting: PaperSetting, metric: str = "average_incremental_accuracy") -> Cell | None:
    """Return the paper's cell for a setting; if it has two, the one that its authors measured."""
    found = [cell for cell in cells() if (cell.setting, cell.metric) == (setting, metric)]
    return min(found, key=lambda cell: cell.source == "copied", default=None)


@cache
def best_of_paper(data: str, scenario: str) -> float:
    """Return the highest average incremental accuracy that the paper prints with at most 20 exemplars per class.

    >>> [best_of_paper("cifar100", f"B50-inc{number}") for number in (1, 2, 5, 10)]
    [63.11, 64.88, 67.81, 69.28]
    """
    found = [
        cell.value
        for cell in cells()
        if (cell.setting.data, cell.setting.scenario) == (data, scenario)
        and cell.metric == "average_incremental_accuracy"
        and cell.setting.quota(1) <= 20
        and cell.is_target
    ]
    return max(found, default=math.nan)


def cited_only() -> dict[str, Row]:
    """Return the rows of the main table whose methods this package does not have, by the method's name.

    >>> list(cited_only())
    ['Mnemonics', 'TPCIL']
    """
    return {
        label.rstrip("*"): row
        for label, row in TABLES["main"].rows.items()
        if not any(cell and cell.setting.method in METHODS for cell in row)
    }


def experiment_for(setting: PaperSetting, order: str | None, seed: int) -> Experiment:
    """Return the experiment that measures a setting with one class order and seed."""
    default = build_method(setting.method, setting.data).memory.per_class or None
    is_default = setting.memory == default or setting.memory_total is not None
    return Experiment(
        method=setting.method,
        ccfa=setting.ccfa,
        mix=setting.mix,
        data=setting.data,
        scenario=setting.scenario,
        order=order,
        memory=None if is_default else setting.memory or 0,
        memory_total=setting.memory_total,
        seed=seed,
        options=dict(setting.options),
    )


def setting_of(experiment: Mapping[str, Any]) -> PaperSetting | None:
    """Return the setting of an experiment as config.json holds it; None if no table can have such a setting.

    Defaults are filled in, and options that only repeat a default are left out.
    """
    try:
        given = experiment_of({"experiment": dict(experiment)})
        if given.data not in SIZES or given.validation or given.weights:
            return None
        memory = experiment_method(given).memory
        options = _effective_options(given)
    except (ModelError, UsageError):  # it is damaged, or of another version
        return None
    num_classes, _ = SIZES[given.data]
    scenario = given.scenario or data_set(given.data).default_scenario(num_classes)
    first, *later = (stage.num_new for stage in parse_scenario(scenario, num_classes))
    if len(set(later)) == 1:  # B50-inc10 for 50,10,10,10,10,10 as well
        scenario = f"B{0 if first == later[0] else first}-inc{later[0]}"
    per_class = memory.per_class or None
    return PaperSetting(given.data, scenario, given.method, given.ccfa, per_class, given.mix, options, memory.total)


def _effective_options(given: Experiment) -> tuple[tuple[str, str], ...]:
    """The options without which the method would be another one; the memory has a field of its own."""
    kept = {name: text for name, text in sorted(given.options.items()) if name != "memory"}

    def built(options: dict[str, str]) -> Any:
        return describe(experiment_method(replace(given, memory=None, memory_total=None, options=options)))

    whole = built(kept)
    for name in list(kept):
        fewer = {other: text for other, text in kept.items() if other != name}
        if built(fewer) == whole:
            kept = fewer
    return tuple(kept.items())


def _tables(file: str) -> dict[str, Table]:
    tables = {}
    stored = tomllib.loads((files("ccfa.experiments") / file).read_text(encoding="utf-8"))
    for name, table in stored.items():
        rows = {}
        for label, row in table["rows"].items():
            words = zip(row["numbers"].split(), table["columns"].values(), strict=True)
            rows[label] = tuple(_cell(word, {**table, **row, **changes}) for word, changes in words)
        notes = {label: row["published"] for label, row in table["rows"].items() if "published" in row}
        tables[name] = Table(name, table["title"], tuple(table["columns"]), rows, notes)
    return tables


def _cell(word: str, row: Mapping[str, Any]) -> Cell | None:
    if word == "-":
        return None
    total = row.get("memory_total") if row.get("memory", 1) else None
    setting = PaperSetting(
        row.get("data", "cifar100"),
        row.get("scenario", "B50-inc1"),
        row["method"],
        row.get("ccfa", False),
        None if total is not None else row.get("memory", 20) or None,
        row.get("mix"),
        tuple(sorted(row.get("options", {}).items())),
        total,
    )
    value, _, deviation = word.removesuffix("c").partition("±")
    return Cell(
        setting,
        math.nan if value == "?" else float(value),  # one NaN, so that cells can be compared
        "copied" if word.endswith("c") else "rerun",
        row.get("metric", "average_incremental_accuracy"),
        float(deviation) if deviation else None,
        row.get("slip", ""),
    )


TABLES: dict[str, Table] = _tables("paper_tables.toml")
FURTHER: dict[str, Table] = _tables("further_tables.toml")


@dataclass(frozen=True)
class Result:
    """A run: its directory or the file of its report, and what came out."""

    path: Path
    report: Report

    @cached_property
    def experiment(self) -> Experiment:
        return experiment_of(self.report.config)

    @cached_property
    def setting(self) -> PaperSetting | None:
        """The setting, if the paper's tables can have it."""
        return setting_of(self.report.config["experiment"])

    @property
    def resolved(self) -> dict[str, Any]:
        """What the experiment resolved to: the method in full, stages, class order, sizes of the data."""
        return dict(self.report.config["resolved"])

    @property
    def order(self) -> str:
        """The name of the class order."""
        return self.experiment.order or data_set(self.experiment.data).order

    @property
    def key(self) -> tuple[tuple[int, ...], int, int]:
        """Class order and seeds: what differs between runs that are averaged."""
        seed, batch_seed = self.experiment.seed, self.experiment.batch_seed
        return tuple(self.resolved["class_order"]), seed, seed if batch_seed is None else batch_seed

    @property
    def average(self) -> float:
        """The average incremental accuracy in percent, by the method's own rule."""
        return 100 * self.report.metrics["average_incremental_accuracy"]

    @property
    def gpu_minutes(self) -> float:
        """The run's minutes divided by the number of runs that shared the device."""
        return self.report.minutes / int(self.report.environment.get("at_once", 1))


@dataclass(frozen=True)
class Measured:
    """What our runs say about a cell, in percent."""

    mean: float  # over class orders
    spread: float  # standard deviation over class orders; NaN if there is only one
    results: tuple[Result, ...]


def read_results(folder: Path) -> list[Result]:
    """Return the finished runs in a folder that have a setting and a class order of the paper, sorted by path.

    A file is left out with a warning if it is damaged, or if this version builds another method from its options.

    >>> read_results(Path("no-such-folder"))
    []
    """
    results = []
    for path in sorted(folder.rglob("*.json")):
        try:
            report = Report.from_json(path.read_text())
            result = Result(path, report)
            experiment = result.experiment
        except (ModelError, OSError, UnicodeDecodeError) as error:
            warnings.warn(Notice(f"{path} is left out: {error}"), stacklevel=2)
            continue
        if result.setting is None or not report.finished:
            continue
        if not _agree(report.config.get("resolved", {}).get("method"), describe(experiment_method(experiment))):
            reason = "this version builds another method from its options"
            warnings.warn(Notice(f"{path} is left out: {reason}."), stacklevel=2)
        elif result.order in orders_for(result.setting):
            results.append(result)
    return results


def _agree(stored: Any, now: Any) -> bool:
    """Whether two descriptions of a method agree in the fields that both have; versions add fields."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return all(_agree(stored[key], now[key]) for key in stored.keys() & now.keys())
    if isinstance(stored, list) and isinstance(now, list):
        return len(stored) == len(now) and all(map(_agree, stored, now))
    return bool(stored == now)


def store_result(report: Report, folder: Path) -> Path:
    """Write a finished run's report, with rounded accuracies, into the folder of its scenario, and return its path."""
    experiment = experiment_of(report.config)
    num_classes = len(report.config["resolved"]["class_names"])
    scenario = experiment.scenario or data_set(experiment.data).default_scenario(num_classes)
    path = folder / f"{Path(experiment.data).name}-{scenario}" / f"{experiment.name}.json"
    rounded = replace(report, rules={rule: _rounded(numbers) for rule, numbers in report.rules.items()})
    make_folder(path.parent)
    write_atomically(path, rounded.to_json())
    return path


def _rounded(numbers: Numbers) -> Numbers:
    rows = [[value and round(value, DECIMALS) for value in row] for row in numbers.accuracy_matrix]
    return replace(numbers, overall=[round(value, DECIMALS) for value in numbers.overall], accuracy_matrix=rows)


def results_of(cell: Cell, results: Iterable[Result]) -> list[Result]:
    """Return the runs that measure a cell; reports of earlier versions may lack its metric."""
    return [
        result
        for result in results
        if result.setting == cell.setting and math.isfinite(result.report.metrics.get(cell.metric, math.nan))
    ]


def measured(cell: Cell, results: Iterable[Result]) -> Measured | None:
    """Return mean and spread of a cell over class orders, after averaging each order's seeds; None without runs."""
    by_order: dict[str, list[float]] = {}
    for result in (found := results_of(cell, results)):
        by_order.setdefault(result.order, []).append(100 * result.report.metrics[cell.metric])
    if not found:
        return None
    return Measured(*mean_and_spread([float(np.mean(values)) for values in by_order.values()]), tuple(found))


def orders_left(cell: Cell, results: Iterable[Result], num_orders: int = len(ORDERS)) -> list[str]:
    """Return the class orders on which a cell is not measured yet."""
    done = {result.order for result in results_of(cell, results)}
    return [order for order in orders_for(cell.setting)[:num_orders] if order not in done]


def left_to_run(cells: Iterable[Cell], results: Sequence[Result], num_orders: int = len(ORDERS)) -> list[Experiment]:
    """Return the missing experiments of cells, one for each setting and class order, the most valuable first."""
    missing = {
        (cell.setting, order): None
        for cell in cells
        if cell.is_target and can_run(cell.setting)
        for order in orders_left(cell, results, num_orders)
    }
    ordered = sorted(missing, key=lambda run: (priority(run[0]), steps(run[0]), orders_for(run[0]).index(run[1])))
    return [experiment_for(setting, order, SEED) for setting, order in ordered]


def orders_for(setting: PaperSetting) -> tuple[str, ...]:
    """Return the class orders over which the paper averages: three on CIFAR-100, one on ImageNet."""
    return ORDERS if setting.data == CIFAR100 else ("podnet",)


def can_run(setting: PaperSetting) -> bool:
    """Return whether this package has the method and knows the data."""
    return setting.method in METHODS and setting.data in SIZES


def needs_imagenet(setting: PaperSetting) -> bool:
    """Return whether a run needs data that cannot be downloaded."""
    return setting.data != CIFAR100


@cache
def priority(setting: PaperSetting) -> int:
    """Return the rank of a setting: the methods that the paper plugs CCFA into, the variations of CCFA, the others."""
    methods = ("podnet", "afc", "ucir", "aanet")
    names = ("mixing", "memory", "features", "ablation", "direction", "initial", "main", "imagenet100", "imagenet1000")
    groups = [[cell for cell in TABLES["supplement"].cells if cell.setting.method == method] for method in methods]
    groups += [TABLES[name].cells for name in names]
    places = (place for place, group in enumerate(groups) if setting in [cell.setting for cell in group])
    return next(places, len(groups))


@cache
def steps(setting: PaperSetting) -> int:
    """Return the training steps of a run. A first stage that is shared, as of runs with CCFA, is not counted."""
    method = experiment_method(experiment_for(setting, None, 0))
    total = 0
    num_classes, per_class = SIZES[setting.data]
    shares_first = setting.ccfa or ("first", "podnet") in setting.options
    for stage in parse_scenario(setting.scenario, num_classes)[1 if shares_first else 0 :]:
        exemplars = min(setting.quota(stage.num_old), per_class)
        everything = stage.num_new * per_class + stage.num_old * exemplars
        held_out = stage.num_new * num_held_out(per_class) + stage.num_old * num_held_out(exemplars)
        rows: dict[RowSelector, int] = {
            balanced_exemplars: stage.num_seen * min(setting.quota(stage.num_seen), per_class),
            not_a_tenth: everything - held_out,
            held_out_exemplars: stage.num_seen * num_held_out(exemplars),
        }
        for phase in method.phases(stage):
            of_all = phase.samples is translated_samples  # as many features of old classes as of new ones
            num_rows = stage.num_seen * per_class if of_all else rows.get(phase.rows, everything)
            total += phase.epochs * num_batches(num_rows, phase.batch_size)
    return total


def gpu_minutes(setting: PaperSetting) -> float:
    """Return roughly the GPU minutes of a run on CIFAR-100, of an H200 that `AT_ONCE` runs share."""
    own = SLOWER.get(setting.method, 1.0)
    slower = SLOWER.get(f"{setting.method} {dict(setting.options).get('backbone')}", own)
    return steps(setting) * slower / STEPS_PER_SECOND / 60
