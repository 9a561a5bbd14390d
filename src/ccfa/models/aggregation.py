"""Two branches of a network as one, for AANet: stable kernels, which are scaled, and plastic ones."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ccfa.models.backbone import ChainBackbone


class KernelScaling(nn.Module):
    """One learned factor for each two-dimensional kernel of a convolution, 1 at the start."""

    def __init__(self, kernels: Tensor) -> None:
        super().__init__()
        self.factors = nn.Parameter(kernels.new_ones(*kernels.shape[:2], 1, 1))

    def forward(self, kernels: Tensor) -> Tensor:
        return kernels * self.factors


def kernels_and_factors(conv: nn.Conv2d) -> tuple[Tensor, Tensor] | None:
    """What makes the weight of a convolution, if its frozen kernels are scaled and not changed in another way."""
    changes: Any = getattr(conv, "parametrizations", {})
    if list(changes) != ["weight"] or [type(change) for change in changes["weight"]] != [KernelScaling]:
        return None
    kernels, factors = changes["weight"].original, changes["weight"][0].factors
    return None if kernels.requires_grad else (kernels, factors)


def blended(stable: Tensor, plastic: Tensor, blend: Tensor) -> Tensor:
    """blend * stable + (1 - blend) * plastic."""
    return plastic + blend * (stable - plastic)  # exact where the branches agree, for any blend


class FusedLevel(nn.Module):
    """Two branches that read the same maps, and what they make blended."""

    def __init__(self, stable: nn.Module, plastic: nn.Module, blend: Tensor) -> None:
        super().__init__()
        self.stable = stable
        self.plastic = plastic
        self.blend = blend

    def forward(self, x: Tensor) -> Tensor:
        return blended(self.stable(x), self.plastic(x), self.blend)


def two_branches(backbone: ChainBackbone, learn_blend: bool = False) -> ChainBackbone:
    """Two copies of the backbone as one: the stable one with frozen, scaled kernels, the other free; blend 0.5."""
    start = next(backbone.parameters()).detach().new_tensor(0.5)
    levels: list[nn.Module] = []
    for level in backbone.levels:
        stable = copy.deepcopy(level)
        for layer in list(stable.modules()):
            if isinstance(layer, nn.Conv2d):
                kernels = layer.weight.detach()
                del layer.weight
                # A buffer, not a parameter without gradient: no optimiser and no weight decay can reach it.
                layer.register_buffer("weight", kernels)
                parametrize.register_parametrization(layer, "weight", KernelScaling(kernels))
        blend = nn.Parameter(start.clone()) if learn_blend else nn.Buffer(start.clone())
        levels.append(FusedLevel(stable, copy.deepcopy(level), blend))
    return ChainBackbone(levels, backbone.dim).train(backbone.training)
