"""The whole N-step attack and most-confident targets, for heads that compare directions, and balanced targets."""

import torch
from torch import Tensor

from ccfa.kernels.cuda import can_run, kernel, shared_memory

CRITERIA = {"cross_entropy": 0, "nca": 1, "nca_exclusive": 2}
SIMILARITIES = {"cosine": (1.0, 0.0), "distance": (2.0, -2.0)}  # slope and shift of the cosine
SHARE = 3  # the attack takes one in three multiprocessors: in training, backward runs beside it on the others
DIMS = (16, 32, 64, 128)  # of features: powers of two; more do not fit into registers
MAX_ROWS, MAX_PLACES = 512, 16  # of balanced targets: one block has them all, in registers


def fused_attack(
    proxies: Tensor, scale: Tensor, similarity: str, criterion: str,
    start: Tensor, targets: Tensor, alpha: Tensor, steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attacked features and the classes the head gives them; see `sphere_attack`."""
    num_classes, num_proxies, dim = proxies.shape
    num_rows, device = len(start), start.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count // SHARE
    limit = shared_memory(device)
    attacked = torch.empty(start.shape, dtype=torch.float32, device=device)
    labels = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return attacked, labels

    threads = 256 if dim > 64 else 512  # a thread holds `dim` numbers in registers
    warps, slabs = threads // 32, _divided(num_classes * num_proxies, 32)
    # Whole waves of blocks, in which each feature has a warp of its own.
    rows = _divided(num_rows, multiprocessors * _divided(num_rows, multiprocessors * warps))

    # Shared memory, in floats, as `attack.cu` divides it.
    free, slab = limit // 4 - warps, 32 * dim
    per_row, results = dim * (min(4, dim // 8) + warps), num_classes * (num_proxies + 2 + num_proxies % 2)
    in_global = per_row + results > free
    if not in_global:
        per_row += results
    rows = min(rows, free // per_row)
    stored = min(slabs, (free - rows * per_row) // slab) if slabs > warps else 0
    blocks = _divided(num_rows, rows)
    workspace = attacked.new_empty(blocks * rows * results if in_global else 0)
    launch = kernel(
        "attack.cu", "attack", limit, DIM=dim, PROXIES=num_proxies, CRITERION=CRITERIA[criterion], ROWS=rows,
        THREADS=threads, IN_GLOBAL=int(in_global),
    )  # fmt: skip
    launch(
        (blocks,), threads, _aligned(start), _aligned(proxies), targets.long().contiguous(),
        alpha.float().contiguous(), scale.float(), attacked, labels, workspace, num_rows, num_classes, steps,
        *SIMILARITIES[similarity], stored, shared=4 * (warps + rows * per_row + stored * slab),
    )  # fmt: skip
    return attacked, labels


def confident_classes(
    features: Tensor, labels: Tensor, proxies: Tensor, scale: Tensor, similarity: str
) -> tuple[Tensor, Tensor] | None:
    """Each row's likeliest class without its own ones, and whether there is one, of a head that compares directions.

    Args:
        features: (N, dim).
        labels: The row's own classes (N, L).
        proxies: Those of the classes that count (classes, proxies per class, dim).
        scale: The factor on the head's logits, a scalar.
        similarity: As in `sphere_attack`.

    Returns:
        Classes (N,) and booleans (N,), or None where no kernel can be used.
    """
    num_classes, num_proxies, dim = proxies.shape
    shared = 4 * (dim + num_classes * num_proxies)
    if not can_run(features.device) or dim % 4 or not len(features):
        return None
    if (
        features.dtype != torch.float32
        or proxies.dtype != torch.float32
        or shared > shared_memory(features.device) - 1024
    ):
        return None
    classes = torch.empty(len(features), dtype=torch.int64, device=features.device)
    valid = torch.empty(len(features), dtype=torch.bool, device=features.device)
    kernel("targets.cu", "most_confident", shared_memory(features.device) - 1024)(
        (len(features),), 256, features.contiguous(), labels.contiguous(), _aligned(proxies), scale, labels.shape[1],
        num_classes, num_proxies, dim, *SIMILARITIES[similarity], classes, valid, shared=shared,
    )  # fmt: skip
    return classes, valid


def balanced_assignment(
    confidences: Tensor, classes: Tensor, num_old: int, share: Tensor, iterations: int, restart: int,
    price_weight: float,
) -> Tensor | None:  # fmt: skip
    """What `ccfa.augmentation.targets.solve` computes, in one kernel.

    Args:
        confidences: W (N, K).
        classes: The candidates (N, K), `num_old` where there is none.
        num_old: The number of old classes.
        share: The number of rows meant for each class, a scalar tensor.
        iterations: The number of iterations.
        restart: Iterations after which the anchor moves.
        price_weight: How much longer the steps of the prices are than those of S.

    Returns:
        S (N, K), or None where no kernel can be used.
    """
    (num_rows, places), shared = confidences.shape, 4 * 6 * (num_old + 1)
    if not can_run(confidences.device) or not 0 < num_rows <= MAX_ROWS or places > MAX_PLACES:
        return None
    if share.device != confidences.device or torch.compiler.is_compiling():  # a launch cannot be traced
        return None
    if confidences.dtype != torch.float32 or shared > shared_memory(confidences.device):
        return None
    result = torch.empty(confidences.shape, device=confidences.device)
    kernel("balanced.cu", "balance", shared_memory(confidences.device), PLACES=places)(
        (1,), 32 * _divided(num_rows, 32), confidences.contiguous(), classes.contiguous(), share.float(), result,
        num_rows, num_old, iterations, restart, float(price_weight), shared=shared,
    )  # fmt: skip
    return result


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor as the kernel can read it, 16 bytes at a time: a copy only where its type or layout differs."""
    tensor = tensor.float().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _divided(amount: int, size: int) -> int:
    return -(-amount // size)
