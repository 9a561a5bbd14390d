"""The whole balanced assignment as one Triton kernel; `balanced.solve` is the plain version.

One program holds the rows in registers; prices and column sums pass through a small buffer, where rows can look up
their classes. Columns are summed in any order, so that the last bits may differ from call to call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS, MAX_PLACES, MAX_CLASSES = 256, 16, 4096
NEWTON_STEPS = 8  # of a projection onto the simplex: half a million random rows of up to 16 places needed at most 5


def supports(confidences: Tensor, num_old: int) -> bool:
    """Whether one program can hold a problem of that size."""
    num_rows, num_places = confidences.shape
    return num_rows <= MAX_ROWS and num_places <= MAX_PLACES and num_old < MAX_CLASSES


def fused_solve(
    confidences: Tensor,
    classes: Tensor,
    num_old: int,
    share: Tensor,
    iterations: int,
    restart: int,
    price_weight: float,
) -> Tensor:
    """The relaxed assignment S (N, K)."""
    num_rows, num_places = confidences.shape
    assigned = torch.empty_like(confidences)
    slots = triton.next_power_of_2(num_old + 1)
    sums = torch.zeros(3, slots, device=confidences.device)  # two column sums in turn, and the prices
    _solve[(1,)](
        confidences.contiguous(),
        classes.contiguous(),
        share,
        sums,
        assigned,
        num_rows,
        num_old,
        iterations,
        restart,
        price_weight,
        NUM_PLACES=num_places,
        ROWS=triton.next_power_of_2(num_rows),
        PLACES=triton.next_power_of_2(num_places),
        SLOTS=slots,
        NEWTON_STEPS=NEWTON_STEPS,
        num_warps=8,
    )
    return assigned


@triton.jit
def _column_sums(sums, turn, places, values, present, slots, SLOTS: tl.constexpr):
    """Add values up by class in the buffer whose turn it is, and clear the other one."""
    tl.atomic_add(sums + turn * SLOTS + places, values, mask=present, sem="relaxed")
    tl.debug_barrier()
    result = tl.load(sums + turn * SLOTS + slots, volatile=True)
    tl.store(sums + (1 - turn) * SLOTS + slots, tl.zeros([SLOTS], tl.float32))
    tl.debug_barrier()
    return result


@triton.jit
def _solve(
    confidences, classes, share_pointer, sums, output, num_rows, num_old, iterations, restart, price_weight,
    NUM_PLACES: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, SLOTS: tl.constexpr,
    NEWTON_STEPS: tl.constexpr,
):  # fmt: skip
    rows, columns, slots = tl.arange(0, ROWS), tl.arange(0, PLACES), tl.arange(0, SLOTS)
    present = (rows < num_rows)[:, None] & (columns < NUM_PLACES)[None, :]
    offsets = rows[:, None] * NUM_PLACES + columns[None, :]
    gain = tl.load(confidences + offsets, mask=present, other=-1e30)
    gain = (gain - tl.max(gain, axis=1)[:, None]) / price_weight
    places = tl.load(classes + offsets, mask=present, other=0).to(tl.int32)
    share = tl.load(share_pointer)

    choices = _column_sums(sums, 0, places, tl.where(present, 1.0, 0.0), present, slots, SLOTS)
    price_step = price_weight / tl.maximum(choices, 1.0)
    assigned = tl.where(present, 1.0 / NUM_PLACES, 0.0)
    excess = _column_sums(sums, 1, places, assigned, present, slots, SLOTS) - share
    prices = tl.zeros([SLOTS], tl.float32)
    anchor_assigned, anchor_excess, anchor_prices = assigned, excess, prices
    turn = 0
    for iteration in range(iterations):
        since_restart = iteration % restart
        tl.store(sums + 2 * SLOTS + slots, prices)
        tl.debug_barrier()
        row_prices = tl.load(sums + 2 * SLOTS + places, mask=present, other=0.0, volatile=True)
        wanted = tl.where(present, assigned + gain - row_prices / price_weight, -1e30)
        threshold = tl.max(wanted, axis=1) - 1.0  # Newton's steps up to where what lies above sums to 1
        for _newton in range(NEWTON_STEPS):
            above = wanted > threshold[:, None]
            surplus = tl.sum(tl.where(above, wanted - threshold[:, None], 0.0), axis=1) - 1.0
            threshold += surplus / tl.maximum(tl.sum(above.to(tl.float32), axis=1), 1.0)
        next_assigned = tl.where(present, tl.maximum(wanted - threshold[:, None], 0.0), 0.0)
        next_excess = _column_sums(sums, turn, places, next_assigned, present, slots, SLOTS) - share
        turn = 1 - turn
        reflected = 2.0 * next_excess - excess
        next_prices = tl.minimum(tl.maximum(prices + price_step * reflected, -1.0), 1.0)
        last = (since_restart == restart - 1) | (iteration == iterations - 1)
        inward = (since_restart + 1.0) / (since_restart + 2.0)
        assigned = tl.where(
            last, next_assigned, anchor_assigned + inward * (2.0 * next_assigned - assigned - anchor_assigned)
        )
        excess = tl.where(last, next_excess, anchor_excess + inward * (reflected - anchor_excess))
        prices = tl.where(last, next_prices, anchor_prices + inward * (2.0 * next_prices - prices - anchor_prices))
        anchor_assigned = tl.where(last, next_assigned, anchor_assigned)
        anchor_excess = tl.where(last, next_excess, anchor_excess)
        anchor_prices = tl.where(last, next_prices, anchor_prices)
    tl.store(output + offsets, assigned, mask=present)
