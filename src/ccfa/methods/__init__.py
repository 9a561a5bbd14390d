"""Methods: each a function of options that returns a value made of parts."""

# The order of these imports is the order in which methods are listed.
# isort: off
from ccfa.methods import baselines, ucir, podnet, icarl, bic, gdumb, il2a_pass, readouts, gaussians, afc, aanet  # noqa: F401
from ccfa.methods import fetril  # noqa: F401
# isort: on

from ccfa.methods.method import (
    METHODS,
    Budget,
    LearnerView,
    Method,
    Phase,
    Recipe,
    Step,
    Term,
    register_method,
    with_augmentation,
    with_image_augmentation,
    with_memory,
)

__all__ = [
    "METHODS",
    "Budget",
    "LearnerView",
    "Method",
    "Phase",
    "Recipe",
    "Step",
    "Term",
    "register_method",
    "with_augmentation",
    "with_image_augmentation",
    "with_memory",
]
