"""The paper's tables: every number that the paper prints, with the setting in which it was measured.

The numbers themselves are in `paper_tables.toml`.
A `Setting` is an experiment without class order and seeds. `setting_of` and `experiment_for` convert between the two.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.building import build_method, experiment_method
from ccfa.experiments.experiment import experiment_of
from ccfa.experiments.options import describe
from ccfa.experiments.presets import default_scenario
from ccfa.methods import METHODS
from ccfa.settings import Experiment, Mix

Source = Literal["rerun", "copied"]

NUM_CLASSES = {"cifar100": 100, "imagenet100": 100, "imagenet1000": 1000}
PAPERS: dict[str, str] = {
    "ucir": "Hou et al., CVPR 2019",
    "podnet": "Douillard et al., ECCV 2020",
    "afc": "Kang et al., CVPR 2022",
    "aanet": "Liu et al., CVPR 2021, over PODNet",
    "aanet-ucir": "Liu et al., CVPR 2021, over UCIR",
    "aanet-afc": "Liu et al., CVPR 2021, over AFC",
    "icarl": "Rebuffi et al., CVPR 2017",
    "bic": "Wu et al., CVPR 2019",
    "gdumb": "Prabhu et al., ECCV 2020",
    "il2a": "Zhu et al., NeurIPS 2021",
    "pass": "Zhu et al., CVPR 2021",
}


@dataclass(frozen=True)
class Setting:
    """What a number was measured on: everything that an experiment has except its class order and seeds."""

    data: str
    scenario: str
    method: str  # a name in METHODS, or of a method that the paper only cites
    ccfa: bool = False
    memory: int | None = 20  # exemplars per class; None for methods that keep none
    mix: Mix | None = None
    options: tuple[tuple[str, str], ...] = ()  # sorted; only those that differ from the defaults


@dataclass(frozen=True)
class Cell:
    """A number of the paper, in percent, with its setting and who measured it."""

    setting: Setting
    value: float
    source: Source  # measured by the paper's authors, or copied by them from another paper
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
    """A table of the paper: a row of cells for each label."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, Row]

    @property
    def cells(self) -> list[Cell]:
        """The cells that hold a number, row by row."""
        return [cell for row in self.rows.values() for cell in row if cell]


def cells() -> list[Cell]:
    """Return the distinct cells of all tables; a cell that is printed twice occurs once.

    >>> len(cells())
    217
    """
    return list(dict.fromkeys(cell for table in TABLES.values() for cell in table.cells))


def cell_for(setting: Setting, metric: str = "average_incremental_accuracy") -> Cell | None:
    """Return the paper's cell for a setting; if it has two, the one that its authors measured.

    >>> cell_for(Setting("cifar100", "B50-inc10", "podnet")).value
    64.62
    """
    found = [cell for cell in cells() if (cell.setting, cell.metric) == (setting, metric)]
    return min(found, key=lambda cell: cell.source == "copied", default=None)


def cited_only() -> dict[str, Row]:
    """Return the rows of the main table whose methods this package does not have, by the method's name.

    >>> list(cited_only())
    ['Mnemonics', 'TPCIL', 'GeoDL']
    """
    return {
        label.rstrip("*"): row
        for label, row in TABLES["main"].rows.items()
        if not any(cell and cell.setting.method in METHODS for cell in row)
    }


def experiment_for(setting: Setting, order: str | None, seed: int) -> Experiment:
    """Return the experiment that measures a setting with one class order and seed.

    >>> experiment_for(Setting("cifar100", "B50-inc1", "podnet", memory=5), "podnet-1", 0).name
    'cifar100-B50-inc1-podnet-1-podnet-m5-seed0'
    """
    default = build_method(setting.method, setting.data).memory.per_class or None
    return Experiment(
        method=setting.method,
        ccfa=setting.ccfa,
        mix=setting.mix,
        data=setting.data,
        scenario=setting.scenario,
        order=order,
        memory=None if setting.memory == default else setting.memory or 0,
        seed=seed,
        options=dict(setting.options),
    )


def setting_of(experiment: Mapping[str, Any]) -> Setting | None:
    """Return the setting of an experiment as config.json holds it; None if no table can have such a setting.

    Defaults are filled in, and options that only repeat a default are left out.

    >>> setting_of({"method": "podnet", "data": "cifar100", "memory": 20, "options": {"epochs": "160"}})
    Setting(data='cifar100', scenario='B50-inc10', method='podnet', ccfa=False, memory=20, mix=None, options=())
    """
    try:
        given = experiment_of({"experiment": dict(experiment)})
        # A folder that is called imagenet100 is trained as any folder is, not as in the paper.
        if given.data != "cifar100" or given.validation or given.memory_total is not None:
            return None
        memory = experiment_method(given).memory.per_class or None
        options = _effective_options(given)
    except (ModelError, UsageError):  # it is damaged, or of another version
        return None
    scenario = given.scenario or default_scenario(given.data, NUM_CLASSES[given.data])
    first, *later = (stage.num_new for stage in parse_scenario(scenario, NUM_CLASSES[given.data]))
    if len(set(later)) == 1:  # B50-inc10 for 50,10,10,10,10,10 as well
        scenario = f"B{first}-inc{later[0]}"
    return Setting(given.data, scenario, given.method, given.ccfa, memory, given.mix, options)


def _effective_options(given: Experiment) -> tuple[tuple[str, str], ...]:
    """The options without which the method would be another one; the memory has a field of its own."""
    kept = {name: text for name, text in sorted(given.options.items()) if name != "memory"}

    def built(options: dict[str, str]) -> Any:
        return describe(experiment_method(replace(given, memory=None, options=options)))

    whole = built(kept)
    for name in list(kept):
        fewer = {other: text for other, text in kept.items() if other != name}
        if built(fewer) == whole:
            kept = fewer
    return tuple(kept.items())


def _tables() -> dict[str, Table]:
    tables = {}
    stored = tomllib.loads((files("ccfa.experiments") / "paper_tables.toml").read_text(encoding="utf-8"))
    for name, table in stored.items():
        rows = {}
        for label, row in table["rows"].items():
            words = zip(row["numbers"].split(), table["columns"].values(), strict=True)
            rows[label] = tuple(_cell(word, {**table, **row, **changes}) for word, changes in words)
        tables[name] = Table(name, table["title"], tuple(table["columns"]), rows)
    return tables


def _cell(word: str, row: Mapping[str, Any]) -> Cell | None:
    if word == "-":
        return None
    setting = Setting(
        row.get("data", "cifar100"),
        row.get("scenario", "B50-inc1"),
        row["method"],
        row.get("ccfa", False),
        row.get("memory", 20) or None,
        row.get("mix"),
        tuple(sorted(row.get("options", {}).items())),
    )
    value, _, deviation = word.removesuffix("c").partition("±")
    return Cell(
        setting,
        float(value),
        "copied" if word.endswith("c") else "rerun",
        row.get("metric", "average_incremental_accuracy"),
        float(deviation) if deviation else None,
        row.get("slip", ""),
    )


TABLES: dict[str, Table] = _tables()
