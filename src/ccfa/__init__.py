"""Class-incremental learning with Cross-Class Feature Augmentation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccfa.augmentation import CCFA, FeatureAugmentation, Samples, cross_class_features
    from ccfa.data import ImageSet, Stage, load, register_data, split
    from ccfa.experiments import build_method
    from ccfa.learning import Learner
    from ccfa.methods import METHODS, Method, Recipe, register_method, with_augmentation
    from ccfa.models import register_backbone, wrap
    from ccfa.plugins import load_plugin

__version__ = "0.1.0"

_HOME = {
    "CCFA": "augmentation",
    "FeatureAugmentation": "augmentation",
    "ImageSet": "data",
    "Learner": "learning",
    "METHODS": "methods",
    "Method": "methods",
    "Recipe": "methods",
    "Samples": "augmentation",
    "Stage": "data",
    "build_method": "experiments",
    "cross_class_features": "augmentation",
    "load": "data",
    "register_data": "data",
    "load_plugin": "plugins",
    "register_backbone": "models",
    "register_method": "methods",
    "split": "data",
    "with_augmentation": "methods",
    "wrap": "models",
}

__all__ = [
    "CCFA",
    "METHODS",
    "FeatureAugmentation",
    "ImageSet",
    "Learner",
    "Method",
    "Recipe",
    "Samples",
    "Stage",
    "build_method",
    "cross_class_features",
    "load",
    "load_plugin",
    "register_backbone",
    "register_data",
    "register_method",
    "split",
    "with_augmentation",
    "wrap",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    # The names are looked up when they are used, so that `import ccfa` and `ccfa --help` do not wait for torch.
    if name in _HOME:
        return getattr(import_module(f"ccfa.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ccfa' has no attribute {name!r}")
