"""Heads g, from an embedding to one logit per seen class, and the network that a backbone and a head make.

A head keeps its old and its new classes in two parameter blocks, so that freezing the old classes is a choice of
parameters and not a mask.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.errors import UsageError
from ccfa.kernels.rows import unit_rows
from ccfa.models.backbone import Backbone


class Head(nn.Module, ABC):
    """g: `old` and `new` class blocks, and the scale eta that multiplies its logits."""

    def __init__(self, dim: int, block: tuple[int, ...], scale: Tensor, uniform: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.uniform = uniform
        self.old = nn.Parameter(torch.empty(0, *block))
        self.new = nn.Parameter(torch.empty(0, *block))
        self.scale = scale
        self.num_auxiliary = 0  # how many of the last outputs are no classes but serve training

    @property
    def num_classes(self) -> int:
        """The number of outputs, auxiliary ones included."""
        return len(self.old) + len(self.new)

    @property
    def weights(self) -> Tensor:
        """The parameters of all classes, old first."""
        return torch.cat([self.old, self.new])

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """Turn the new classes into old ones and add `num_new` freshly initialised ones."""
        fresh = self.initial(num_new, generator).to(self.new)
        self.old = nn.Parameter(self.weights.detach())
        self.new = nn.Parameter(fresh)

    def drop_auxiliary(self) -> None:
        """Remove the outputs that served training only."""
        self.new = nn.Parameter(self.new.detach()[: len(self.new) - self.num_auxiliary].clone())
        self.num_auxiliary = 0

    def constrain(self) -> None:
        """Put parameters back to where the head allows them; called after each step of the optimiser."""

    def initial(self, num_new: int, generator: Generator | None) -> Tensor:
        """Starting values for new classes: Kaiming normal (std 1/sqrt(dim)), or uniform in +-1/sqrt(dim)."""
        shape = num_new, *self.new.shape[1:]
        draws = (
            2 * torch.rand(shape, generator=generator) - 1 if self.uniform else torch.randn(shape, generator=generator)
        )
        return draws / math.sqrt(self.dim)

    def embed(self, embedding: Tensor) -> Tensor:
        """The embedding in the classifier's space: what feature augmentations work on."""
        return embedding

    @abstractmethod
    def similarities(self, features: Tensor) -> Tensor:
        """Unscaled scores (B, classes)."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """The logits eta * similarities; `labels` matter only to a head with a margin."""
        return self.scale * self.similarities(features)


class LinearHead(Head):
    """Inner products with class weights, plus a bias kept as the last column of each block."""

    def __init__(
        self, dim: int, bias: bool = True, temperature: float = 1.0, relu: bool = False, uniform: bool = False
    ) -> None:
        if temperature <= 0:
            raise UsageError(f"A head's temperature must be positive, got {temperature}.")
        super().__init__(dim, (dim + bias,), nn.Buffer(torch.tensor(1.0 / temperature)), uniform)
        self.bias = bias
        self.relu = relu

    def initial(self, num_new: int, generator: Generator | None) -> Tensor:
        """Kaiming normal weights and zero biases, or both uniform in +-1/sqrt(dim), as nn.Linear."""
        if self.uniform or not self.bias:
            return super().initial(num_new, generator)
        return F.pad(torch.randn(num_new, self.dim, generator=generator) / math.sqrt(self.dim), (0, 1))

    def embed(self, embedding: Tensor) -> Tensor:
        return F.relu(embedding) if self.relu else embedding

    def similarities(self, features: Tensor) -> Tensor:
        """w_c . f + b_c."""
        if self.bias:
            return F.linear(features, self.weights[:, :-1], self.weights[:, -1])
        return F.linear(features, self.weights)


class CosineHead(Head):
    """UCIR's head: cosines between the feature and one weight per class, times a learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, (dim,), nn.Parameter(torch.ones(())), uniform=True)

    def embed(self, embedding: Tensor) -> Tensor:
        return unit_rows(embedding)

    def similarities(self, features: Tensor) -> Tensor:
        """cos(f, w_c)."""
        return F.linear(F.normalize(features), F.normalize(self.weights))


class LocalSimilarityHead(Head):
    """PODNet's head: several proxies per class, merged by a softmax over their similarities, times a learned eta.

    The similarity is minus the squared distance of the unit vectors, 2 cos - 2, as in the published code; the paper
    writes the cosine itself.
    """

    def __init__(self, dim: int, num_proxies: int = 10, margin: float = 0.0) -> None:
        if num_proxies < 1:
            raise UsageError(f"A class needs at least 1 proxy, got {num_proxies}.")
        super().__init__(dim, (num_proxies, dim), nn.Parameter(torch.ones(())))
        self.num_proxies = num_proxies
        self.margin = margin

    def embed(self, embedding: Tensor) -> Tensor:
        return unit_rows(embedding)

    def similarities(self, features: Tensor) -> Tensor:
        """sum_p s_cp softmax_p(s_cp), with s_cp = 2 cos(f, w_cp) - 2."""
        cosines = F.linear(F.normalize(features), F.normalize(self.weights, dim=2).flatten(0, 1))
        shape = features.shape[0], self.num_classes, self.num_proxies
        similarities = 2 * cosines.view(shape) - 2
        return (similarities.softmax(dim=2) * similarities).sum(dim=2)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """eta * (similarities - delta at the label): the margin acts only where labels are given."""
        similarities = self.similarities(features)
        if labels is not None and self.margin:
            is_label = labels[:, None] == torch.arange(self.num_classes, device=labels.device)
            similarities = similarities - self.margin * is_label
        return self.scale * similarities


class Network(nn.Module):
    """Theta_k: the backbone and the head of one stage."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone: Backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """The logits of normalised images."""
        logits: Tensor = self.head(self.head.embed(self.backbone(images).embedding))
        return logits

    def frozen_copy(self) -> "Network":
        """A copy that never changes: the `previous` of the next stage."""
        return copy.deepcopy(self).eval().requires_grad_(False)


def flattened(state: Mapping[str, Tensor]) -> Tensor:
    """All weights and statistics of a `state_dict` as one vector, to compare or check them at once."""
    parts = [tensor.flatten() for tensor in state.values() if tensor.is_floating_point()]
    return torch.cat(parts) if parts else torch.empty(0)
