"""Balanced target classes: the paper's optimisation problem (eq. 2) in its continuous relaxation, on the device.

The problem, for confidences W and S with rows on the simplex over K classes each, is max <W, S> - sum_j |n_j - u| with
n_j = sum_i S_ij. With prices in [-1, 1] it is a saddle point, min over prices of max over S of <W - prices, S> + u sum
prices, and is solved by the primal-dual hybrid gradient method with reflection, Halpern's averaging towards an anchor
and restarts. It is a fixed sequence of small operators, so nothing waits for the host.
"""

import torch
from torch import Generator, Tensor

RESTART = 50  # iterations after which the anchor moves to where the iteration has come
PRICE_WEIGHT = 3.0  # how much longer the steps of the prices are than those of S; measured, as RESTART
ITERATIONS = 150


def solve(
    confidences: Tensor, classes: Tensor, num_old: int, share: Tensor | float, iterations: int = ITERATIONS
) -> Tensor:
    """Assign each row to its candidate classes so that the classes are used evenly.

    Args:
        confidences: W (N, K) of the candidates.
        classes: The candidates (N, K). A place without a class has the index `num_old` and a very low confidence.
        num_old: The number of old classes.
        share: u, the number of rows meant for each class.
        iterations: Steps of the solver.

    Returns:
        The relaxed assignment S (N, K). Its rows sum to 1.

    >>> solve(torch.tensor([[0.9, 0.8], [0.9, 0.1]]), torch.tensor([[0, 1], [0, 1]]), 2, 1.0).round()
    tensor([[0., 1.],
            [1., 0.]])
    """
    num_rows, num_places = confidences.shape
    flat = classes.flatten()
    gain = (confidences - confidences.amax(dim=1, keepdim=True)) / PRICE_WEIGHT
    choices = gain.new_zeros(num_old + 1).index_add(0, flat, gain.new_ones(num_rows * num_places))
    price_step = PRICE_WEIGHT / choices.clamp(min=1)  # a class that many rows may choose moves with care
    ranks = torch.arange(1, num_places + 1, device=gain.device, dtype=gain.dtype)
    lacking = gain.new_zeros(num_old + 1) - share

    assigned = torch.full_like(gain, 1 / num_places)
    excess = lacking.index_add(0, flat, assigned.flatten())  # n - u
    prices = torch.zeros_like(excess)
    anchors = assigned, excess, prices
    for iteration in range(iterations):
        since_restart = iteration % RESTART
        wanted = torch.add(assigned + gain, prices[classes], alpha=-1 / PRICE_WEIGHT)
        next_assigned = onto_simplex(wanted, ranks)
        next_excess = lacking.index_add(0, flat, next_assigned.flatten())
        reflected = torch.lerp(excess, next_excess, 2.0)
        next_prices = torch.addcmul(prices, price_step, reflected).clamp(-1, 1)
        if since_restart == RESTART - 1 or iteration == iterations - 1:
            anchors = assigned, excess, prices = next_assigned, next_excess, next_prices
            continue
        inward = (since_restart + 1) / (since_restart + 2)
        assigned = torch.lerp(anchors[0], torch.lerp(assigned, next_assigned, 2.0), inward)
        excess = torch.lerp(anchors[1], reflected, inward)
        prices = torch.lerp(anchors[2], torch.lerp(prices, next_prices, 2.0), inward)
    return assigned


def onto_simplex(rows: Tensor, ranks: Tensor) -> Tensor:
    """The nearest points with entries >= 0 that sum to 1; `ranks` are 1, ..., K."""
    highest_first = rows.sort(dim=1, descending=True).values
    threshold = ((highest_first.cumsum(dim=1) - 1) / ranks).amax(dim=1, keepdim=True)
    return (rows - threshold).clamp(min=0)


def draw_places(assigned: Tensor, count: int, generator: Generator | None) -> Tensor:
    """Places (count, N), one drawn from each row of S for each copy; a place with S = 0 is never drawn."""
    shape = (count, *assigned.shape)
    uniform = torch.rand(shape, generator=generator, device=assigned.device, dtype=assigned.dtype)
    return (assigned / -uniform.log()).argmax(dim=2)  # the first of exponential clocks that run at the speeds S
