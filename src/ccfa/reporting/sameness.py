"""Which runs are of one experiment, what tells two experiments apart, and what runs must share to be compared."""

import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments import Experiment
from ccfa.experiments.differences import differences, leaves, two_columns

# Of the experiment's fields: those over which runs are averaged, and those whose meaning stands in `resolved`,
# where a default and the same value typed out are alike.
_VARYING = {"order", "seed", "batch_seed"}
_RESOLVED = {"method", "ccfa", "mix", "memory", "memory_total", "options", "scenario"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}
_REQUIRED: dict[str, dict[str, type]] = {
    "experiment": {"method": str, "options": dict},
    "resolved": {"method": dict, "stage_sizes": list, "class_order": list, "class_names": list},
}
_NAMES_SHOWN = 4


class Entry(NamedTuple):
    """A run: where it is and what came out."""

    path: Path
    report: Report

    @property
    def experiment(self) -> dict[str, Any]:
        """What was asked for."""
        return self._part("experiment")

    @property
    def resolved(self) -> dict[str, Any]:
        """What that came to: the method in full, stages, class order, sizes of the data."""
        return self._part("resolved")

    @property
    def key(self) -> tuple[tuple[int, ...], int, int]:
        """What may differ between runs that are averaged: class order and seeds."""
        seed = self.experiment.get("seed", 0)
        batch_seed = self.experiment.get("batch_seed")
        return tuple(self.resolved["class_order"]), seed, seed if batch_seed is None else batch_seed

    @property
    def ccfa(self) -> bool:
        """Whether CCFA is plugged in."""
        return bool(self.experiment.get("ccfa"))

    @property
    def surroundings(self) -> dict[str, str]:
        """Where it ran: what may differ between runs that are averaged, but should be known."""
        environment = self.report.environment
        acceleration = environment.get("acceleration")
        precision = acceleration.get("precision", "") if isinstance(acceleration, dict) else ""
        named = {name: environment.get(name, "") for name in ("device", "ccfa", "commit", "torch")}
        return {name: str(value) for name, value in {"precision": precision, **named}.items()}

    def _part(self, name: str) -> dict[str, Any]:
        part = self.report.config.get(name)
        if not isinstance(part, dict):
            part = {}
        for field, kind in _REQUIRED[name].items():
            if not isinstance(part.get(field), kind) or (kind is list and not part[field]):
                raise ModelError(
                    f"{self.path} does not say what was run: {name}.{field} in its report is missing or no "
                    f"{kind.__name__}. Leave it out, or run it again."
                )
        return part


def identity(entry: Entry) -> dict[str, Any]:
    """Everything that makes a run the experiment it is; class order and seeds are left out."""
    asked = {
        name: value
        for name, value in entry.experiment.items()
        if name not in _VARYING | _RESOLVED and value != _DEFAULTS.get(name)
    }
    resolved = {name: value for name, value in entry.resolved.items() if name != "class_order"}
    return {**asked, **resolved, "class_names": sorted(entry.resolved["class_names"], key=str)}


def without_ccfa(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same experiment with CCFA unplugged."""
    method = content["method"]
    others = [part for part in method.get("feature_augmentations", ()) if part.get("part") != "CCFA"]
    return {**content, "method": {**method, "feature_augmentations": others}}


def hashed(content: Mapping[str, Any]) -> Hashable:
    """Something equal for equal contents, to group by."""
    return json.dumps(content, sort_keys=True)


def setting(entry: Entry) -> dict[str, Any]:
    """What all runs of a table must share."""
    return {
        "data": entry.experiment.get("data"),
        "stage sizes": entry.resolved["stage_sizes"],
        "classes": sorted(entry.resolved["class_names"], key=str),
        "held out": entry.experiment.get("validation", 0.0),
        "training images": entry.resolved.get("num_training_images"),
        "test images": entry.resolved.get("num_test_images"),
    }


def require_one_setting(entries: Sequence[Entry]) -> None:
    """Refuse runs of different data or stages: no mean and no figure may hold both."""
    kinds: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(hashed(setting(entry)), []).append(entry)
    if len(kinds) < 2:
        return
    first, second, *_ = (members[0] for members in kinds.values())
    found = two_columns(differences(setting(first), setting(second)), str(first.path), str(second.path))
    apart = "\n".join(f"  {_some_paths(members)}" for members in kinds.values())
    raise UsageError(
        "These runs are not of one data set and scenario, so no table and no figure can hold them all:\n"
        f"{found}\nName the runs of one kind alone:\n{apart}"
    )


def _some_paths(entries: Sequence[Entry]) -> str:
    shown = " ".join(str(entry.path) for entry in entries[:_NAMES_SHOWN])
    return shown if len(entries) <= _NAMES_SHOWN else f"{shown} ...  ({len(entries)} runs)"


def names(groups: Sequence[Sequence[Entry]]) -> list[str]:
    """A name for each group of runs of one experiment; groups of one method are told apart by what differs."""
    methods = [group[0].experiment["method"] for group in groups]
    choices = [_choices(group[0]) for group in groups]
    named: list[str] = []
    for group, own in zip(groups, choices, strict=True):
        entry = group[0]
        others = [choice for method, choice in zip(methods, choices, strict=True) if method == methods[len(named)]]
        plugged = filter(None, [entry.experiment.get("mix"), "CCFA" if entry.ccfa else None])
        named.append(", ".join([" + ".join([entry.experiment["method"], *plugged]), *_differing(own, others)]))
    contents = [dict(leaves(identity(group[0]))) for group in groups]
    return [
        # Where the same was asked for, the defaults of another version may differ.
        name if len(alike) == 1 else ", ".join([name, *_differing(own, alike)[:2]])
        for name, own in zip(named, contents, strict=True)
        for alike in [[other for said, other in zip(named, contents, strict=True) if said == name]]
    ]


def _choices(entry: Entry) -> dict[str, Any]:
    """What was asked for beside the plug-ins, where anything was."""
    asked = {name: entry.experiment.get(name) for name in ("memory", "memory_total", "image_size")}
    return {name: value for name, value in asked.items() if value is not None} | dict(entry.experiment["options"])


def _differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which of the own values are not the same everywhere, as `name=value`."""
    return [f"{name}={value}" for name, value in own.items() if any(other.get(name) != value for other in others)]
