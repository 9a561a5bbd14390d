"""A number of the paper, the setting it was measured on, and the experiments of that setting."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.building import build_method, experiment_method
from ccfa.experiments.experiment import experiment_of
from ccfa.experiments.options import describe
from ccfa.experiments.presets import default_scenario
from ccfa.settings import Experiment, Mix

Source = Literal["rerun", "copied"]
NUM_CLASSES = {"cifar100": 100, "imagenet100": 100, "imagenet1000": 1000}


@dataclass(frozen=True)
class Setting:
    """What a cell was measured on: everything an experiment has but its class order and seeds."""

    data: str
    scenario: str
    method: str  # a name in METHODS, or of a method that the paper only cites
    ccfa: bool = False
    memory: int | None = 20  # exemplars per class; None for methods that keep none
    mix: Mix | None = None
    options: tuple[tuple[str, str], ...] = ()  # sorted; only what differs from the defaults


@dataclass(frozen=True)
class Cell:
    """A number of the paper, in percent: what it was measured on, its value, and who measured it."""

    setting: Setting
    value: float
    source: Source  # measured by the paper's authors, or copied from another paper
    metric: str = "average_incremental_accuracy"
    deviation: float | None = None  # over three class orders
    slip: str = ""  # what is wrong with the printed number; begins with "deviation" where the value is sound

    @property
    def is_target(self) -> bool:
        """Whether a run should reach the value: it is no misprint."""
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


def setting_of(experiment: Mapping[str, Any]) -> Setting | None:
    """The setting of an experiment as config.json holds it, defaults filled in; None where the paper has no such.

    >>> setting_of({"method": "podnet", "data": "cifar100", "memory": 20, "options": {"epochs": "160"}})
    Setting(data='cifar100', scenario='B50-inc10', method='podnet', ccfa=False, memory=20, mix=None, options=())
    """
    try:
        asked = experiment_of({"experiment": dict(experiment)})
        # A folder that is called imagenet100 is trained as any folder is, not as in the paper.
        if asked.data != "cifar100" or asked.validation or asked.memory_total is not None:
            return None
        memory = experiment_method(asked).memory.per_class or None
        options = _effective_options(asked)
    except (ModelError, UsageError):  # it is damaged, or of another version
        return None
    scenario = _canonical(asked.scenario or default_scenario(asked.data, NUM_CLASSES[asked.data]))
    return Setting(asked.data, scenario, asked.method, asked.ccfa, memory, asked.mix, options)


def _canonical(scenario: str) -> str:
    """B50-inc10 for `50,10,10,10,10,10` as well."""
    first, *later = (stage.num_new for stage in parse_scenario(scenario, NUM_CLASSES["cifar100"]))
    return f"B{first}-inc{later[0]}" if len(set(later)) == 1 else scenario


def experiment_for(cell: Cell | Setting, order: str | None, seed: int) -> Experiment:
    """The experiment that measures a cell, with one class order and seed.

    >>> experiment_for(Setting("cifar100", "B50-inc1", "podnet", memory=5), "podnet-1", 0).name
    'cifar100-B50-inc1-podnet-1-podnet-m5-seed0'
    """
    setting = cell.setting if isinstance(cell, Cell) else cell
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


def _effective_options(asked: Experiment) -> tuple[tuple[str, str], ...]:
    """The options without which the method would be another one; the memory has a field of its own."""
    kept = {name: text for name, text in sorted(asked.options.items()) if name != "memory"}
    asked = replace(asked, memory=None)
    whole = describe(experiment_method(replace(asked, options=kept)))
    for name in list(kept):
        fewer = {other: text for other, text in kept.items() if other != name}
        if describe(experiment_method(replace(asked, options=fewer))) == whole:
            kept = fewer
    return tuple(kept.items())
