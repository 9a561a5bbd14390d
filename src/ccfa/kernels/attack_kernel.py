"""The whole N-step attack as one Triton kernel, for heads that compare directions.

Each program keeps a few features in registers. In every step it walks over the proxies of a tile of classes twice: once
for the logits, once for the gradient. Classes beyond the first tile are walked over once more, for their logits.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

CRITERIA = {"cross_entropy": 0, "nca": 1, "nca_exclusive": 2}
SIMILARITIES = {"cosine": (1.0, 0.0), "distance": (2.0, -2.0)}  # slope and shift of the cosine
ROWS, MAX_CLASSES = 16, 128  # of a tile: features, and classes


def fused_attack(
    proxies: Tensor, scale: Tensor, similarity: str, criterion: str,
    start: Tensor, targets: Tensor, alpha: Tensor, steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attacked features and the classes the head gives them; see `sphere_attack`."""
    num_classes, num_proxies, dim = proxies.shape
    slope, shift = SIMILARITIES[similarity]
    tile = min(MAX_CLASSES, max(ROWS, triton.next_power_of_2(num_classes)))
    padded = triton.cdiv(num_classes, tile) * tile
    directions = F.pad(F.normalize(proxies, dim=2).transpose(0, 1), (0, 0, 0, padded - num_classes)).contiguous()
    attacked = start.float().contiguous().clone()
    labels = targets.new_empty(len(attacked))
    _attack[(triton.cdiv(len(attacked), ROWS),)](
        attacked,
        directions,
        targets.contiguous(),
        alpha.contiguous(),
        scale,
        labels,
        len(attacked),
        num_classes,
        padded,
        steps,
        slope,
        shift,
        CRITERION=CRITERIA[criterion],
        DIM=dim,
        PROXIES=num_proxies,
        CLASSES=tile,
        ROWS=ROWS,
        num_warps=8,
    )
    return attacked, labels


