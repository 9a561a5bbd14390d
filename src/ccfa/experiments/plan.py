"""The plan of a sweep: methods x {alone, with CCFA} x further axes x class orders x seeds."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from ccfa.augmentation import CCFA, MIXES
from ccfa.errors import UsageError, choose, unknown
from ccfa.experiments.building import factory
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.options import decode, schema
from ccfa.methods import METHODS

FIELDS = ("memory", "memory_total", "mix", "scenario", "image_size")
"""Those fields of an experiment that can be an axis, as every option can."""

_UNSET = Experiment("")


@dataclass(frozen=True)
class Plan:
    """What to sweep over. Everything else is as in `base`, whose method, CCFA and seed are not read.

    An axis is an option or one of FIELDS, with its values as text. Without orders the base's is taken.

    >>> plan = Plan(("podnet",), Experiment("", memory=2), ccfa=(True,), seeds=(0,), axes={"ccfa.count": ("1", "3")})
    >>> [(experiment.memory, experiment.options) for experiment in plan.experiments()]
    [(2, {'ccfa.count': '1'}), (2, {'ccfa.count': '3'})]
    """

    methods: tuple[str, ...]
    base: Experiment = _UNSET
    ccfa: tuple[bool, ...] = (False, True)
    orders: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def experiments(self) -> list[Experiment]:
        """Every run of the sweep, once; a method takes those of the options that it has."""
        names = tuple(METHODS) if self.methods == ("all",) else self.methods
        if not names or not self.seeds:
            raise UsageError("A sweep needs at least one method (or `all`) and one seed.")
        found: list[Experiment] = []
        known: set[str] = set()
        for method, ccfa, (fields, options) in itertools.product(names, self.ccfa, list(self._points())):
            experiment = replace(self.base, method=method, ccfa=ccfa, **fields)
            takes = _options(experiment)
            known |= takes
            own = {name: text for name, text in {**self.base.options, **options}.items() if name in takes}
            for order, seed in itertools.product(self.orders or (self.base.order,), self.seeds):
                one = replace(experiment, order=order, seed=seed, options=own)
                if one not in found:  # a method may lack the option of an axis
                    found.append(one)
        self._require_known(known)
        return found

    def _points(self) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Every choice of one value from each axis: fields of the experiment, and options."""
        for texts in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, texts, strict=True))
            yield {name: _decoded(name, chosen.pop(name)) for name in FIELDS if name in chosen}, chosen

    def _require_known(self, options: set[str]) -> None:
        for name in self.base.options:
            if name not in options:
                raise unknown("option of these methods", name, options)
        for axis in self.axes:
            if axis.startswith("ccfa.") and not any(self.ccfa):
                raise UsageError(f"The axis {axis} needs CCFA: use --ccfa on or both.")
            if axis not in options.union(FIELDS):
                raise unknown("axis", axis, options.union(FIELDS))
            if axis in self.base.options or getattr(self.base, axis, None) != getattr(_UNSET, axis, None):
                raise UsageError(f"{axis} is given twice: as an axis, and as one value for the whole sweep.")


def _decoded(field: str, text: str) -> Any:
    try:
        return decode(text, get_type_hints(Experiment)[field])
    except ValueError as error:
        raise UsageError(f"Axis {field}: {error}.") from None


def _options(experiment: Experiment) -> set[str]:
    """The names of all options of an experiment's method and of what is plugged into it."""
    options = set(schema(factory(experiment.method)))
    if experiment.ccfa:
        options |= {f"ccfa.{phase}{name}" for phase in ("", "balanced.") for name in schema(CCFA)}
        options.remove("ccfa.balanced.phases")
    if experiment.mix:
        options |= {f"mix.{name}" for name in schema(choose("mixing", experiment.mix, MIXES))}
    return options
