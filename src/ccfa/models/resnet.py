"""One ResNet builder; each published network is one set of options."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ccfa.kernels import Conv3x3, normalised
from ccfa.kernels.resnet import Chain, TwoChains, Unit, placeholder
from ccfa.models.aggregation import FusedLevel, kernels_and_factors
from ccfa.models.backbone import BACKBONES, Backbone, ChainBackbone


class Block(nn.Module):
    """conv - BN - ReLU - conv - BN, plus the shortcut, with or without a ReLU after the sum.

    In GDumb's blocks, `rectified`, both branches end in a ReLU; an identity is rectified already.
    """

    def __init__(
        self, channels: int, out: int, stride: int, shortcut: str, relu: bool, rectified: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = Conv3x3(channels, out, stride)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = Conv3x3(out, out)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = relu
        self.rectified = rectified
        self.shortcut: nn.Module
        if stride == 1 and channels == out:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(out - channels, stride)
        else:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out), *([nn.ReLU()] if rectified else []))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)  # first: the order decides how backward adds up, and so the last bits
        residual = normalised(self.conv2, self.norm2, F.relu(normalised(self.conv1, self.norm1, x)))
        total: Tensor = shortcut + (F.relu(residual) if self.rectified else residual)
        return F.relu(total) if self.relu else total


class PadShortcut(nn.Module):
    """Every stride-th pixel, with channels of zeros appended: a shortcut without parameters."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


@dataclass(frozen=True)
class ResNet:
    """The options in which the published ResNets differ; calling it builds the backbone."""

    widths: tuple[int, ...]  # channels of each level
    blocks: tuple[int, ...]  # residual blocks of each level
    strides: tuple[int, ...]  # of the first block of each level
    stem: Literal["3x3", "3x3-pool", "7x7-pool"] = "3x3"
    shortcut: Literal["pad", "project"] = "pad"
    relu_after_sum: Literal["never", "first-of-level", "not-last", "always"] = "never"
    zero_init_residual: bool = True  # the second batch norm of each block starts at 0

    rectified: ClassVar[bool] = False
    norm_eps: ClassVar[float] = 1e-5

    def __call__(self, channels: int = 3) -> ChainBackbone:
        """The backbone for images of that many channels."""
        levels: list[nn.Module] = []
        width = self.widths[0]
        for level, (out, num_blocks, stride) in enumerate(zip(self.widths, self.blocks, self.strides, strict=True)):
            modules: list[nn.Module] = _stem(self.stem, channels, width) if level == 0 else []
            for index in range(num_blocks):
                is_last = level == len(self.widths) - 1 and index == num_blocks - 1
                relu = {"never": False, "first-of-level": index == 0, "not-last": not is_last, "always": True}
                arguments = width, out, stride if index == 0 else 1, self.shortcut, relu[self.relu_after_sum]
                modules.append(Block(*arguments, self.rectified))
                width = out
            levels.append(nn.Sequential(*modules))
        backbone = ChainBackbone(levels, width)
        _initialise(backbone, self.zero_init_residual, self.norm_eps)
        return backbone


class RectifiedResNet(ResNet):
    """The same made of rectified blocks."""

    rectified = True
    norm_eps = 1e-6


def _stem(kind: str, channels: int, width: int) -> list[nn.Module]:
    seven = kind == "7x7-pool"
    conv = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False) if seven else Conv3x3(channels, width)
    stem = [conv, nn.BatchNorm2d(width), nn.ReLU()]
    return [*stem, nn.MaxPool2d(3, stride=2, padding=1)] if kind.endswith("pool") else stem


def as_chain(backbone: Backbone) -> Chain | None:
    """The backbone as our kernels see it, or None if it is made of other parts."""
    return _chain(list(backbone.levels)) if _is_plain(backbone) else None


def as_branches(backbone: Backbone) -> list[TwoChains] | None:
    """The levels of a backbone with two branches as our kernels see them, or None if it is made of other parts."""
    if not _is_plain(backbone):
        return None
    found: list[TwoChains] = []
    for level in backbone.levels:
        if type(level) is not FusedLevel:
            return None
        stable, plastic = (_chain([branch], begins=not found) for branch in (level.stable, level.plastic))
        if stable is None or plastic is None:
            return None
        found.append(TwoChains(stable, plastic, level.blend))
    return found


def _is_plain(backbone: Backbone) -> TypeGuard[ChainBackbone]:
    """Whether it is a chain of levels that nobody observes."""
    if type(backbone) is not ChainBackbone:
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in backbone.modules())


