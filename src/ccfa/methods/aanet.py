"""AANet: Liu, Schiele and Sun, "Adaptive Aggregation Networks for Class-Incremental Learning", CVPR 2021."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import nn

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.methods.afc import afc
from ccfa.methods.method import LearnerView, Method, ParameterSelector, Phase
from ccfa.methods.options import AfcOptions, PodnetOptions, UcirOptions
from ccfa.methods.parts import balanced_exemplars, constant
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
        prepare=Branching(method.prepare, learn_blend, reset_scale),
        phases=BlendLearned(method.phases, blend_lr) if learn_blend else method.phases,
        needs_memory=max(method.needs_memory, int(learn_blend)),
    )


@dataclass(frozen=True)
class Branching:
    """Split the backbone in two at stage 1, then prepare as the method does."""

    prepare: Callable[[LearnerView], None]
    learn_blend: bool
    reset_scale: bool

    def __call__(self, learner: LearnerView) -> None:
        """Before the first phase of a stage."""
        network = learner.network
        if learner.stage.index == 1:
            network.backbone = two_branches(network.backbone, self.learn_blend)
            if self.reset_scale:
                with torch.no_grad():
                    network.head.scale.fill_(1.0)
        self.prepare(learner)


@dataclass(frozen=True)
class BlendLearned:
    """The method's phases; from stage 1 on, each epoch of the first is followed by one that moves the blend alone."""

    phases: Callable[[Stage], tuple[Phase, ...]]
    lr: float

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        """The phases of that stage."""
        main, *others = self.phases(stage)
        if stage.index == 0:
            return (main, *others)
        blend = Phase(
            name="blend",
            epochs=1,
            lr=self.lr,
            rows=balanced_exemplars,
            parameters=blends,
            optimiser=main.optimiser,
            schedule=constant,
            batch_size=main.batch_size,
            weight_decay=main.weight_decay,
            train_batch_norm=False,
            use_terms=False,
        )
        return (replace(main, parameters=AllButBlends(main.parameters), after_epoch=blend), *others)


@dataclass(frozen=True)
class AllButBlends:
    """The selected parameters without the blend of any level."""

    selected: ParameterSelector

    def __call__(self, network: Network) -> list[nn.Parameter]:
        """What else the phase trains."""
        excluded = {id(blend) for blend in blends(network)}
        return [parameter for parameter in self.selected(network) if id(parameter) not in excluded]


def blends(network: Network) -> list[nn.Parameter]:
    """The learned blend of each level."""
    levels = [level for level in network.backbone.levels if isinstance(level, FusedLevel)]
    return [level.blend for level in levels if isinstance(level.blend, nn.Parameter)]


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
