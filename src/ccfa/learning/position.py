"""Where a learner stands inside a stage: the phases at work, outermost first, and how to take them up again."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Generator, Tensor, optim

from ccfa.learning.acceleration import StepFunction


class PreparedPhase(NamedTuple):
    """A phase ready to run: its rows, and a step that may be run on any batch of them."""

    rows: Tensor
    batch_size: int
    optimiser: optim.Optimizer
    draws: Generator  # of transforms and augmentations
    step: StepFunction


@dataclass
class PhaseAtWork:
    """A phase and how far it has come: so many batches of an epoch."""

    index: tuple[int, ...]
    prepared: PreparedPhase
    epoch: int = 0
    batch: int = 0
    totals: dict[str, Tensor] = field(default_factory=dict)  # the epoch's losses, added up


@dataclass(frozen=True)
class InterruptedPhase:
    """All that a phase at work has which cannot be computed anew; the order of batches can."""

    index: tuple[int, ...]
    epoch: int
    batch: int
    rows: Tensor  # balanced ones were chosen with the network as it was when the phase began
    draws: Tensor  # the generator's state
    totals: dict[str, Tensor]
    optimiser: list[dict[str, Tensor]]  # of each parameter, in order


def interrupted(work: PhaseAtWork) -> InterruptedPhase:
    """A phase at work as it can be stored."""
    optimiser = work.prepared.optimiser
    state = [
        {name: value for name, value in optimiser.state[parameter].items() if isinstance(value, Tensor)}
        for group in optimiser.param_groups
        for parameter in group["params"]
    ]
    draws = work.prepared.draws.get_state()
    return InterruptedPhase(work.index, work.epoch, work.batch, work.prepared.rows, draws, work.totals, state)


def taken_up(stored: InterruptedPhase, prepared: PreparedPhase) -> PhaseAtWork:
    """The stored phase at work again; the prepared one is changed in place, since a captured step reads its tensors."""
    optimiser = prepared.optimiser
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for parameter, values in zip(parameters, stored.optimiser, strict=True):
        state = optimiser.state[parameter]
        for name, value in values.items():
            if name not in state:
                like = parameter if value.shape == parameter.shape else value.to(parameter.device)
                state[name] = torch.empty_like(like, dtype=value.dtype)
            state[name].copy_(value)
    if stored.draws.shape == prepared.draws.get_state().shape:  # another kind of device has other generators
        prepared.draws.set_state(stored.draws.cpu())
    totals = {name: total.to(prepared.rows.device) for name, total in stored.totals.items()}
    return PhaseAtWork(stored.index, prepared, stored.epoch, stored.batch, totals)
