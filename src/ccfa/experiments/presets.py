"""The values that a data set has for methods and scenarios; what it does not set is the method's own default."""

from typing import Any

from ccfa.data import data_set
from ccfa.errors import choose, unknown
from ccfa.experiments.options import schema
from ccfa.methods import METHODS

SCENARIOS: dict[str, str] = {
    "B50-inc10": "half of CIFAR-100 first, then 5 stages of 10 classes (the paper's '5 tasks')",
    "B50-inc5": "the paper's '10 tasks'",
    "B50-inc2": "the paper's '25 tasks'",
    "B50-inc1": "the paper's '50 tasks'",
    "B20-inc1": "a small first stage: the paper's table of initial task sizes (also B30, B40)",
    "B0-inc10": "equal stages of 10 classes",
    "B5-inc1": "the default for digits",
    "B18-inc6": "the default for glyphs",
    "5,2,2,1": "any list of stage sizes",
}


def preset(method: str, data: str) -> dict[str, Any]:
    """The options of a method on a data set: those for all methods that have them, then its own.

    A method for which the data set has none takes those of the method it is built on, as far as it has such options.
    """
    factory = choose("method", method, METHODS)
    found, known = data_set(data), schema(factory)
    own = found.method_options.get(method)
    if own is None:
        base = found.method_options.get(getattr(factory, "built_on", None) or "finetune", {})
        own = {name: value for name, value in base.items() if name in known}
    if wrong := [name for name in own if name not in known]:
        raise unknown(f"option of {method} in the data set {data!r}", wrong[0], known)
    of_any = (
        known if found.options.keys() <= known.keys() else {name for one in METHODS.values() for name in schema(one)}
    )
    if wrong := [name for name in found.options if name not in of_any]:
        raise unknown(f"option in the data set {data!r}", wrong[0], of_any)
    return {name: value for name, value in found.options.items() if name in known} | dict(own)


def ccfa_preset(data: str) -> dict[str, Any]:
    """The options of CCFA on a data set."""
    return dict(data_set(data).method_options.get("ccfa", {}))


def default_scenario(data: str, num_classes: int) -> str:
    """The scenario of a data set unless another is asked for."""
    return data_set(data).default_scenario(num_classes)
