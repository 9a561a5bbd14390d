"""The one loop: a phase as epochs of batches of steps, and the only call of `backward`."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn, optim

from ccfa.errors import DivergedError, ModelError
from ccfa.kernels.sgd import sgd_step
from ccfa.learning.acceleration import memory_errors_explained
from ccfa.learning.processes import ALONE, Processes
from ccfa.learning.progress import CAPTURING, COMPILING, PREPARING, Progress
from ccfa.learning.state import PhaseAtWork, StoredPhase
from ccfa.learning.step import head_losses, step_losses
from ccfa.methods import Phase
from ccfa.models import Network

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner


def optimise(learner: "Learner", phase: Phase, *index: int) -> None:
    """Run one phase, or the rest of it if the learner was restored inside it.

    `index` is the number of the phase in its stage; a phase after an epoch has the number of that epoch as well.
    """
    stored = learner.interrupted.pop(0) if learner.interrupted else None
    if stored and stored.index != index:
        raise ModelError(f"Phase {stored.index} of stage {learner.stage.index} was stored, but {index} comes next.")
    work = prepare_phase(learner, phase, *index, stored=stored)
    learner.at_work.append(work)
    try:
        while work.epoch < phase.epochs:
            if not learner.interrupted:  # else this epoch is over, and the phase after it was interrupted
                run_epoch(learner, phase, work)
            if phase.after_epoch:
                optimise(learner, phase.after_epoch, *index, work.epoch)
                set_modes(learner.network, phase)
            work.epoch, work.batch, work.seconds, work.totals = work.epoch + 1, 0, 0.0, {}
    finally:
        learner.at_work.pop()


def run_epoch(learner: "Learner", phase: Phase, work: PhaseAtWork) -> None:
    """Run the batches of an epoch that are left."""
    began, first, size = time.monotonic() - work.seconds, work.batch, work.batch_size
    lr = set_learning_rate(work.optimiser, phase, work.epoch)
    if first == 0:
        seed = seed_of(learner.batch_seed, learner.stage.index, "augmentation", *work.index, work.epoch)
        work.draws.manual_seed(seed)
    order = batches(work.rows, size, learner.generator("batches", *work.index, work.epoch))
    begun = min(first, len(order) - 1)  # all batches may be done that come before the end of the epoch
    progress = Progress(learner.stage, phase.name, work.epoch, phase.epochs, begun, len(order), size)
    for batch in inputs(learner, phase, order[first:]):
        with memory_errors_explained(size):
            losses = work.step(*batch)
        work.totals = {name: work.totals.get(name, 0) + loss for name, loss in losses.items()}
        progress = progress._replace(batch=work.batch)
        work.batch += 1
        if work.batch == len(order):
            float(work.totals["loss"])  # waits for a GPU, so that the epoch's time is right in a checkpoint, too
        work.seconds = (now := time.monotonic()) - began
        learner.observer.on_batch(progress, losses)
        began += time.monotonic() - now  # a checkpoint, say, is not training
    means = {name: float(total) / len(order) for name, total in work.totals.items()}
    if not math.isfinite(means["loss"]):
        raise DivergedError(
            f"The loss became {means['loss']} in {progress.place}, at a learning rate of {lr:.3g}. Try a smaller one.",
            {"stage": learner.stage.index, "phase": phase.name, "epoch": work.epoch, "lr": lr, "losses": means},
        )
    learner.observer.on_epoch(progress, means, lr, work.seconds)


def prepare_phase(learner: "Learner", phase: Phase, *index: int, stored: StoredPhase | None = None) -> PhaseAtWork:
    """Choose rows and parameters, and make the step as fast as the learner's acceleration can."""
    learner.tell(PREPARING)
    if not stored:
        phase.prepare(learner)
    samples = phase.samples(learner) if phase.samples else None
    if stored:
        rows = stored.tensors["rows"].to(learner.device)
    else:
        rows = phase.rows(learner) if samples is None else torch.arange(len(samples.labels), device=learner.device)
    parameters = [p for p in phase.parameters(learner.network) if p.numel()]
    optimiser = phase.optimiser(parameters, phase.lr, phase.weight_decay)
    draws = learner.generator("augmentation", *index)
    size = min(phase.batch_size, len(rows))
    acceleration = learner.acceleration
    if phase.use_terms and learner.previous and not all(term.can_be_captured for term in learner.terms):
        acceleration = replace(acceleration, graph=False)

    def step(rows: Tensor, images: Tensor | None = None) -> dict[str, Tensor]:
        if samples is None:
            parts = step_losses(learner, rows, phase, draws, images)
        else:
            parts = head_losses(learner, samples.picked(rows), phase, draws)
        values = learner.acceleration.aside("values", learner.device, parts.read)

        def late_gradients() -> dict[nn.Parameter, Tensor]:
            values()  # no branch reads the parameters any more
            return parts.late().gradients if parts.late else {}

        limits = phase.clip_value, phase.clip_norm
        descend(parts.roots(), optimiser, parameters, *limits, learner.processes, late_gradients)
        learner.network.head.constrain()
        return {name: loss.detach() for name, loss in values.value.items()}

    set_modes(learner.network, phase)
    kind = phase.name, learner.previous is None
    if acceleration.compile and kind not in learner.compiled:
        learner.tell(COMPILING)
        learner.compiled.add(kind)
    elif acceleration.graph:
        learner.tell(CAPTURING)
    with memory_errors_explained(size):
        example = next(iter(inputs(learner, phase, rows[None, :size])))
        fast_step = acceleration.prepare(step, example, learner.network, optimiser, draws)
    work = PhaseAtWork(index, rows, size, optimiser, draws, fast_step)
    if stored:
        work.take_up(stored)
    return work


