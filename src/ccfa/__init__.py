"""Class-incremental learning with Cross-Class Feature Augmentation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccfa.augmentation import CCFA, FeatureAugmentation, Samples, cross_class_features
    from ccfa.data import ImageSet, Stage, load, register_data, split
    from ccfa.experiments import Run, build_method
    from ccfa.learning import Learner
    from ccfa.methods import METHODS, Method, Recipe, register_method, with_augmentation
    from ccfa.models import register_backbone, wrap
    from ccfa.plugins import load_plugin
    from ccfa.reporting.comparison import compare
    from ccfa.reporting.page import write_report
    from ccfa.reporting.showing import resume, run, sweep
    from ccfa.settings import Experiment, Grid, Running

__version__ = "0.1.0"

_HOME = {
    "CCFA": "augmentation",
    "Experiment": "settings",
    "FeatureAugmentation": "augmentation",
    "Grid": "settings",
    "ImageSet": "data",
    "Learner": "learning",
    "METHODS": "methods",
    "Method": "methods",
    "Recipe": "methods",
    "Run": "experiments",
    "Running": "settings",
    "Samples": "augmentation",
    "Stage": "data",
    "build_method": "experiments",
    "compare": "reporting.comparison",
    "cross_class_features": "augmentation",
    "load": "data",
    "register_data": "data",
    "load_plugin": "plugins",
    "register_backbone": "models",
    "register_method": "methods",
    "resume": "reporting.showing",
    "run": "reporting.showing",
    "split": "data",
    "sweep": "reporting.showing",
    "with_augmentation": "methods",
    "wrap": "models",
    "write_report": "reporting.page",
}

__all__ = [
    "CCFA",
    "METHODS",
    "Experiment",
    "FeatureAugmentation",
    "Grid",
    "ImageSet",
    "Learner",
    "Method",
    "Recipe",
    "Run",
    "Running",
    "Samples",
    "Stage",
    "build_method",
    "compare",
    "cross_class_features",
    "load",
    "load_plugin",
    "register_backbone",
    "register_data",
    "register_method",
    "resume",
    "run",
    "split",
    "sweep",
    "with_augmentation",
    "wrap",
    "write_report",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    # The names are looked up when they are used, so that `import ccfa` and `ccfa --help` do not wait for torch.
    if name in _HOME:
        return getattr(import_module(f"ccfa.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ccfa' has no attribute {name!r}")
