"""Methods: each a function of options that returns a value made of parts."""

# The order of these imports is the order in which methods are listed.
# isort: off
from ccfa.methods import (  # noqa: F401
    baselines,
    ucir,
    geodl,
    podnet,
    icarl,
    bic,
    wa,
    ewc,
    gdumb,
    il2a_pass,
    readouts,
    gaussians,
    fetril,
    afc,
    aanet,
    der,
    foster,
)
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
