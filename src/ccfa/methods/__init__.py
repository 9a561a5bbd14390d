"""Methods: each a function that returns a value made of parts."""

from collections.abc import Callable

from ccfa.methods.baselines import finetune, joint, replay
from ccfa.methods.method import (
    Budget,
    LearnerView,
    Method,
    Phase,
    Step,
    Term,
    with_augmentation,
    with_image_augmentation,
    with_memory,
)
from ccfa.methods.podnet import podnet
from ccfa.methods.ucir import ucir

METHODS: dict[str, Callable[..., Method]] = {
    "finetune": finetune,
    "replay": replay,
    "joint": joint,
    "ucir": ucir,
    "podnet": podnet,
}

__all__ = [
    "METHODS",
    "Budget",
    "LearnerView",
    "Method",
    "Phase",
    "Step",
    "Term",
    "with_augmentation",
    "with_image_augmentation",
    "with_memory",
]
