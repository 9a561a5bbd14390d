"""From an experiment to its method: preset, options, memory, and what is plugged in."""

from dataclasses import replace
from typing import Any

from ccfa.augmentation import CCFA, MIXES
from ccfa.errors import UsageError, choose, unknown
from ccfa.experiments.options import decode_options
from ccfa.experiments.presets import ccfa_preset, preset
from ccfa.methods import METHODS, Budget, Method, with_augmentation, with_image_augmentation, with_memory
from ccfa.methods.method import no_auxiliary_classes
from ccfa.settings import Experiment


def experiment_method(experiment: Experiment) -> Method:
    """The method of an experiment: preset, options, memory, augmentation."""
    own = {name: text for name, text in experiment.options.items() if not name.startswith(("ccfa.", "mix."))}
    method = build_method(
        experiment.method,
        experiment.data,
        **decode_options(own, factory(experiment.method), experiment.method),
    )
    if experiment.memory is not None and experiment.memory_total is not None:
        raise UsageError("Give --memory (per class) or --memory-total, not both.")
    if experiment.memory is not None or experiment.memory_total is not None:
        method = with_memory(method, Budget(experiment.memory, experiment.memory_total))
    if experiment.mix:
        kind = choose("mixing", experiment.mix, MIXES)
        method = with_image_augmentation(method, kind(**_plug_in_options(experiment, "mix", kind)))
    elif _prefixed(experiment, "mix"):
        raise UsageError(f"Options {', '.join(_prefixed(experiment, 'mix'))} need --mix.")
    if experiment.ccfa:
        for plug_in in _ccfa(experiment):
            if plug_in.backbone_weight is not None and method.auxiliary_classes is not no_auxiliary_classes:
                raise UsageError(
                    f"ccfa.backbone_weight is not defined for {method.name}, which adds images of auxiliary classes."
                )
            method = with_augmentation(method, plug_in)
    elif _prefixed(experiment, "ccfa"):
        raise UsageError(f"Options {', '.join(_prefixed(experiment, 'ccfa'))} need --ccfa.")
    return method


def _ccfa(experiment: Experiment) -> list[CCFA]:
    """CCFA as asked for; options with the prefix ccfa.balanced. are those of the balanced phase alone."""
    given = {name.removeprefix("ccfa."): text for name, text in _prefixed(experiment, "ccfa").items()}
    balanced = {name.removeprefix("balanced."): text for name, text in given.items() if name.startswith("balanced.")}
    if "phases" in balanced:
        raise UsageError("ccfa.balanced.phases has no meaning: these options are those of the balanced phase.")
    everywhere = {name: text for name, text in given.items() if not name.startswith("balanced.")}
    plug_in = CCFA(**ccfa_preset(experiment.data) | decode_options(everywhere, CCFA, "ccfa"))
    if not balanced:
        return [plug_in]
    others = tuple(name for name in plug_in.phases if name != "balanced")
    if others == plug_in.phases:
        raise UsageError(f"Options ccfa.balanced. need the balanced phase, but CCFA acts in {', '.join(others)} only.")
    there = replace(plug_in, phases=("balanced",), **decode_options(balanced, CCFA, "ccfa.balanced"))
    return [replace(plug_in, phases=others), there]


def _prefixed(experiment: Experiment, plug_in: str) -> dict[str, str]:
    return {name: text for name, text in experiment.options.items() if name.startswith(plug_in + ".")}


def _plug_in_options(experiment: Experiment, plug_in: str, kind: Any) -> dict[str, Any]:
    """The typed options of a plug-in, given with its prefix."""
    texts = {name.removeprefix(plug_in + "."): text for name, text in _prefixed(experiment, plug_in).items()}
    return decode_options(texts, kind, plug_in)


def factory(name: str) -> Any:
    """The function that makes a method."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def build_method(name: str, data: str = "cifar100", **options: Any) -> Method:
    """Build a method with the published values for a data set, and options of your own on top.

    Args:
        name: The name of a method, as in `METHODS`.
        data: The name of a data set, or the path of an image folder.
        options: Other values for options of the method.

    Returns:
        The method, for `Learner`.

    >>> build_method("podnet", "digits", memory=2).memory.per_class
    2
    """
    method: Method = factory(name)(**{**preset(name, data), **options})
    return method
