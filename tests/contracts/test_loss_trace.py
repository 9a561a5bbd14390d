"""The first 20 losses of stage 1 of every method, with and without augmentation, as stored in traces.json.

Of a method that trains in the first stage only, the trace is 20 weights of its head after stage 1.

A refactoring leaves them alone. A change that is meant to alter them says so in the changelog and writes the file anew:

    PYTHONPATH=tests python tests/contracts/test_loss_trace.py --write

The settings are this file's own. Everything runs in double precision, so that CPUs which differ in the last bits agree.
"""

import contextlib
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ccfa.augmentation import CCFA
from ccfa.data import ImageSet, Stage, Transforms, load_digits_images, split
from ccfa.data.transforms import Draws
from ccfa.learning import Learner
from ccfa.methods import METHODS, Budget, Method, Phase, with_memory
from ccfa.methods.parts import balanced_exemplars
from toys import AUGMENTATIONS, COMBINATIONS, SMALLER, Recorder, has_memory_size, main_phase, with_any

TRACES = Path(__file__).with_name("traces.json")
NUM_STEPS = 20
STAGES = split(10, 4, 3)[:2]
CCFA_FIXED = CCFA(count=2, steps=5, step_size=(2 / 255, 5 / 255))


@dataclass(frozen=True)
class InDouble(Transforms):
    """Transforms whose images come in double precision."""

    def drawn(self, images: Tensor, draws: Draws) -> Tensor:
        return super().drawn(images, draws).double()

    def test(self, images: Tensor) -> Tensor:
        return super().test(images).double()


@dataclass(frozen=True)
class Fixed:
    """A method's phases with this file's settings: two epochs in the first stage, four or more in the next."""

    phases: Callable[[Stage], tuple[Phase, ...]]

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        if not self.phases(stage):
            return ()
        main = main_phase(self.phases(stage))
        later = 10 if main.rows is balanced_exemplars else 4  # fewer rows, as many steps
        epochs = 2 if stage.index == 0 else later
        return (replace(main, epochs=epochs, batch_size=32, lr=0.02, weight_decay=5e-4),)


def built_in_double(build: Callable[[int], nn.Module], size: int) -> nn.Module:
    return build(size).double()


def fixed(name: str, augmentation: str) -> Method:
    method = METHODS[name](backbone="small", transforms=InDouble((0.3,), (0.4,), padding=1), **SMALLER.get(name, {}))
    method = replace(
        method,
        backbone=partial(built_in_double, method.backbone),
        head=partial(built_in_double, method.head),
        phases=Fixed(method.phases),
    )
    if has_memory_size(method):
        method = with_memory(method, Budget(per_class=5))
    return with_any(method, {"ccfa": CCFA_FIXED}.get(augmentation, AUGMENTATIONS[augmentation]))


@cache
def digits() -> ImageSet:
    """The first 60 digits of each class."""
    train, _ = load_digits_images()
    return train.subset(torch.cat([train.rows(label, label + 1)[:60] for label in range(10)]))


@cache
def after_first_stage(name: str, augmentation: str) -> Learner:
    learner = Learner(fixed(name, augmentation), digits())
    learner.learn(STAGES[0])
    return learner


class EnoughError(Exception):
    """All steps of a trace are taken."""


class FirstSteps(Recorder):
    """Ends the training after the steps of a trace."""

    def on_batch(self, progress, losses):
        super().on_batch(progress, losses)
        if len(self.batches) == NUM_STEPS:
            raise EnoughError


def trace(name: str, augmentation: str) -> list[float]:
    """The losses of the first steps of stage 1, or weights if it has no steps."""
    learner = copy.deepcopy(after_first_stage(name, "nothing" if augmentation == "ccfa" else augmentation))
    learner.method, learner.observer = fixed(name, augmentation), FirstSteps()
    with contextlib.suppress(EnoughError):
        learner.learn(STAGES[1])
    numbers = [losses["loss"] for _, losses in learner.observer.batches]
    return [float(f"{number:.9g}") for number in numbers or learner.network.head.weights.flatten()[:NUM_STEPS].tolist()]


def stored() -> dict[str, list[float]]:
    return dict(json.loads(TRACES.read_text(encoding="utf-8")))


def test_ccfa_does_nothing_in_the_first_stage():
    plain, plugged = (
        after_first_stage("podnet", augmentation).network.state_dict() for augmentation in ("nothing", "ccfa")
    )
    assert all(torch.equal(tensor, plugged[name]) for name, tensor in plain.items())


@pytest.mark.parametrize(("name", "augmentation"), COMBINATIONS)
def test_losses_are_those_stored(name, augmentation):
    losses = trace(name, augmentation)
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(stored()[f"{name} {augmentation}"], rel=1e-5, abs=1e-5)


def test_traces_are_of_these_combinations_and_differ():
    assert set(stored()) == {f"{name} {augmentation}" for name, augmentation in COMBINATIONS}
    assert len({tuple(losses) for losses in stored().values()}) == len(stored())


def write() -> None:
    """Store the traces as they are now."""
    traces = {f"{name} {augmentation}": trace(name, augmentation) for name, augmentation in COMBINATIONS}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(losses)}" for key, losses in traces.items())
    TRACES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "the only use is --write"
    write()
