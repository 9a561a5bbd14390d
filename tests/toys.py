"""Tiny data and tiny methods, so that a whole run takes a moment."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ccfa.augmentation import CCFA, CutMix, Mixup
from ccfa.augmentation.mixing import PairMixing
from ccfa.data import ImageSet, Stage, Transforms, split
from ccfa.errors import UsageError
from ccfa.learning import Learner, Observer, Progress
from ccfa.learning.loop import optimise
from ccfa.methods import METHODS, Budget, Method, Phase, with_augmentation, with_image_augmentation, with_memory
from ccfa.methods.method import EVERYTHING, NOTHING

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

TOY = Transforms((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), padding=1, flip=True, brightness=0.2)
STAGES = split(6, 2, 2)
SMALLER: dict[str, dict[str, Any]] = {"ranpac": {"projection": 40}, "acil": {"projection": 40}}  # thousands by default
AUGMENTATIONS: dict[str, Any] = {
    "nothing": None,
    "ccfa": CCFA(count=2, steps=3),
    "mixup": Mixup(),
    "cutmix": CutMix(),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy_images(num_classes: int = 6, per_class: int = 12, seed: int = 0) -> ImageSet:
    """Noisy copies of one random 3 x 8 x 8 pattern a class, in shuffled order; `seed` draws the noise."""
    patterns = np.random.default_rng(1993).integers(40, 216, (num_classes, 3, 8, 8))
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(num_classes), per_class))
    images = np.clip(patterns[labels] + random.normal(0, 20, (len(labels), 3, 8, 8)), 0, 255)
    return ImageSet(images.astype(np.uint8), labels, [f"class {label}" for label in range(num_classes)])


class Double(Transforms):
    """Transforms in double precision: there, rounding stays far below any mistake, also where training amplifies it."""

    def train(self, *given: Any) -> Tensor:
        return super().train(*given).double()

    def test(self, images: Tensor) -> Tensor:
        return super().test(images).double()


@dataclass(frozen=True)
class Shortened:
    """A method's phases with at most so many epochs, in small batches."""

    phases: Callable[[Stage], tuple[Phase, ...]]
    epochs: int = 2
    batch_size: int = 16

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        """The shortened phases of that stage."""
        return tuple(
            replace(phase, epochs=min(phase.epochs, self.epochs), batch_size=self.batch_size)
            for phase in self.phases(stage)
        )


@dataclass(frozen=True)
class Only:
    """The phases of these names alone."""

    phases: Callable[[Stage], tuple[Phase, ...]]
    names: tuple[str, ...]

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        """Those phases of that stage."""
        return tuple(phase for phase in self.phases(stage) if phase.name in self.names)


def main_phase(phases: tuple[Phase, ...]) -> Phase:
    """The main phase of a stage, which a warm-up may precede."""
    return next(phase for phase in phases if phase.name == "main")


def tiny(name: str, memory: Budget | None = None, epochs: int = 2, **options: Any) -> Method:
    """The method of that name on the small backbone, in short phases, with 3 exemplars a class."""
    method = METHODS[name](backbone="small", transforms=TOY, **SMALLER.get(name, {}) | options)
    method = replace(method, phases=Shortened(method.phases, epochs))
    return with_memory(method, memory or Budget(per_class=3)) if has_memory_size(method) else method


def has_memory_size(method: Method) -> bool:
    """Whether the method keeps exemplars within a budget that can be chosen."""
    return method.memory not in (NOTHING, EVERYTHING)


def plugged(method: Method, augmentation: str) -> Method:
    """The method with one of AUGMENTATIONS."""
    return with_any(method, AUGMENTATIONS[augmentation])


def with_any(method: Method, augmentation: Any) -> Method:
    """The method with an augmentation of features or of images, or with none."""
    if augmentation is None:
        return method
    plug_in = with_image_augmentation if isinstance(augmentation, PairMixing) else with_augmentation
    return plug_in(method, augmentation)


def _is_refused(name: str, augmentation: str) -> bool:
    try:
        plugged(METHODS[name](), augmentation)
    except UsageError:
        return True
    return False


EVERY_PAIR = [(name, augmentation) for name in METHODS for augmentation in AUGMENTATIONS]
REFUSED = [pair for pair in EVERY_PAIR if _is_refused(*pair)]
COMBINATIONS = [pair for pair in EVERY_PAIR if pair not in REFUSED]


class Recorder(Observer):
    """An observer that keeps everything it is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[Progress, dict[str, float]]] = []
        self.epochs: list[tuple[Progress, dict[str, float], float]] = []

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Keep a step's losses."""
        self.batches.append((progress, {name: float(loss) for name, loss in losses.items()}))

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Keep an epoch's mean losses and its learning rate."""
        self.epochs.append((progress, losses, lr))


class RecordedImages:
    """Stands in for the images of a training set and notes every row read."""

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.shape = images.shape
        self.device = images.device
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.read.update(rows.tolist())
        return self.images[rows]


def rows_of(memory: list[Tensor]) -> list[list[int]]:
    """The stored rows of each class, as plain lists."""
    return [rows.tolist() for rows in memory]


def learned(method: Method, num_stages: int = 3, **options: Any) -> Learner:
    """A learner after so many stages of the toy images."""
    learner = Learner(method, toy_images(), **options)
    for stage in STAGES[:num_stages]:
        learner.learn(stage)
    return learner


def begun(method: Method, stage: Stage, **options: Any) -> Learner:
    """A learner that stands before the phases of `stage`: earlier ones learned, head grown and prepared."""
    learner = learned(method, stage.index, **options)
    learner.begin(stage)
    return learner


def moved_by(learner: Learner, phase_index: int) -> set[str]:
    """What of the network's state a phase of the learner's stage changes."""
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    optimise(learner, learner.method.phases(learner.stage)[phase_index], phase_index)
    return {key for key, value in learner.network.state_dict().items() if not torch.equal(value, before[key])}
