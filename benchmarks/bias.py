"""Whether rounding pulls training to one side: single steps by our kernels and by torch in bfloat16, against float32.

    python benchmarks/bias.py --first FILE --data-dir DIR                  # on a GPU
    PYTHONPATH=tests python benchmarks/bias.py --first FILE --data-dir DIR --device cpu --batches 16   # 30 minutes

FILE is a first stage of PODNet on CIFAR-100: `ccfa sweep podnet --data cifar100 --scenario B50-inc10 --first-stages
FOLDER` stores it in FOLDER. --order is its class order. Each step is the first of the second stage, from the same
weights on another batch. An error is the difference to float32 of what a step changes, as a share of that change. Its
part that all steps have in common is the bias: where it is not larger than what errors without a bias leave in the
mean, it is 0. Without a GPU, the kernels are emulated by `tests/cuda_on_cpu.py`.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from ccfa.experiments.experiment import resolve
from ccfa.files import read_tensors
from ccfa.kernels import kernels_left_out
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration, describe_device, pick_device
from ccfa.learning.loop import prepare_phase
from ccfa.learning.state import take_over
from ccfa.settings import Experiment

KINDS = {"kernels": Acceleration("bf16", compile=True), "torch": Acceleration("bf16"), "float32": Acceleration()}
PARTS = {"convolutions": "conv", "batch norms": "norm", "running moments": "running", "head": "head"}
Step = tuple[dict[str, Tensor], dict[str, float]]  # what it changed, its losses


def begun(experiment: Experiment, data_dir: Path | None, first: Path, device: torch.device) -> Learner:
    """A learner at the beginning of the second stage."""
    resolved = resolve(experiment, data_dir)
    learner = Learner(resolved.method, resolved.train, device=device, acceleration=Acceleration())
    learner.begin(resolved.stages[0])
    take_over(learner.network, read_tensors(first)[0])
    accuracy = learner.evaluate(resolved.test.subset(resolved.test.rows(0, resolved.stages[0].num_seen)))
    print(f"accuracy of the first stage: {accuracy}", flush=True)
    learner.conclude()
    learner.begin(resolved.stages[1])
    return learner


def steps(learner: Learner, kind: str, num_batches: int) -> list[Step]:
    """Single steps from the same weights, each on another batch."""
    learner.acceleration = KINDS[kind]
    learner.acceleration.set_rounding(learner.device)
    work = prepare_phase(learner, learner.method.phases(learner.stage)[0], 0)
    start = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    generator, found = torch.Generator().manual_seed(0), []
    for number in range(num_batches):
        rows = work.rows[torch.randperm(len(work.rows), generator=generator)[: work.batch_size].to(work.rows.device)]
        learner.network.load_state_dict(start)
        for momenta in work.optimiser.state.values():
            momenta["momentum_buffer"].zero_()
        work.draws.manual_seed(number)
        losses = {name: float(loss) for name, loss in work.step(rows).items()}
        changes = {name: tensor - start[name] for name, tensor in learner.network.state_dict().items()}
        found.append(({name: change.double().cpu() for name, change in changes.items()}, losses))
    learner.network.load_state_dict(start)
    return found


def lengths(found: list[Step], wanted: list[Step], names: list[str]) -> tuple[float, float, float]:
    """The error of a step, that of the mean of all steps, and what the latter would be without a bias."""
    one, mean, unbiased, of_changes, of_means = (0.0,) * 5
    for name in names:
        errors = torch.stack([own[name] - true[name] for (own, _), (true, _) in zip(found, wanted, strict=True)])
        changes = torch.stack([true[name] for true, _ in wanted])
        one, of_changes = one + errors.square().sum().item(), of_changes + changes.square().sum().item()
        mean, of_means = mean + errors.mean(0).square().sum().item(), of_means + changes.mean(0).square().sum().item()
        unbiased += errors.var(0).sum().item() / len(errors)
    return (one / of_changes) ** 0.5, (mean / of_means) ** 0.5, (unbiased / of_means) ** 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, required=True, help="the stored first stage")
    parser.add_argument("--order", default="podnet-0", help="its class order")
    parser.add_argument("--data-dir", type=Path, default=None, help="the folder with cifar-100-binary")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    if device.type == "cpu":
        import pytest

        import cuda_on_cpu

        cuda_on_cpu.pretend(pytest.MonkeyPatch())
    experiment = Experiment("podnet", data="cifar100", scenario="B50-inc10", order=arguments.order, seed=1)
    print(f"{describe_device(device)}, torch {torch.__version__}, {arguments.batches} batches")
    with torch.compiler.set_stance("force_eager"):
        with kernels_left_out():
            learner = begun(experiment, arguments.data_dir, arguments.first, device)
            usual, wanted = (steps(learner, kind, arguments.batches) for kind in ("torch", "float32"))
        found = {"kernels": steps(learner, "kernels", arguments.batches), "torch": usual}
    print(f"{'':18}{'':10}{'error of a step':>18}{'of the mean':>14}{'without a bias':>17}")
    for title, part in PARTS.items():
        names = [name for name in wanted[0][0] if part in name and ("running" in name) == (part == "running")]
        for kind, own in found.items():
            numbers = "".join(
                f"{value:>{width}.2%}" for value, width in zip(lengths(own, wanted, names), (18, 14, 17), strict=True)
            )
            print(f"{title:18}{kind:10}{numbers}")
    for name in wanted[0][1]:
        mean = sum(losses[name] for _, losses in wanted) / len(wanted)
        more = {kind: sum(losses[name] for _, losses in own) / len(own) - mean for kind, own in found.items()}
        print(f"loss {name}: {mean:.4f}, " + ", ".join(f"{kind} {value:+.4f}" for kind, value in more.items()))


if __name__ == "__main__":
    main()
