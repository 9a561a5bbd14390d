"""The whole N-step attack as one Triton kernel, for heads that compare directions.

Each program keeps a few features in registers. In every step it walks over the old classes once and carries the
softmax's normaliser and the gradient along. It walks over them once more at the end, for the pseudo-label.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

CRITERIA = {"cross_entropy": 0, "nca": 1, "nca_exclusive": 2}
SIMILARITIES = {"cosine": (1.0, 0.0), "distance": (2.0, -2.0)}  # slope and shift of the cosine
ROWS, COLUMNS = 16, 128  # of a tile: features, and proxies of old classes


def fused_attack(
    proxies: Tensor, scale: Tensor, similarity: str, criterion: str,
    start: Tensor, targets: Tensor, alpha: Tensor, steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attacked features and the classes the head gives them; see `sphere_attack`."""
    num_classes, num_proxies, dim = proxies.shape
    slope, shift = SIMILARITIES[similarity]
    padded = triton.next_power_of_2(num_proxies)
    directions = F.pad(F.normalize(proxies, dim=2), (0, 0, 0, padded - num_proxies)).contiguous()
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
        steps,
        slope,
        shift,
        CRITERION=CRITERIA[criterion],
        DIM=dim,
        NUM_PROXIES=num_proxies,
        PROXIES=padded,
        CLASSES=max(1, COLUMNS // padded),
        ROWS=ROWS,
        num_warps=8,
    )
    return attacked, labels


@triton.jit
def _scores(
    unit, directions, first, num_classes, scale, slope, shift,
    DIM: tl.constexpr, NUM_PROXIES: tl.constexpr, PROXIES: tl.constexpr, CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of classes: its directions, logits, and dy/ds of each proxy."""
    columns = first * PROXIES + tl.arange(0, CLASSES * PROXIES)
    dims = tl.arange(0, DIM)
    inside = columns[:, None] < num_classes * PROXIES
    tile = tl.load(directions + columns[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    s = slope * tl.dot(unit, tl.trans(tile), input_precision="tf32x3") + shift
    s = tl.reshape(s, [ROWS, CLASSES, PROXIES])
    real = (tl.arange(0, PROXIES) < NUM_PROXIES)[None, None, :]
    powers = tl.where(real, tl.exp(s), 0.0)  # s is from -4 to 1: nothing can overflow
    weights = powers / tl.sum(powers, axis=2)[:, :, None]
    y = tl.sum(weights * s, axis=2)
    inner = weights * (1.0 + s - y[:, :, None])
    classes = first + tl.arange(0, CLASSES)
    logits = tl.where((classes < num_classes)[None, :], scale * y, -1e30)
    return tile, classes, logits, inner


@triton.jit
def _logit_gradient(
    unit, directions, classes, slope, shift, DIM: tl.constexpr, NUM_PROXIES: tl.constexpr, PROXIES: tl.constexpr
):  # fmt: skip
    """dy/dz of one class per row, without the factor slope * scale."""
    proxies = tl.arange(0, PROXIES)
    columns = classes[:, None] * PROXIES + proxies[None, :]
    tile = tl.load(directions + columns[:, :, None] * DIM + tl.arange(0, DIM)[None, None, :])
    s = slope * tl.sum(unit[:, None, :] * tile, axis=2) + shift
    real = (proxies < NUM_PROXIES)[None, :]
    powers = tl.where(real, tl.exp(s), 0.0)
    weights = powers / tl.sum(powers, axis=1)[:, None]
    inner = weights * (1.0 + s - tl.sum(weights * s, axis=1)[:, None])
    return tl.sum(inner[:, :, None] * tile, axis=1)


@triton.jit
def _attack(
    features, directions, targets, alphas, scale_pointer, labels, num_rows, num_classes, steps, slope, shift,
    CRITERION: tl.constexpr, DIM: tl.constexpr, NUM_PROXIES: tl.constexpr, PROXIES: tl.constexpr,
    CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    inside = rows < num_rows
    places = features + rows[:, None] * DIM + dims[None, :]
    z = tl.load(places, mask=inside[:, None], other=1.0)
    target = tl.load(targets + rows, mask=inside, other=0).to(tl.int32)
    alpha = tl.load(alphas + rows, mask=inside, other=0.0)
    scale = tl.load(scale_pointer)

    for _step in range(steps):
        unit = z / tl.maximum(tl.sqrt(tl.sum(z * z, axis=1)), 1e-12)[:, None]
        largest = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)  # of exp(logit - largest), with the target for cross-entropy only
        own = tl.zeros([ROWS], tl.float32)
        best = tl.zeros([ROWS], tl.int32)
        gradient = tl.zeros([ROWS, DIM], tl.float32)  # of the log of that sum, times the sum
        for first in range(0, num_classes, CLASSES):
            tile, classes, logits, inner = _scores(
                unit, directions, first, num_classes, scale, slope, shift, DIM, NUM_PROXIES, PROXIES, CLASSES, ROWS
            )
            is_target = classes[None, :] == target[:, None]
            peak, place = tl.max(logits, axis=1, return_indices=True)
            best = tl.where(peak > largest, first + place, best)
            updated = tl.maximum(largest, peak)
            powers = tl.exp(logits - updated[:, None])
            if CRITERION != 0:
                powers = tl.where(is_target, 0.0, powers)
            by_proxy = tl.reshape(powers[:, :, None] * inner, [ROWS, CLASSES * PROXIES])
            fading = tl.exp(largest - updated)
            total = total * fading + tl.sum(powers, axis=1)
            gradient = gradient * fading[:, None] + tl.dot(by_proxy, tile, input_precision="tf32x3")
            if CRITERION == 2:
                own += tl.sum(tl.where(is_target, logits, 0.0), axis=1)
            largest = updated
        if CRITERION == 1:  # the largest logit stands in the denominator once more, for the target
            total += 1.0
            gradient += _logit_gradient(unit, directions, best, slope, shift, DIM, NUM_PROXIES, PROXIES)
        gradient /= total[:, None]
        gradient -= _logit_gradient(unit, directions, target, slope, shift, DIM, NUM_PROXIES, PROXIES)
        gradient *= slope * scale
        if CRITERION == 2:
            active = tl.log(total) + largest > own
            gradient = tl.where(active[:, None], gradient, 0.0)
        gradient -= tl.sum(gradient * unit, axis=1)[:, None] * unit
        z -= alpha[:, None] * (tl.where(gradient > 0, 1.0, 0.0) - tl.where(gradient < 0, 1.0, 0.0))

    tl.store(places, z, mask=inside[:, None])
    unit = z / tl.maximum(tl.sqrt(tl.sum(z * z, axis=1)), 1e-12)[:, None]
    largest = tl.full([ROWS], -1e30, tl.float32)
    best = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_classes, CLASSES):
        _tile, _classes, logits, _inner = _scores(
            unit, directions, first, num_classes, scale, slope, shift, DIM, NUM_PROXIES, PROXIES, CLASSES, ROWS
        )
        peak, place = tl.max(logits, axis=1, return_indices=True)
        best = tl.where(peak > largest, first + place, best)
        largest = tl.maximum(largest, peak)
    tl.store(labels + rows, best.to(tl.int64), mask=inside)
