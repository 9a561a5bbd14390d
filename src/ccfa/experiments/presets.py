"""Published values for each data set, as plain data; what is not listed is the method's own default (CIFAR-100)."""

import inspect
from typing import Any

from ccfa.data import DIGITS, FOLDER
from ccfa.errors import choose
from ccfa.methods import METHODS

_DIGITS = {"backbone": "small", "transforms": DIGITS, "epochs": 20, "batch_size": 16}
_DIGITS_MEMORY = {**_DIGITS, "memory": 4}
_DIGITS_BALANCED = {**_DIGITS_MEMORY, "balanced_epochs": 20}
_DIGITS_FREE = {**_DIGITS, "epochs": 10, "batch_size": 64, "lr": 3e-3}
_FOLDER = {"transforms": FOLDER, "epochs": 40, "batch_size": 64}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "cifar100": {},
    "digits": {
        "finetune": _DIGITS,
        "replay": _DIGITS_MEMORY,
        "joint": _DIGITS,
        "ucir": _DIGITS_MEMORY,
        "podnet": _DIGITS_BALANCED,
        "icarl": {**_DIGITS_MEMORY, "lr": 0.5},
        "bic": {**_DIGITS_MEMORY, "correction_epochs": 40},
        "gdumb": {**_DIGITS_MEMORY, "epochs": 16},  # cycles of the rate end at powers of 2
        "afc": _DIGITS_BALANCED,
        "aanet": {**_DIGITS_BALANCED, "epochs": 12},
        "aanet-ucir": {**_DIGITS_MEMORY, "epochs": 12},
        "aanet-afc": {**_DIGITS_BALANCED, "epochs": 12},
        "il2a": {**_DIGITS_FREE, "mixing_rounds": 2},
        "pass": _DIGITS_FREE,
    },
    "folder": {
        "finetune": _FOLDER,
        "replay": _FOLDER,
        "joint": _FOLDER,
        "ucir": _FOLDER,
        "podnet": _FOLDER,
        "icarl": {**_FOLDER, "lr": 0.5},
        "bic": {**_FOLDER, "correction_epochs": 80},
        "gdumb": {**_FOLDER, "epochs": 32, "batch_size": 16},
        "afc": _FOLDER,
        "aanet": _FOLDER,
        "aanet-ucir": _FOLDER,
        "aanet-afc": _FOLDER,
        "il2a": _FOLDER,
        "pass": _FOLDER,
    },
}

# CCFA's options: 1 feature an image suits digits, by accuracy on held-out training images.
CCFA_PRESETS: dict[str, dict[str, Any]] = {"digits": {"count": 1}}

SCENARIOS: dict[str, str] = {
    "B50-inc10": "half of CIFAR-100 first, then 5 stages of 10 classes (the paper's '5 tasks')",
    "B50-inc5": "the paper's '10 tasks'",
    "B50-inc2": "the paper's '25 tasks'",
    "B50-inc1": "the paper's '50 tasks'",
    "B20-inc1": "a small first stage: the paper's table of initial task sizes (also B30, B40)",
    "B0-inc10": "equal stages of 10 classes",
    "B5-inc1": "the default for digits",
    "5,2,2,1": "any list of stage sizes",
}

DEFAULT_SCENARIO = {"cifar100": "B50-inc10", "digits": "B5-inc1"}
DEFAULT_ORDER = {"cifar100": "podnet-0"}


def preset(method: str, data: str) -> dict[str, Any]:
    """The options of a method on a data set; any image folder counts as `folder`.

    A method that is not listed has those of the method it is built on, or of `finetune`, as far as it has such options.
    """
    listed = PRESETS.get(data, PRESETS["folder"])
    if method in listed or not listed:
        return listed.get(method, {})
    factory = choose("method", method, METHODS)
    values = preset(getattr(factory, "built_on", None) or "finetune", data)
    return {name: value for name, value in values.items() if name in inspect.signature(factory).parameters}


def default_scenario(data: str, num_classes: int) -> str:
    """The scenario of a data set unless another is asked for: half of the classes, then about five stages."""
    initial = -(-num_classes // 2)
    increment = max(1, -(-(num_classes - initial) // 5))
    return DEFAULT_SCENARIO.get(data, f"B{initial}-inc{increment}")
