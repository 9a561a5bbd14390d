"""L_cls of a head that compares directions, with its gradients, by the two kernels of `head_loss.cu`."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ccfa.kernels.attack import CRITERIA, DIMS, SIMILARITIES
from ccfa.kernels.cuda import can_run, kernel, shared_memory

MAX_ROWS = 8  # features of a block: a thread has a sum for each of them
SLAB = 32  # proxies that a warp has at a time
ENOUGH_SLABS = 8  # in shared memory at a time, for speed
TILE, THREADS = 8, 512  # proxies and threads of a block that computes gradients of proxies


def head_loss(
    features: Tensor, labels: Tensor, weights: Tensor, proxies: Tensor, scale: Tensor, similarity: str, criterion: str,
    other_weights: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """L_cls: the criterion's weighted mean over all labels of all rows, of a head that compares directions.

    It has gradients with respect to features, proxies and scale. Where several logits are the largest, NCA's gradient
    is divided evenly between them, like that of torch's `amax`.

    Args:
        features: (N, dim).
        labels: (N, L).
        weights: The weight of each label (N, L).
        proxies: The head's proxies (classes, proxies per class, dim).
        scale: The factor on its logits, a scalar.
        similarity: `cosine`, or `distance` for minus the squared distance of unit vectors, 2 cos - 2.
        criterion: The name of the criterion: `cross_entropy`, `nca` or `nca_exclusive`.
        other_weights: Those of rows that count in the mean but are not among these, of any shape.

    Returns:
        The loss, a scalar, or None if there is no GPU that can run the kernels, or if they cannot be used for this
        dimension, precision or number of classes.
    """
    if features.shape[1] not in DIMS or not len(features) or not can_run(features.device):
        return None
    if torch.compiler.is_compiling():  # a launch cannot be traced
        return None
    others = weights.new_empty(0) if other_weights is None else other_weights
    if any(tensor.dtype != torch.float32 for tensor in (features, weights, proxies, scale, others)):
        return None
    if any(tensor.data_ptr() % 16 for tensor in (features, proxies)):
        return None
    multiprocessors = torch.cuda.get_device_properties(features.device).multi_processor_count
    layout = _layout(len(features), *proxies.shape, multiprocessors, shared_memory(features.device))
    if layout is None:
        return None
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        features, proxies, scale, labels, weights, others, similarity, criterion, layout
    )
    return loss


class _Layout(NamedTuple):
    """How a block of `head_loss_rows` uses shared memory."""

    rows: int  # features
    warps: int
    most_warps: int  # that leave a thread enough registers
    places: int  # slabs of proxies
    in_global: bool  # whether the cosines are in global memory
    shared: int  # bytes


@functools.cache
def _layout(
    num_rows: int, num_classes: int, num_proxies: int, dim: int, multiprocessors: int, limit: int
) -> _Layout | None:
    """None if there are too many classes. Sizes are in floats, as `head_loss.cu` divides the memory."""
    slabs, most_warps = _divided(num_classes * num_proxies, SLAB), 12 if dim > 64 else 20
    slab, width, per_row = SLAB * (dim + 4), slabs * SLAB, dim + 1 + 3 * num_classes
    free = limit // 4 - width - most_warps
    waves = _divided(num_rows, multiprocessors * MAX_ROWS)
    rows = min(_divided(num_rows, multiprocessors * waves), (free - slab) // per_row)
    if rows < 1:
        return None
    free -= rows * per_row
    in_global = free - rows * width < min(slabs, ENOUGH_SLABS) * slab
    if not in_global:
        free -= rows * width
    places = min(slabs, free // slab)
    warps = min(most_warps, max(slabs, rows) if places == slabs else places)
    if places < slabs:
        places -= places % warps  # each warp has its own
    return _Layout(rows, warps, most_warps, places, in_global, 4 * (limit // 4 - free + places * slab))


class _HeadLoss(torch.autograd.Function):
    """The gradients of a scalar are computed with it; backward multiplies them by the gradient it is given."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, proxies: Tensor, scale: Tensor, labels: Tensor, weights: Tensor, others: Tensor,
        similarity: str, criterion: str, layout: _Layout,
    ) -> Tensor:  # fmt: skip
        (num_rows, num_labels), (num_classes, num_proxies, dim) = labels.shape, proxies.shape
        features, proxies, all_proxies = features.contiguous(), proxies.contiguous(), num_classes * num_proxies
        blocks, width = _divided(num_rows, layout.rows), _divided(all_proxies, SLAB) * SLAB
        new = functools.partial(torch.empty, device=features.device)
        loss, of_scale, sums_of_rows = new(()), new(scale.shape), new(2, num_rows)
        needs = ctx.needs_input_grad
        of_features = new(features.shape) if needs[0] else None
        of_proxies = new(proxies.shape) if needs[1] else None
        coefficients = new(blocks * layout.rows, width) if needs[1] or layout.in_global else None
        compiled = functools.partial(
            kernel, "head_loss.cu", DIM=dim, PROXIES=num_proxies, CRITERION=CRITERIA[criterion], ROWS=layout.rows,
            WARPS=layout.most_warps, IN_GLOBAL=int(layout.in_global), TILE=TILE, THREADS=THREADS,
        )  # fmt: skip
        compiled("head_loss_rows", shared_memory(features.device))(
            (blocks,), 32 * layout.warps, features, proxies, scale, labels.long().contiguous(), weights.contiguous(),
            sums_of_rows, of_features, coefficients, others.contiguous(), others.numel(), num_rows, num_labels,
            num_classes, *SIMILARITIES[similarity], layout.places, shared=layout.shared,
        )  # fmt: skip
        tiles, parts = _divided(all_proxies, TILE) if needs[1] else 0, 4 * THREADS // 32 * TILE * dim
        compiled("head_loss_proxies", parts)(
            (tiles + 1,), THREADS, features, proxies, sums_of_rows, coefficients, loss, of_scale, of_proxies,
            num_rows, all_proxies, shared=parts,
        )  # fmt: skip
        found = of_features, of_proxies, of_scale if needs[2] else None
        ctx.save_for_backward(*(gradient for gradient in found if gradient is not None))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (of_one * gradient for of_one in ctx.saved_tensors)  # features first: the backbone waits for them
        return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), *(None,) * 6)


def _divided(amount: int, size: int) -> int:
    return -(-amount // size)
