"""Methods: each a function that returns a value made of parts."""

from collections.abc import Callable

from ccfa.methods.aanet import aanet_afc, aanet_podnet, aanet_ucir
from ccfa.methods.afc import afc
from ccfa.methods.baselines import finetune, joint, replay
from ccfa.methods.bic import bic
from ccfa.methods.gdumb import gdumb
from ccfa.methods.icarl import icarl
from ccfa.methods.il2a import il2a
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
from ccfa.methods.pass_ import pass_
from ccfa.methods.podnet import podnet
from ccfa.methods.ucir import ucir

METHODS: dict[str, Callable[..., Method]] = {
    "finetune": finetune,
    "replay": replay,
    "joint": joint,
    "ucir": ucir,
    "podnet": podnet,
    "icarl": icarl,
    "bic": bic,
    "gdumb": gdumb,
    "il2a": il2a,
    "pass": pass_,
    "afc": afc,
    "aanet": aanet_podnet,
    "aanet-ucir": aanet_ucir,
    "aanet-afc": aanet_afc,
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