def _chain(levels: Sequence[nn.Module], begins: bool = True) -> Chain | None:
    """These levels, of which the first one begins with a stem, or reads a map."""
    if any(type(level) is not nn.Sequential for level in levels):
        return None
    first, *later = [list(level.children()) for level in levels]
    num_stem = 3 if begins else 0
    stem, rest = first[:num_stem], [first[num_stem:], *later]
    blocks = [block for level in rest for block in level if type(block) is Block and not block.rectified]
    if not blocks or len(blocks) < sum(map(len, rest)):
        return None
    if begins and [type(part) for part in stem[2:]] != [nn.ReLU]:
        return None
    pairs = [(stem[0], stem[1])] if begins else []
    for block in blocks:
        pairs += [(block.conv1, block.norm1), (block.conv2, block.norm2)]
    units = [unit for unit in (_unit(conv, norm, 3) for conv, norm in pairs) if unit]
    projections = [_projection(block.shortcut) for block in blocks]
    others = [block for unit, block in zip(projections, blocks, strict=True) if unit is None]
    if len(units) < len(pairs) or any(type(block.shortcut) not in (nn.Identity, PadShortcut) for block in others):
        return None
    ends = tuple(itertools.accumulate(map(len, rest), initial=-1))[1:]
    units = units if begins else [placeholder(units[0]), *units]
    return Chain(tuple(units), tuple(block.relu for block in blocks), ends, tuple(projections), begins)


def _projection(shortcut: nn.Module) -> Unit | None:
    """A shortcut of a convolution and a batch norm."""
    parts = list(shortcut.children()) if type(shortcut) is nn.Sequential else []
    return _unit(parts[0], parts[1], 1) if len(parts) == 2 else None


def _unit(conv: nn.Module, norm: nn.Module, size: int) -> Unit | None:
    """A convolution of this size and a batch norm, or None if somebody has replaced, parametrised or changed one."""
    wanted = Conv3x3 if size == 3 else nn.Conv2d
    if parametrize.type_before_parametrizations(conv) is not wanted or type(norm) is not nn.BatchNorm2d:
        return None
    assert isinstance(conv, nn.Conv2d)
    sizes = conv.kernel_size, conv.padding, conv.dilation, conv.groups
    if (
        sizes != ((size, size), (size // 2, size // 2), (1, 1), 1)
        or conv.padding_mode != "zeros"
        or conv.bias is not None
    ):
        return None
    if parametrize.is_parametrized(conv):
        scaled = kernels_and_factors(conv)
        return Unit(conv, norm, *scaled) if scaled else None
    return Unit(conv, norm, conv.weight) if isinstance(conv.weight, nn.Parameter) else None


@torch.no_grad()
def _initialise(backbone: ChainBackbone, zero_init_residual: bool, norm_eps: float) -> None:
    """Kaiming normal (fan out) for convolutions; batch norms start as the identity or, last in a block, at 0."""
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            module.eps = norm_eps
    if zero_init_residual:
        for module in backbone.modules():
            if isinstance(module, Block):
                module.norm2.weight.zero_()


_THREE_LEVELS = (16, 32, 64), (5, 5, 5), (1, 2, 2)
_FOUR_LEVELS = (64, 128, 256, 512), (2, 2, 2, 2), (1, 2, 2, 2)

# PODNet's and AFC's ("rebuffi"): no ReLU on the trunk, the last block a level of its own. 463,504 parameters.
BACKBONES.add("resnet32-podnet", ResNet((16, 32, 64, 64), (5, 5, 4, 1), (1, 2, 2, 1)))
# UCIR's: 466,256 parameters.
BACKBONES.add(
    "resnet32-ucir",
    ResNet(*_THREE_LEVELS, shortcut="project", relu_after_sum="not-last", zero_init_residual=False),
)
# PyCIL's: ReLU after every sum, hence an embedding without negative values. 463,504 parameters.
BACKBONES.add("resnet32-pycil", ResNet(*_THREE_LEVELS, relu_after_sum="always", zero_init_residual=False))
# GDumb's: a ReLU ends every branch and none follows a sum, hence features without negative values. 466,256 parameters.
BACKBONES.add("resnet32-gdumb", RectifiedResNet(*_THREE_LEVELS, shortcut="project", zero_init_residual=False))
# PODNet's ImageNet network, with a 3x3 stride-1 stem: 11,168,832 parameters.
BACKBONES.add(
    "resnet18-podnet",
    ResNet(*_FOUR_LEVELS, stem="3x3-pool", shortcut="project", relu_after_sum="first-of-level"),
)
# UCIR's ImageNet network, with the usual 7x7 stride-2 stem.
BACKBONES.add(
    "resnet18-ucir",
    ResNet(*_FOUR_LEVELS, stem="7x7-pool", shortcut="project", relu_after_sum="not-last", zero_init_residual=False),
)
# IL2A's and PASS's CIFAR network: ReLU after every sum, hence an embedding without negative values.
BACKBONES.add(
    "resnet18-il2a",
    ResNet(*_FOUR_LEVELS, shortcut="project", relu_after_sum="always", zero_init_residual=False),
)
# DER's CIFAR network: the same with residual branches that start at 0. 11,168,832 parameters.
BACKBONES.add("resnet18-cifar", ResNet(*_FOUR_LEVELS, shortcut="project", relu_after_sum="always"))
# For 8x8 digits: PODNet's kind of trunk with one block per level.
BACKBONES.add("small", ResNet((16, 32, 64), (1, 1, 1), (1, 2, 2)))
