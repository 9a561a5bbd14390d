"""The attack on the old head (eq. 3) and the labels it gives (eq. 4), by the fastest way there is for that head."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ccfa.augmentation.closed_form import FeatureGradient, closed_form_gradient
from ccfa.augmentation.samples import Criterion
from ccfa.models import Head

Scorer = Callable[[Tensor], Tensor]
"""A head as somebody else's loop may have it: features (N, dim) -> logits."""


class Attack(Protocol):
    """Pushes unit-length features towards their targets."""

    def __call__(
        self, start: Tensor, norms: Tensor, targets: Tensor, alpha: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Z' = z^N * norms and Y_pseudo = argmax g_{k-1}(Z')."""
        ...


def attack_on(old_head: Scorer | Head, criterion: Criterion, on_gpu: bool) -> Attack:
    """One kernel where there is one, the written-out gradient for our own heads, autograd for any other."""
    if not isinstance(old_head, Head):
        return functools.partial(sign_steps, old_head, autograd_gradient(old_head, criterion))
    if on_gpu and importlib.util.find_spec("triton"):
        from ccfa.augmentation.attack_kernel import fused_attack, supports

        if supports(old_head, criterion):
            return functools.partial(fused_attack, old_head, criterion)
    gradient = closed_form_gradient(old_head, criterion) or autograd_gradient(old_head, criterion)
    return functools.partial(sign_steps, old_head, gradient)


def sign_steps(
    old_head: Scorer,
    gradient: FeatureGradient,
    start: Tensor,
    norms: Tensor,
    targets: Tensor,
    alpha: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """z^{n+1} = z^n - alpha sign(grad l_cls(g_{k-1}(z^n), Y_target)), then the old head's word on z^N."""
    z = start
    with torch.no_grad():
        for _ in range(steps):
            z = z - alpha * gradient(z * norms, targets).sign()
        attacked = z * norms
        return attacked, old_head(attacked).argmax(dim=1)


def autograd_gradient(old_head: Scorer | Head, criterion: Criterion) -> FeatureGradient:
    """The gradient of any differentiable head and criterion."""

    def gradient(features: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            features = features.detach().requires_grad_()
            logits = old_head(features, targets) if isinstance(old_head, Head) else old_head(features)
            (result,) = torch.autograd.grad(criterion(logits, targets).sum(), features)
        return result

    return gradient
