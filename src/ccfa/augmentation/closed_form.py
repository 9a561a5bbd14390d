"""The gradient of l_cls(g(z), y) with respect to z, written out for the heads and criteria we have.

The attack needs it ten times a step; autograd takes several times as many kernels for the same numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ccfa.augmentation.samples import Criterion
from ccfa.losses.classification import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, Head, KeepingLinearHead, LinearHead, LocalSimilarityHead

FeatureGradient = Callable[[Tensor, Tensor], Tensor]
"""(features, labels) -> gradient of the summed criterion with respect to the features."""


def closed_form_gradient(head: Head, criterion: Criterion) -> FeatureGradient | None:
    """The gradient in closed form, or None for a head or a criterion that is not ours."""
    backward = _HEADS.get(type(head))
    logit_gradient = _CRITERIA.get(criterion)
    if backward is None or logit_gradient is None:
        return None
    prepared = backward(head)

    def gradient(features: Tensor, labels: Tensor) -> Tensor:
        return prepared(features, labels, logit_gradient)

    return gradient


LogitGradient = Callable[[Tensor, Tensor], Tensor]
Prepared = Callable[[Tensor, Tensor, LogitGradient], Tensor]


def _linear(head: LinearHead) -> Prepared:
    """g_z = eta W^T g_l."""
    weights = head.weights[:, : head.dim]

    def gradient(features: Tensor, labels: Tensor, logit_gradient: LogitGradient) -> Tensor:
        return head.scale * (logit_gradient(head(features), labels) @ weights)

    return gradient


def _cosine(head: CosineHead) -> Prepared:
    """The gradient on the sphere: eta W^T g_l, less its radial part, over |z|."""
    directions = F.normalize(head.weights)

    def gradient(features: Tensor, labels: Tensor, logit_gradient: LogitGradient) -> Tensor:
        unit = F.normalize(features)
        logits = head.scale * F.linear(unit, directions)
        return _tangential(head.scale * (logit_gradient(logits, labels) @ directions), unit, features)

    return gradient


def _local_similarity(head: LocalSimilarityHead) -> Prepared:
    """With s_p = 2 cos - 2, pi = softmax(s), y = sum pi s: dy/ds_p = pi_p (1 + s_p - y)."""
    directions = F.normalize(head.weights, dim=2).flatten(0, 1)
    is_label = torch.arange(head.num_classes, device=directions.device)

    def gradient(features: Tensor, labels: Tensor, logit_gradient: LogitGradient) -> Tensor:
        unit = F.normalize(features)
        s = (2 * F.linear(unit, directions) - 2).view(len(unit), head.num_classes, head.num_proxies)
        weights = s.softmax(dim=2)
        y = (weights * s).sum(dim=2)
        margin = head.margin * (labels[:, None] == is_label) if head.margin else 0.0
        from_logits = 2 * head.scale * logit_gradient(head.scale * (y - margin), labels)
        by_proxy = from_logits[:, :, None] * weights * (1 + s - y[:, :, None])
        return _tangential(by_proxy.flatten(1) @ directions, unit, features)

    return gradient


def _tangential(gradient: Tensor, unit: Tensor, features: Tensor) -> Tensor:
    """Through the normalisation z / |z|."""
    radial = (gradient * unit).sum(dim=1, keepdim=True)
    length: Tensor = features.norm(dim=1, keepdim=True)
    return (gradient - radial * unit) / length.clamp(min=1e-12)


def _cross_entropy_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """softmax - onehot."""
    return logits.softmax(dim=1).scatter_add(1, labels[:, None], -torch.ones_like(logits[:, :1]))


def _nca_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The published NCA's: the largest logit stands in the denominator a second time, for the target."""
    one = torch.ones_like(logits[:, :1])
    largest = logits.amax(dim=1, keepdim=True)
    others = logits.scatter(1, labels[:, None], float("-inf"))
    shares = torch.cat([largest, others], dim=1).softmax(dim=1)
    gradient = shares[:, 1:].scatter_add(1, logits.argmax(dim=1, keepdim=True), shares[:, :1])
    return gradient.scatter_add(1, labels[:, None], -one)


def _nca_exclusive_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The paper's NCA: softmax over the others - onehot, while the hinge is active."""
    others = logits.scatter(1, labels[:, None], float("-inf"))
    gradient = others.softmax(dim=1).scatter_add(1, labels[:, None], -torch.ones_like(logits[:, :1]))
    return gradient * (nca_exclusive(logits, labels) > 0)[:, None]


_CRITERIA: dict[Criterion, LogitGradient] = {
    cross_entropy: _cross_entropy_gradient,
    nca: _nca_gradient,
    nca_exclusive: _nca_exclusive_gradient,
}
_HEADS: dict[type, Callable[..., Prepared]] = {
    LinearHead: _linear,
    KeepingLinearHead: _linear,
    CosineHead: _cosine,
    LocalSimilarityHead: _local_similarity,
}
