"""What every backbone f gives, so that nobody needs hooks to look inside one."""

from typing import NamedTuple

from torch import Tensor, nn


class Features(NamedTuple):
    """The maps of each level and the pooled embedding Z of a batch of images."""

    maps: tuple[Tensor, ...]  # one (B, C, H, W) a level
    embedding: Tensor  # (B, dim)


class Backbone(nn.Module):
    """f: a chain of levels followed by global average pooling."""

    def __init__(self, levels: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.dim = dim

    def forward(self, images: Tensor) -> Features:
        """The features of normalised images."""
        maps = []
        for level in self.levels:
            images = level(images)
            maps.append(images)
        return Features(tuple(maps), maps[-1].mean(dim=(2, 3)))
