"""The one loop: a phase as epochs of batches of steps, and the only call of `backward`."""

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from torch import Generator, Tensor, nn, optim

from ccfa.errors import DivergedError
from ccfa.learning.acceleration import StepFunction, memory_errors_explained
from ccfa.learning.batches import batches, seed_of
from ccfa.learning.progress import Progress
from ccfa.methods import Phase
from ccfa.models import Network

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner


def set_learning_rate(optimiser: optim.Optimizer, phase: Phase, epoch: int) -> float:
    """Put the epoch's learning rate into the optimiser."""
    lr = phase.lr * phase.schedule(epoch, phase.epochs)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads this tensor
        else:
            group["lr"] = lr
    return lr


def descend(
    loss: Tensor,
    optimiser: optim.Optimizer,
    parameters: list[nn.Parameter],
    clip_value: float | None,
    clip_norm: float | None = None,
) -> None:
    """Move the phase's parameters one step down the loss."""
    optimiser.zero_grad()
    loss.backward(inputs=parameters)
    if clip_value is not None:
        nn.utils.clip_grad_value_(parameters, clip_value)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimiser.step()


class PreparedPhase(NamedTuple):
    """A phase ready to run: its rows, and a step that may be run on any batch of them."""

    rows: Tensor
    batch_size: int
    optimiser: optim.Optimizer
    draws: Generator  # of transforms and augmentations
    step: StepFunction


def prepare_phase(learner: "Learner", phase: Phase, *index: int) -> PreparedPhase:
    """Choose rows and parameters, and make the step as fast as the learner's acceleration can."""
    rows = phase.rows(learner)
    parameters = [p for p in phase.parameters(learner.network) if p.numel()]
    optimiser = phase.optimiser(parameters, phase.lr, phase.weight_decay)
    draws = learner.generator("augmentation", *index)
    size = min(phase.batch_size, len(rows))

    def step(batch: Tensor) -> dict[str, Tensor]:
        losses = learner.losses(batch, phase, draws)
        descend(losses["loss"], optimiser, parameters, phase.clip_value, phase.clip_norm)
        return {name: loss.detach() for name, loss in losses.items()}

    set_modes(learner.network, phase)
    with memory_errors_explained(size):
        fast_step = learner.acceleration.prepare(step, rows[:size], learner.network, optimiser, draws)
    return PreparedPhase(rows, size, optimiser, draws, fast_step)


def optimise(learner: "Learner", phase: Phase, *index: int) -> None:
    """Run one phase; `index` says which one it is, for its random numbers."""
    rows, size, optimiser, draws, step = prepare_phase(learner, phase, *index)
    for epoch in range(phase.epochs):
        began = time.monotonic()
        lr = set_learning_rate(optimiser, phase, epoch)
        draws.manual_seed(seed_of(learner.batch_seed, learner.stage.index, "augmentation", *index, epoch))
        order = batches(rows, size, learner.generator("batches", *index, epoch))
        totals: dict[str, Tensor] = {}
        for number, batch in enumerate(order):
            with memory_errors_explained(size):
                losses = step(batch)
            totals = {name: totals.get(name, 0) + loss for name, loss in losses.items()}
            progress = Progress(learner.stage, phase.name, epoch, phase.epochs, number, len(order), size)
            learner.observer.on_batch(progress, losses)
        means = {name: float(total) / len(order) for name, total in totals.items()}
        if not math.isfinite(means["loss"]):
            raise DivergedError(
                f"The loss became {means['loss']} in stage {learner.stage.index}, phase {phase.name}, "
                f"epoch {epoch}, at a learning rate of {lr:.3g}. Try a smaller one."
            )
        learner.observer.on_epoch(progress, means, lr, time.monotonic() - began)
        if phase.after_epoch:
            optimise(learner, phase.after_epoch, *index, epoch)
            set_modes(learner.network, phase)


def set_modes(network: Network, phase: Phase) -> None:
    """Training mode, with batch norm as the phase wants it."""
    network.train()
    network.backbone.train(phase.train_batch_norm)