def inputs(learner: "Learner", phase: Phase, order: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """What the step takes of each batch of rows; samples are in memory, so their rows suffice."""
    return zip(order, strict=True) if phase.samples else learner.train.batches(order)


def descend(
    losses: Tensor | Sequence[Tensor],
    optimiser: optim.Optimizer,
    parameters: list[nn.Parameter],
    clip_value: float | None = None,
    clip_norm: float | None = None,
    processes: Processes = ALONE,
    late_gradients: Callable[[], Mapping[nn.Parameter, Tensor]] = dict,
) -> None:
    """Move the phase's parameters one step down the sum of the losses."""
    optimiser.zero_grad()
    torch.autograd.backward(losses, inputs=parameters)
    added = late_gradients()
    for parameter in parameters:
        if parameter in added:
            gradient, more = parameter.grad, added[parameter]
            parameter.grad = more if gradient is None else gradient.add_(more)
    processes.average_gradients(parameters)
    if clip_norm is None and sgd_step(optimiser, clip_value):
        return
    if clip_value is not None:
        nn.utils.clip_grad_value_(parameters, clip_value)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimiser.step()


def set_learning_rate(optimiser: optim.Optimizer, phase: Phase, epoch: int) -> float:
    """Put the epoch's learning rate into the optimiser."""
    lr = phase.lr * phase.schedule(epoch, phase.epochs)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads this tensor
        else:
            group["lr"] = lr
    return lr


def set_modes(network: Network, phase: Phase) -> None:
    """Set training mode, with batch norm as the phase wants it."""
    phase.enter(network)
    network.train()
    network.backbone.train(phase.train_batch_norm)


def num_batches(num_rows: int, batch_size: int) -> int:
    """The number of batches in an epoch."""
    return -(-num_rows // batch_size)


def batches(rows: Tensor, batch_size: int, generator: Generator) -> Tensor:
    """The rows in random order, (batches, size). The last batch is filled up with other rows.

    The published code keeps a ragged last batch. With equal shapes a step can be captured once.
    """
    size = min(batch_size, len(rows))
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    filler = torch.randperm(len(rows), generator=generator, device=rows.device)
    count = num_batches(len(rows), size)
    return rows[torch.cat([order, filler])[: count * size]].view(count, size)


def named_generator(device: torch.device, *purpose: object) -> Generator:
    """A generator seeded by what it is for, so that its numbers do not depend on how much others have drawn."""
    return torch.Generator(device).manual_seed(seed_of(*purpose))


def seed_of(*purpose: object) -> int:
    """A seed for a purpose, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:8], "big") >> 1
