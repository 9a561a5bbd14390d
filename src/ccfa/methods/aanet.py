"""AANet: Liu, Schiele and Sun, "Adaptive Aggregation Networks for Class-Incremental Learning", CVPR 2021."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.methods.afc import afc
from ccfa.methods.method import Method, ParameterSelector, Phase, constant, register_method
from ccfa.methods.parts import balanced_exemplars
from ccfa.methods.podnet import podnet
from ccfa.methods.ucir import ucir
from ccfa.models import ChainBackbone, Network
from ccfa.models.aggregation import FusedLevel, two_branches


def aanet(method: Method, *, learn_blend: bool = False, blend_lr: float = 1e-8, reset_scale: bool = False) -> Method:
    """AANet on UCIR: a stable and a plastic branch.

    As published, there are two branches from stage 1 on, and the head's learned scale is kept. In Python it wraps any
    method that keeps an old head.

    Args:
        learn_blend: Learn the blend of the branches after each epoch; otherwise it is 0.5.
        blend_lr: The learning rate of the blend.
        reset_scale: Start the head's learned scale at 1 again when the branches are made.
    """
    if method.no_old_head:
        raise UsageError(f"AANet has no meaning for {method.name}: {method.no_old_head}.")
    return replace(
        method,
        name=f"aanet-{method.name}",
        shape_network=Branching(learn_blend, reset_scale),
        phases=BlendLearned(method.phases, blend_lr) if learn_blend else method.phases,
        needs_memory=max(method.needs_memory, int(learn_blend)),
    )


def resetting(method: Method, *, learn_blend: bool = False, blend_lr: float = 1e-8, reset_scale: bool = True) -> Method:
    """AANet on PODNet: a stable and a plastic branch.

    The head's learned scale starts at 1 again. This is the manner of the published code on PODNet.

    Args:
        learn_blend: Learn the blend of the branches after each epoch; otherwise it is 0.5.
        blend_lr: The learning rate of the blend.
        reset_scale: Start the head's learned scale at 1 again when the branches are made.
    """
    return aanet(method, learn_blend=learn_blend, blend_lr=blend_lr, reset_scale=reset_scale)


register_method("aanet", podnet)(resetting)
register_method("aanet-ucir", ucir)(aanet)
on_afc = register_method("aanet-afc", afc)(resetting)
on_afc.__doc__ = (on_afc.__doc__ or "").replace("PODNet", "AFC", 1)


@dataclass(frozen=True)
class Branching:
    """Split the backbone in two from stage 1 on."""

    learn_blend: bool
    reset_scale: bool

    def __call__(self, network: Network, stage_index: int) -> None:
        if not isinstance(network.backbone, ChainBackbone):
            raise UsageError(
                f"AANet needs a ChainBackbone to double its levels, got {type(network.backbone).__name__}."
            )
        if stage_index == 0 or isinstance(network.backbone.levels[0], FusedLevel):
            return
        network.backbone = two_branches(network.backbone, self.learn_blend)
        if self.reset_scale:
            with torch.no_grad():
                network.head.scale.fill_(1.0)


@dataclass(frozen=True)
class BlendLearned:
    """The method's phases; from stage 1 on, each epoch of the first is followed by one that moves the blend alone."""

    phases: Callable[[Stage], tuple[Phase, ...]]
    lr: float

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        main, *others = self.phases(stage)
        if stage.index == 0:
            return (main, *others)
        blend = replace(
            main,
            name="blend",
            epochs=1,
            lr=self.lr,
            rows=balanced_exemplars,
            parameters=blends,
            schedule=constant,
            clip_value=None,
            clip_norm=None,
            train_batch_norm=False,
            use_terms=False,
        )
        return (replace(main, parameters=AllButBlends(main.parameters), after_epoch=blend), *others)


@dataclass(frozen=True)
class AllButBlends:
    """The selected parameters without the blend of any level."""

    selected: ParameterSelector

    def __call__(self, network: Network) -> list[nn.Parameter]:
        excluded = {id(blend) for blend in blends(network)}
        return [parameter for parameter in self.selected(network) if id(parameter) not in excluded]


def blends(network: Network) -> list[nn.Parameter]:
    """The learned blend of each level."""
    levels = [module for module in network.backbone.modules() if isinstance(module, FusedLevel)]
    return [level.blend for level in levels if isinstance(level.blend, nn.Parameter)]
