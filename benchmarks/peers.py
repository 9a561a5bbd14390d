"""Seconds of PODNet in PyCIL and in this package, measured in one run: stage 0 of CIFAR-100, 50 classes, ResNet-32.

    python benchmarks/peers.py --pycil CHECKOUT --data-dir DIR      # on a GPU; without a folder, with random images
    python benchmarks/peers.py --pycil CHECKOUT --device cpu --images-per-class 20 --own-epochs 1 3   # to try it

CHECKOUT is a folder of https://github.com/LAMDA-CL/PyCIL, which needs torchvision and SciPy. It is not changed: epochs,
images and workers are set after the import. Nothing is downloaded. The time does not depend on what images show.

Each library trains with two numbers of epochs. Their difference gives the cost of an epoch. The rest is fixed: herding,
and evaluation by logits and by the nearest mean. PyCIL also evaluates after every epoch, which counts as part of its
epoch. Each run of PyCIL has its own process. The runs of this package share one: a first run, which also compiles, and
the two that give the cost of an epoch. Both use their defaults: PyCIL float32 (convolutions in TF32, as by PyTorch's
default), this package what the first line says. Imports, reading data and starting the GPU are not counted.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step_time import random_images

from ccfa import METHODS, ImageSet, Learner, split
from ccfa.data.cifar100 import load_cifar100
from ccfa.learning.acceleration import Acceleration, describe_device, pick_device

FULL_EPOCHS = 160  # of a stage, in both libraries
INITIAL, INCREMENT, EXEMPLARS = 50, 10, 20  # classes at first and in each later stage; exemplars per class


@dataclass(frozen=True)
class Setting:
    """What both libraries are given."""

    data_dir: Path | None
    images_per_class: int
    device: str
    num_stages: int

    def images(self) -> tuple[ImageSet, ImageSet]:
        """The training and the test images."""
        if self.data_dir is not None:
            return load_cifar100(self.data_dir, download=False)
        return random_images(100, self.images_per_class, 32), random_images(100, min(self.images_per_class, 100), 32)


def cost(seconds: list[float], epochs: list[int], first: float) -> list[float]:
    """The seconds per epoch, beside the epochs, and of a full stage. `first` is a run of epochs[0] epochs."""
    epoch = (seconds[1] - seconds[0]) / (epochs[1] - epochs[0])
    fixed = first - epochs[0] * epoch
    return [epoch, fixed, fixed + FULL_EPOCHS * epoch]


def apart(function: Callable[..., list[list[float]]], *arguments: object) -> list[list[float]]:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def start(device: str) -> None:
    """Start the device and load its libraries."""
    features = torch.nn.Conv2d(3, 16, 3, device=device)(torch.rand(128, 3, 32, 32, device=device)).flatten(1)
    (features @ features.T).sum().backward()


def time_pycil(setting: Setting, checkout: Path, workers: int | None, epochs: int) -> list[list[float]]:
    """The seconds of each stage, of an evaluation after an epoch in it, and of its epochs after the first."""
    multiprocessing.set_start_method(None, force=True)  # a spawned process would spawn data loader workers, too: slow
    sys.path.insert(0, str(checkout.absolute()))
    podnet, data, manager = map(importlib.import_module, ("models.podnet", "utils.data", "utils.data_manager"))
    workers = podnet.num_workers if workers is None else workers
    for name, value in (("epochs", epochs), ("ft_epochs", 1), ("num_workers", workers)):
        getattr(podnet, name)  # fails if this version of PyCIL has no such constant
        setattr(podnet, name, value)
    images = [(part.images.permute(0, 2, 3, 1).numpy().copy(), part.labels.numpy()) for part in setting.images()]
    evaluations: list[tuple[float, float]] = []  # from when to when

    class Measured(podnet.PODNet):  # type: ignore[misc,name-defined]
        def _compute_accuracy(self, *arguments: Any) -> Any:
            began = time.perf_counter()
            accuracy = super()._compute_accuracy(*arguments)
            evaluations.append((began, time.perf_counter()))
            return accuracy

    def take_images(dataset: Any) -> None:
        (dataset.train_data, dataset.train_targets), (dataset.test_data, dataset.test_targets) = images

    data.iCIFAR100.download_data = take_images
    config = json.loads((checkout / "exps/podnet.json").read_text())
    config |= {"fixed_memory": True, "memory_per_class": EXEMPLARS, "device": [torch.device(setting.device)]}
    stages = manager.DataManager("cifar100", False, 0, INITIAL, INCREMENT)
    torch.backends.cudnn.deterministic = True  # from here on as in PyCIL's trainer.py
    start(setting.device)
    found = []
    began = time.perf_counter()
    model = Measured(config)
    for _ in range(setting.num_stages):
        model.incremental_train(stages)
        model.eval_task()
        model.after_task()
        evaluation = sum(end - begin for begin, end in evaluations) / len(evaluations)
        epoch = (evaluations[epochs - 1][1] - evaluations[0][1]) / max(epochs - 1, 1)
        found.append([time.perf_counter() - began, evaluation, epoch])
        evaluations.clear()
        began = time.perf_counter()
    return found


def time_ccfa(setting: Setting, runs: list[int]) -> list[list[float]]:
    """The seconds of each stage of several runs of so many epochs, one after the other in this process."""
    train, test = setting.images()
    start(setting.device)
    found: list[list[float]] = []
    for epochs in runs:
        found.append([])
        began = time.perf_counter()
        podnet = METHODS["podnet"](epochs=epochs, balanced_epochs=1, memory=EXEMPLARS)
        learner = Learner(podnet, train, device=setting.device)
        for stage in split(train.num_classes, INITIAL, INCREMENT)[: setting.num_stages]:
            learner.learn(stage)
            seen = test.subset(test.rows(0, stage.num_seen)).to(learner.device)
            learner.predict_by_logits(seen.images).cpu()
            learner.predict_by_nearest_mean(seen.images).cpu()
            found[-1].append(time.perf_counter() - began)
            began = time.perf_counter()
    return found


def print_row(name: str, epochs: list[int], seconds: list[float], found: list[float]) -> None:
    """One line of the table."""
    numbers, times = ", ".join(map(str, epochs)), ", ".join(f"{value:.1f}" for value in seconds)
    print(f"{name:38}{numbers:>8}{times:>14}{found[0]:>12.3f}{found[1]:>8.1f}{found[2]:>13.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pycil", type=Path, required=True, help="a checkout of PyCIL")
    parser.add_argument("--data-dir", type=Path, default=None, help="the folder with cifar-100-binary")
    parser.add_argument("--epochs", type=int, nargs=2, default=[1, 3], help="epochs of PyCIL's two runs")
    parser.add_argument("--own-epochs", type=int, nargs=2, default=[5, 35], help="epochs of this package's two runs")
    parser.add_argument("--later", action="store_true", help="also the first later stage, with one balanced epoch")
    parser.add_argument("--workers", type=int, default=None, help="PyCIL's data loader workers, if not its own number")
    parser.add_argument("--images-per-class", type=int, default=500, help=f"random ones, at least {EXEMPLARS}")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    epochs, own_epochs = arguments.epochs, arguments.own_epochs
    if any(not 0 < few < many for few, many in (epochs, own_epochs)):
        parser.error("Numbers of epochs must be positive, and the second one larger than the first.")
    device = pick_device(arguments.device)
    setting = Setting(arguments.data_dir, arguments.images_per_class, str(device), 1 + arguments.later)
    print(f"{describe_device(device)}, torch {torch.__version__}, ccfa: {Acceleration.for_device(device)}", flush=True)
    pycil = [apart(time_pycil, setting, arguments.pycil, arguments.workers, number) for number in epochs]
    own = apart(time_ccfa, setting, [own_epochs[0], *own_epochs])
    for stage in range(setting.num_stages):
        theirs, (first, *ours) = [run[stage][0] for run in pycil], [run[stage] for run in own]
        peer = cost(theirs, epochs, theirs[0])
        print(f"\nstage {stage}, {INCREMENT if stage else INITIAL} new classes: seconds (the last column: calculated)")
        print(f"{'':38}{'epochs':>8}{'measured':>14}{'per epoch':>12}{'fixed':>8}{f'{FULL_EPOCHS} epochs':>13}")
        print_row("PyCIL", epochs, theirs, peer)
        print(f"{'  epochs after the first, by the clock':60}{pycil[1][stage][2]:>12.3f}")
        print(f"{'  evaluation after each epoch':60}{pycil[1][stage][1]:>12.3f}")
        for name, seconds in {"ccfa, first run of a process": [first], "ccfa, further runs": ours}.items():
            mine = cost(ours, own_epochs, seconds[0])
            print_row(name, own_epochs[: len(seconds)], seconds, mine)
            print_row("  PyCIL / ccfa", [], [], [their / our for their, our in zip(peer, mine, strict=True)])
        if min(peer[0], mine[0]) <= 0:
            print("A run with more epochs was not slower: use more epochs, or a machine that does nothing else.")


if __name__ == "__main__":
    main()
