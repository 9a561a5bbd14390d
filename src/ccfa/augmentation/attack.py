"""The attack on the old head (eq. 3) and the labels it gives (eq. 4)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ccfa.augmentation.samples import Criterion
from ccfa.kernels import sphere_attack
from ccfa.losses.classification import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, Head, LocalSimilarityHead

Scorer = Callable[[Tensor], Tensor]
"""A head as somebody else's loop may have it: features (N, dim) -> logits."""

Attack = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""`attack` on a given head with a given criterion."""


def attack(
    old_head: Scorer | Head,
    criterion: Criterion,
    start: Tensor,
    norms: Tensor,
    targets: Tensor,
    alpha: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Push features towards target classes: z^{n+1} = z^n - alpha sign(grad l_cls(g_{k-1}(z^n), Y_target)).

    Args:
        old_head: g_{k-1}.
        criterion: l_cls: (logits, labels) -> one loss per row.
        start: z^0, features (N, dim) of unit length.
        norms: The lengths (N, 1) at which the head sees them.
        targets: Y_target (N,).
        alpha: The step size of each feature (N, 1).
        steps: N.

    Returns:
        Z' = z^N * norms, and Y_pseudo = argmax g_{k-1}(Z').

    >>> head = torch.nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.eye_(head.weight)
    >>> start, one = torch.tensor([[0.8, 0.6]]), torch.ones(1, 1)
    >>> attack(head, cross_entropy, start, one, torch.tensor([1]), 0.1 * one, steps=2)
    (tensor([[0.6000, 0.8000]]), tensor([1]))
    """
    if done := _by_kernel(old_head, criterion, start, targets, alpha, steps):
        return done[0] * norms, done[1]
    z = start
    for _ in range(steps):
        z = z - alpha * _gradient(old_head, criterion, z * norms, targets).sign()
    with torch.no_grad():
        attacked = z * norms
        return attacked, old_head(attacked).argmax(dim=1)


def _by_kernel(
    old_head: Scorer | Head, criterion: Criterion, start: Tensor, targets: Tensor, alpha: Tensor, steps: int
) -> tuple[Tensor, Tensor] | None:
    """The attack on a head that does not see the features' lengths; None where the kernel does not know it."""
    if criterion not in (cross_entropy, nca, nca_exclusive):
        return None
    problem = criterion.__name__, start, targets, alpha, steps
    if type(old_head) is CosineHead:
        return sphere_attack(old_head.weights[:, None], old_head.scale, "cosine", *problem)
    if type(old_head) is LocalSimilarityHead and old_head.margin == 0:
        return sphere_attack(old_head.weights, old_head.scale, "distance", *problem)
    return None


def _gradient(old_head: Scorer | Head, criterion: Criterion, features: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        features = features.detach().requires_grad_()
        logits = old_head(features, targets) if isinstance(old_head, Head) else old_head(features)
        (gradient,) = torch.autograd.grad(criterion(logits, targets).sum(), features)
    return gradient
