"""Balanced targets: how far from the exact optimum, and how long a call takes.

    python benchmarks/targets.py                  # on the GPU where there is one, otherwise on the CPU
    python benchmarks/targets.py --device cpu --num-old 50 90 --k 1 3 --batches 3

A batch is 128 features near the weights of a random cosine head with `num_old` old and 10 new classes. The gap is the
optimum of the relaxed problem (eq. 2, by HiGHS) minus the objective reached, divided by the number of rows. For k = 1
there is nothing to optimise: the rule is most-confident.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array, eye_array, hstack
from torch import Tensor

from ccfa.augmentation.targets import Balanced, TargetRule, most_confident

NUM_ROWS, NUM_NEW, DIM, SCALE = 128, 10, 64, 12.0


def batch(num_old: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits (N, old + new) of the random head and labels (N, 1)."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.nn.functional.normalize(torch.randn(num_old + NUM_NEW, DIM, generator=generator))
    labels = torch.randint(0, num_old + NUM_NEW, (NUM_ROWS,), generator=generator)
    features = weights[labels] + 0.12 * torch.randn(NUM_ROWS, DIM, generator=generator)
    logits = SCALE * torch.nn.functional.normalize(features) @ weights.T
    return logits.to(device), labels[:, None].to(device)


def optimum(confidences: np.ndarray, classes: np.ndarray, num_old: int) -> float:
    """The relaxed eq. 2 by HiGHS, with sum_j |n_j - u| written as 2 sum_j max(n_j - u, 0)."""
    num_rows, k = confidences.shape
    places = np.arange(num_rows * k)
    per_row = coo_array((np.ones(num_rows * k), (places // k, places)), shape=(num_rows, num_rows * k))
    per_class = coo_array((np.ones(num_rows * k), (classes.ravel(), places)), shape=(num_old, num_rows * k))
    solution = linprog(
        np.concatenate([-confidences.ravel(), np.full(num_old, 2.0)]),
        A_ub=hstack([per_class, -eye_array(num_old)]),
        b_ub=np.full(num_old, num_rows / num_old),
        A_eq=hstack([per_row, coo_array((num_rows, num_old))]),
        b_eq=np.ones(num_rows),
        method="highs",
    )
    return float(-solution.fun)


def gap(rule: Balanced, logits: Tensor, labels: Tensor, num_old: int) -> tuple[float, float]:
    """What the rule's assignment lacks to the optimum for each row, and the milliseconds HiGHS took."""
    assigned, places, _ = (part.cpu() for part in rule.assignment(logits, labels, num_old))
    masses, classes = assigned.double().numpy(), places.numpy()
    confidences = logits.softmax(dim=1).cpu().double().gather(1, places).numpy()
    sums = np.bincount(classes.ravel(), masses.ravel(), num_old)
    reached = (confidences * masses).sum() - 2 * np.maximum(sums - NUM_ROWS / num_old, 0).sum()
    start = time.perf_counter()
    best = optimum(confidences, classes, num_old)
    return (best - reached) / NUM_ROWS, 1e3 * (time.perf_counter() - start)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[1:]))


def captured(call: Callable[[], object], generator: torch.Generator) -> Callable[[], None]:
    """The call as one CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(rule: TargetRule, num_old: int, arguments: argparse.Namespace) -> str:
    """The line of one rule: gaps and times."""
    device = torch.device(arguments.device)
    generator = torch.Generator(device).manual_seed(0)
    logits, labels = batch(num_old, 0, device)

    def call() -> object:
        return rule(logits, labels, num_old, 5, generator)

    gaps, exact, graph = f"{'-':>9} {'-':>9}", f"{'-':>9}", f"{'-':>9}"
    if isinstance(rule, Balanced) and rule.k > 1:
        measured = [gap(rule, *batch(num_old, seed, device), num_old) for seed in range(arguments.batches)]
        lacking, times = np.array(measured).T
        gaps, exact = f"{lacking.mean():9.5f} {lacking.max():9.5f}", f"{np.median(times):9.2f}"
    eager = milliseconds(call, device, arguments.repeats)
    if device.type == "cuda":
        graph = f"{milliseconds(captured(call, generator), device, arguments.repeats):9.2f}"
    return f"{gaps} {exact} {eager:9.2f} {graph}"


def main() -> None:
    """Parse, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-old", type=int, nargs="+", default=[50, 90, 950])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--batches", type=int, default=10, help="batches the gap is measured on")
    parser.add_argument("--repeats", type=int, default=10, help="calls a time is the median of")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU, 1 thread"
    print(f"{NUM_ROWS} rows, 5 copies, {arguments.batches} batches; torch {torch.__version__}, {device}")
    print(f"{'num_old':>7} {'rule':<15} {'gap mean':>9} {'worst':>9} {'HiGHS ms':>9} {'eager ms':>9} {'graph ms':>9}")
    for num_old in arguments.num_old:
        print(f"{num_old:7} {'most-confident':<15} {measure(most_confident, num_old, arguments)}")
        for k in arguments.k:
            print(f"{num_old:7} {f'balanced-{k}':<15} {measure(Balanced(k), num_old, arguments)}")


if __name__ == "__main__":
    main()