@triton.jit
def _similarities(
    unit, directions, proxy, first, padded, slope, shift, DIM: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """One proxy of each class of a tile: its direction, and s of each feature."""
    columns = proxy * padded + first + tl.arange(0, CLASSES)
    tile = tl.load(directions + columns[:, None] * DIM + tl.arange(0, DIM)[None, :])
    return tile, slope * tl.dot(unit, tl.trans(tile), input_precision="tf32x3") + shift


@triton.jit
def _scores(
    unit, directions, first, num_classes, padded, scale, slope, shift,
    DIM: tl.constexpr, PROXIES: tl.constexpr, CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of classes: their numbers, the sum of exp(s) over proxies, y = sum of softmax(s) s, and the logits."""
    total = tl.zeros([ROWS, CLASSES], tl.float32)
    weighted = tl.zeros([ROWS, CLASSES], tl.float32)
    for proxy in range(PROXIES):
        _tile, s = _similarities(unit, directions, proxy, first, padded, slope, shift, DIM, CLASSES)
        powers = tl.exp(s)  # s is from -4 to 1: nothing can overflow
        total += powers
        weighted += powers * s
    classes = first + tl.arange(0, CLASSES)
    y = weighted / total
    return classes, total, y, tl.where((classes < num_classes)[None, :], scale * y, -1e30)


@triton.jit
def _powers(logits, largest, is_target, CRITERION: tl.constexpr):
    """What the classes of a tile contribute to the denominator: exp(logit - largest), without the target in NCA."""
    powers = tl.exp(logits - largest[:, None])
    return powers if CRITERION == 0 else tl.where(is_target, 0.0, powers)


@triton.jit
def _by_class(logits, largest, total, classes, best, is_target, CRITERION: tl.constexpr):
    """The derivative of the loss with respect to the logits of a tile of classes."""
    share = _powers(logits, largest, is_target, CRITERION) / total[:, None]
    if CRITERION == 1:
        share += tl.where(classes[None, :] == best[:, None], 1.0 / total[:, None], 0.0)
    return share - tl.where(is_target, 1.0, 0.0)


@triton.jit
def _gradient(
    unit, directions, first, padded, slope, shift, sums, y, by_class,
    DIM: tl.constexpr, PROXIES: tl.constexpr, CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile's part of dl/dz, without the factors slope and scale; `by_class` is dl/dlogit."""
    gradient = tl.zeros([ROWS, DIM], tl.float32)
    by_class = by_class / sums
    for proxy in range(PROXIES):
        tile, s = _similarities(unit, directions, proxy, first, padded, slope, shift, DIM, CLASSES)
        gradient += tl.dot(by_class * tl.exp(s) * (1.0 + s - y), tile, input_precision="tf32x3")
    return gradient


@triton.jit
def _attack(
    features, directions, targets, alphas, scale_pointer, labels, num_rows, num_classes, padded, steps, slope, shift,
    CRITERION: tl.constexpr, DIM: tl.constexpr, PROXIES: tl.constexpr, CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    places = features + rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    z = tl.load(places, mask=inside[:, None], other=1.0)
    target = tl.load(targets + rows, mask=inside, other=0).to(tl.int32)[:, None]
    alpha = tl.load(alphas + rows, mask=inside, other=0.0)
    scale = tl.load(scale_pointer)

    for step in range(steps + 1):  # the last one is for the labels only
        unit = z / tl.maximum(tl.sqrt(tl.sum(z * z, axis=1)), 1e-12)[:, None]
        classes, sums, y, logits = _scores(
            unit, directions, 0, num_classes, padded, scale, slope, shift, DIM, PROXIES, CLASSES, ROWS
        )
        is_target = classes[None, :] == target
        largest, best = tl.max(logits, axis=1, return_indices=True)
        total = tl.sum(_powers(logits, largest, is_target, CRITERION), axis=1)
        own = tl.sum(tl.where(is_target, logits, 0.0), axis=1)
        for first in range(CLASSES, num_classes, CLASSES):
            others, _sums, _y, more = _scores(
                unit, directions, first, num_classes, padded, scale, slope, shift, DIM, PROXIES, CLASSES, ROWS
            )
            are_target = others[None, :] == target
            peak, place = tl.max(more, axis=1, return_indices=True)
            best = tl.where(peak > largest, first + place, best)
            updated = tl.maximum(largest, peak)
            total = total * tl.exp(largest - updated) + tl.sum(_powers(more, updated, are_target, CRITERION), axis=1)
            own += tl.sum(tl.where(are_target, more, 0.0), axis=1)
            largest = updated
        if step == steps:
            tl.store(labels + rows, best.to(tl.int64), mask=inside)
        else:
            if CRITERION == 1:  # the largest logit stands in the denominator once more, for the target
                total += 1.0
            by_class = _by_class(logits, largest, total, classes, best, is_target, CRITERION)
            gradient = _gradient(
                unit, directions, 0, padded, slope, shift, sums, y, by_class, DIM, PROXIES, CLASSES, ROWS
            )
            for first in range(CLASSES, num_classes, CLASSES):
                others, more_sums, more_y, more = _scores(
                    unit, directions, first, num_classes, padded, scale, slope, shift, DIM, PROXIES, CLASSES, ROWS
                )
                are_target = others[None, :] == target
                by_class = _by_class(more, largest, total, others, best, are_target, CRITERION)
                gradient += _gradient(
                    unit, directions, first, padded, slope, shift, more_sums, more_y, by_class,
                    DIM, PROXIES, CLASSES, ROWS,
                )  # fmt: skip
            gradient *= slope * scale
            if CRITERION == 2:
                active = tl.log(total) + largest > own
                gradient = tl.where(active[:, None], gradient, 0.0)
            gradient -= tl.sum(gradient * unit, axis=1)[:, None] * unit
            z -= alpha[:, None] * (tl.where(gradient > 0, 1.0, 0.0) - tl.where(gradient < 0, 1.0, 0.0))
    tl.store(places, z, mask=inside[:, None])
