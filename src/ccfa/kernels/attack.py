"""Whether the attack can run as one kernel."""

import importlib.util

from torch import Tensor

DIMS = (16, 32, 64, 128)  # powers of two; features with more dimensions do not fit into registers


def sphere_attack(
    proxies: Tensor,
    scale: Tensor,
    similarity: str,
    criterion: str,
    start: Tensor,
    targets: Tensor,
    alpha: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor] | None:
    """Attack a head that compares directions, in one Triton kernel.

    Args:
        proxies: The head's proxies (classes, proxies per class, dim).
        scale: The factor on its logits, a scalar.
        similarity: `cosine`, or `distance` for minus the squared distance of unit vectors, 2 cos - 2.
        criterion: The loss whose gradient is followed: `cross_entropy`, `nca` or `nca_exclusive`.
        start: Unit-length features (N, dim).
        targets: The class each feature is pushed towards (N,).
        alpha: The step size of each feature (N, 1).
        steps: The number of steps.

    Returns:
        The attacked features and the classes the head gives them, or None if there is no GPU, no Triton, or no kernel
        for this dimension.
    """
    if not start.is_cuda or start.shape[1] not in DIMS or importlib.util.find_spec("triton") is None:
        return None
    from ccfa.kernels.attack_kernel import fused_attack

    return fused_attack(proxies, scale, similarity, criterion, start, targets, alpha, steps)
