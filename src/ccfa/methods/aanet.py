"""AANet: Liu, Schiele and Sun, "Adaptive Aggregation Networks for Class-Incremental Learning", CVPR 2021."""

from dataclasses import dataclass, replace
from typing import Unpack

import torch

from ccfa.errors import UsageError
from ccfa.methods.afc import afc
from ccfa.methods.blending import BlendLearned
from ccfa.methods.method import Method
from ccfa.methods.options import AfcOptions, PodnetOptions, UcirOptions
from ccfa.methods.podnet import podnet
from ccfa.methods.ucir import ucir
from ccfa.models import Network
from ccfa.models.aggregation import FusedLevel, two_branches


def aanet(method: Method, *, learn_blend: bool = False, blend_lr: float = 1e-8, reset_scale: bool = False) -> Method:
    """The method on two branches from stage 1 on, their blend fixed at 0.5 or learned after each epoch."""
    if method.no_old_head:
        raise UsageError(f"AANet has no meaning for {method.name}: {method.no_old_head}.")
    return replace(
        method,
        name=f"aanet-{method.name}",
        shape_network=Branching(learn_blend, reset_scale),
        phases=BlendLearned(method.phases, blend_lr) if learn_blend else method.phases,
        needs_memory=max(method.needs_memory, int(learn_blend)),
    )


@dataclass(frozen=True)
class Branching:
    """Split the backbone in two from stage 1 on."""

    learn_blend: bool
    reset_scale: bool

    def __call__(self, network: Network, stage_index: int) -> None:
        """Before a stage; a backbone that has two branches keeps them."""
        if stage_index == 0 or any(isinstance(level, FusedLevel) for level in network.backbone.levels):
            return
        network.backbone = two_branches(network.backbone, self.learn_blend)
        if self.reset_scale:
            with torch.no_grad():
                network.head.scale.fill_(1.0)


def aanet_podnet(
    *,
    learn_blend: bool = False,
    blend_lr: float = 1e-8,
    reset_scale: bool = True,
    **options: Unpack[PodnetOptions],
) -> Method:
    """AANet on PODNet: the published code whose results the paper lists."""
    method = aanet(podnet(**options), learn_blend=learn_blend, blend_lr=blend_lr, reset_scale=reset_scale)
    return replace(method, name="aanet")


def aanet_ucir(
    *,
    learn_blend: bool = False,
    blend_lr: float = 1e-8,
    reset_scale: bool = False,
    **options: Unpack[UcirOptions],
) -> Method:
    """AANet on UCIR, whose learned scale is carried over."""
    return aanet(ucir(**options), learn_blend=learn_blend, blend_lr=blend_lr, reset_scale=reset_scale)


def aanet_afc(
    *,
    learn_blend: bool = False,
    blend_lr: float = 1e-8,
    reset_scale: bool = True,
    **options: Unpack[AfcOptions],
) -> Method:
    """AANet on AFC, in the manner of AANet on PODNet."""
    return aanet(afc(**options), learn_blend=learn_blend, blend_lr=blend_lr, reset_scale=reset_scale)
