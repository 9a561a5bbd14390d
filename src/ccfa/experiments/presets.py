"""Published values for each data set, as plain data; what is not listed is the method's own default (CIFAR-100)."""

from typing import Any

from ccfa.data import DIGITS, FOLDER, GLYPHS

_DIGITS = {"backbone": "small", "transforms": DIGITS, "epochs": 20, "batch_size": 16}
_DIGITS_MEMORY = {**_DIGITS, "memory": 4}
_DIGITS_BALANCED = {**_DIGITS_MEMORY, "balanced_epochs": 20}
_DIGITS_FREE = {**_DIGITS, "epochs": 10, "batch_size": 64, "lr": 3e-3}
_GLYPHS = {"backbone": "small", "transforms": GLYPHS, "epochs": 12, "batch_size": 16}
_GLYPHS_MEMORY = {**_GLYPHS, "memory": 1}
_GLYPHS_BALANCED = {**_GLYPHS_MEMORY, "balanced_epochs": 12}
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
    "glyphs": {
        "finetune": _GLYPHS,
        "replay": _GLYPHS_MEMORY,
        "joint": _GLYPHS,
        "ucir": _GLYPHS_MEMORY,
        "podnet": _GLYPHS_BALANCED,
        "icarl": {**_GLYPHS_MEMORY, "lr": 0.5},
        "bic": {**_GLYPHS_MEMORY, "memory": 2, "correction_epochs": 24},  # one of the two is held out
        "gdumb": {**_GLYPHS_MEMORY, "epochs": 16},
        "afc": _GLYPHS_BALANCED,
        "aanet": _GLYPHS_BALANCED,
        "aanet-ucir": _GLYPHS_MEMORY,
        "aanet-afc": _GLYPHS_BALANCED,
        "il2a": {**_GLYPHS, "batch_size": 64, "lr": 3e-3, "mixing_rounds": 2},
        "pass": {**_GLYPHS, "batch_size": 64, "lr": 3e-3},
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
CCFA_PRESETS: dict[str, dict[str, Any]] = {"digits": {"count": 1}, "glyphs": {"count": 1}}

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

DEFAULT_SCENARIO = {"cifar100": "B50-inc10", "digits": "B5-inc1", "glyphs": "B18-inc6"}
DEFAULT_ORDER = {"cifar100": "podnet-0"}


def preset(method: str, data: str) -> dict[str, Any]:
    """The options of a method on a data set; any image folder counts as `folder`."""
    return PRESETS.get(data, PRESETS["folder"]).get(method, {})


def default_scenario(data: str, num_classes: int) -> str:
    """The scenario of a data set unless another is asked for: half of the classes, then about five stages."""
    initial = -(-num_classes // 2)
    increment = max(1, -(-(num_classes - initial) // 5))
    return DEFAULT_SCENARIO.get(data, f"B{initial}-inc{increment}")
