"""What every backbone f gives, so that nobody needs hooks to look inside one."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Features(NamedTuple):
    """The maps of each level and the pooled embedding Z of a batch of images."""

    maps: tuple[Tensor, ...]  # one (B, C, H, W) a level
    embedding: Tensor  # (B, dim)


class MapMixing(NamedTuple):
    """Row i becomes share * row i + (1 - share) * row partners[i], before the level drawn for the batch."""

    level: Tensor  # ()
    partners: Tensor  # (B,)
    share: Tensor  # ()


def mixed_before(level: int, maps: Tensor, mixing: MapMixing) -> Tensor:
    """What enters a level: mixed if it is the chosen one, decided on the device."""
    share = torch.where(mixing.level == level, mixing.share, torch.ones_like(mixing.share)).to(maps.dtype)
    return share * maps + (1 - share) * maps[mixing.partners]


class Backbone(nn.Module):
    """f: a chain of levels followed by global average pooling."""

    def __init__(self, levels: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.dim = dim

    def forward(self, images: Tensor, mixing: MapMixing | None = None) -> Features:
        """The features of normalised images, mixed on the way where that is asked for."""
        maps = []
        for index, level in enumerate(self.levels):
            if mixing is not None:
                images = mixed_before(index, images, mixing)
            images = level(images)
            maps.append(images)
        return Features(tuple(maps), maps[-1].mean(dim=(2, 3)))
