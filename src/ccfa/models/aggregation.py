"""AANet's backbone: a stable and a plastic branch, fused after every level."""

import copy

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


class FusedLevel(nn.Module):
    """blend * stable(x) + (1 - blend) * plastic(x)."""

    def __init__(self, stable: nn.Module, plastic: nn.Module, blend: Tensor) -> None:
        super().__init__()
        self.stable = stable
        self.plastic = plastic
        self.blend = blend

    def forward(self, x: Tensor) -> Tensor:
        stable, plastic = self.stable(x), self.plastic(x)
        fused: Tensor = plastic + self.blend * (stable - plastic)  # exact where the branches agree, for any blend
        return fused


def two_branches(backbone: ChainBackbone, learn_blend: bool = False) -> ChainBackbone:
    """Two copies of the backbone as one: the stable one with frozen, scaled kernels, the other free; blend 0.5."""
    start = next(backbone.parameters()).detach().new_tensor(0.5)
    levels: list[nn.Module] = []
    for level in backbone.levels:
        stable = copy.deepcopy(level)
        scale_kernels(stable)
        blend = nn.Parameter(start.clone()) if learn_blend else nn.Buffer(start.clone())
        levels.append(FusedLevel(stable, copy.deepcopy(level), blend))
    return ChainBackbone(levels, backbone.dim).train(backbone.training)


def scale_kernels(module: nn.Module) -> None:
    """Freeze the kernels of every convolution and learn a factor for each; batch norms stay as they are."""
    for layer in list(module.modules()):
        if isinstance(layer, nn.Conv2d):
            kernels = layer.weight.detach()
            del layer.weight
            # A buffer, not a parameter without gradient: no optimiser and no weight decay can reach it.
            layer.register_buffer("weight", kernels)
            parametrize.register_parametrization(layer, "weight", KernelScaling(kernels))
