"""Milliseconds per training step, kernels per step, memory and throughput; eager float32 beside it in the same run.

    python benchmarks/step_time.py                    # a GPU: ResNet-32, batch 128, PODNet on random CIFAR-100-like images
    python benchmarks/step_time.py --device cpu       # small, to see that it works

Images are random: a step's time does not depend on what they show. Every variant times the same steps of the same method;
the baseline is eager float32 without compilation or graphs, and a PIL data loader's time per batch is shown for itself.
"""


import numpy as np
from torch import Tensor

from ccfa import ImageSet

NUM_CLASSES, PER_CLASS = 60, 100


def images(size: int) -> ImageSet:
    """Random images of 60 classes."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (NUM_CLASSES * PER_CLASS, 3, size, size), dtype=np.uint8)
    return ImageSet(pixels, np.repeat(np.arange(NUM_CLASSES), PER_CLASS), tuple(map(str, range(NUM_CLASSES))))


class Timer:
    """The time of each epoch's batches, the first epoch apart."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], list[float]] = {}

    def on_batch(self, progress: object, losses: dict[str, Tensor]) -> None:
        """Nothing: looking at a loss would make the device wait."""

    def on_epoch(self, progress: object, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Keep the time per batch."""
        key = (progress.stage.index, progress.phase)
        self.seconds.setdefault(key, []).append(seconds / progress.num_batches)
