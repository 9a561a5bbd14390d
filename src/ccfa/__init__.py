"""Class-incremental learning with Cross-Class Feature Augmentation."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccfa.augmentation import CCFA, FeatureAugmentation, Samples, cross_class_features
    from ccfa.data import ImageSet, Stage, load, register_data, split
    from ccfa.deployment import Evaluation, Model, Prediction, export_model, learn, load_model
    from ccfa.experiments import Run, build_method
    from ccfa.learning import Learner, Observer, Progress
    from ccfa.methods import METHODS, Method, Recipe, register_method, with_augmentation
    from ccfa.models import register_backbone, wrap
    from ccfa.plugins import load_plugin
    from ccfa.reporting.comparison import compare
    from ccfa.reporting.page import write_report
    from ccfa.reporting.showing import resume, run, sweep
    from ccfa.settings import Experiment, Grid, Learning, Running

__version__ = "0.1.0"

# Threads that wait by spinning starve each other on a busy machine. torch reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_NAMES = {
    "augmentation": ("CCFA", "FeatureAugmentation", "Samples", "cross_class_features"),
    "data": ("ImageSet", "Stage", "load", "register_data", "split"),
    "deployment": ("Evaluation", "Model", "Prediction", "export_model", "learn", "load_model"),
    "experiments": ("Run", "build_method"),
    "learning": ("Learner", "Observer", "Progress"),
    "methods": ("METHODS", "Method", "Recipe", "register_method", "with_augmentation"),
    "models": ("register_backbone", "wrap"),
    "plugins": ("load_plugin",),
    "reporting.comparison": ("compare",),
    "reporting.page": ("write_report",),
    "reporting.showing": ("resume", "run", "sweep"),
    "settings": ("Experiment", "Grid", "Learning", "Running"),
}

__all__ = [
    "CCFA",
    "METHODS",
    "Evaluation",
    "Experiment",
    "FeatureAugmentation",
    "Grid",
    "ImageSet",
    "Learner",
    "Learning",
    "Method",
    "Model",
    "Observer",
    "Prediction",
    "Progress",
    "Recipe",
    "Run",
    "Running",
    "Samples",
    "Stage",
    "build_method",
    "compare",
    "cross_class_features",
    "export_model",
    "learn",
    "load",
    "load_model",
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
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"ccfa.{module}"), name)
    raise AttributeError(f"module 'ccfa' has no attribute {name!r}")
