"""Where a learner stands: the phases at work, outermost first, and all of it as tensors and plain facts and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, optim

from ccfa.data import Stage
from ccfa.learning.acceleration import StepFunction
from ccfa.learning.networks import network_of, take_over
from ccfa.models import Network

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner

Tensors = dict[str, Tensor]


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


def state_of(learner: "Learner") -> tuple[Tensors, dict[str, Any]]:
    """Everything needed to continue exactly, between two steps or between two stages; tensors stay where they are."""
    midway = [interrupted(work) for work in learner.at_work]
    networks = {"network": learner.network}
    if midway and learner.previous:
        networks["previous"] = learner.previous  # between stages it equals the network
    if learner.initial and learner.initial is not learner.previous:
        networks["initial"] = learner.initial
    tensors: Tensors = {}
    for name, network in networks.items():
        tensors |= _named(name, network.state_dict())
    for number, term in enumerate(learner.terms):
        tensors |= _named(f"term{number}", term.state_dict())
    tensors |= {f"memory.{label}": rows for label, rows in enumerate(learner.memory.classes)}
    for number, phase in enumerate(midway):
        tensors |= _named(f"phase{number}", _phase_tensors(phase))
    stage = learner.stage
    facts = {
        "stage": [stage.index, stage.num_old, stage.num_seen],
        "num_auxiliary": learner.network.head.num_auxiliary,
        "networks": list(networks),
        "num_terms": len(learner.terms),
        "num_classes_stored": len(learner.memory.classes),
        "phases": [
            {
                "index": list(phase.index),
                "epoch": phase.epoch,
                "batch": phase.batch,
                "losses": list(phase.totals),
                "num_parameters": len(phase.optimiser),
            }
            for phase in midway
        ],
    }
    return tensors, facts


def restore(learner: "Learner", tensors: Tensors, facts: Mapping[str, Any]) -> None:
    """Make a new learner stand where the stored one stood; `learn` with that stage, or the next, goes on from there."""
    stage = Stage(*facts["stage"])
    learner.stage = stage
    learner.network = _network(learner, stage.index, _part(tensors, "network"))
    learner.network.head.num_auxiliary = facts["num_auxiliary"]
    if not facts["phases"]:
        learner.previous = learner.network.frozen_copy()
    elif "previous" in facts["networks"]:
        learner.previous = _network(learner, stage.index - 1, _part(tensors, "previous")).frozen_copy()
    learner.initial = learner.previous
    if "initial" in facts["networks"]:
        learner.initial = _network(learner, 0, _part(tensors, "initial")).frozen_copy()
    for number, term in enumerate(learner.terms):
        take_over(term, _part(tensors, f"term{number}"))
    learner.memory.classes = [
        tensors[f"memory.{label}"].to(learner.device) for label in range(facts["num_classes_stored"])
    ]
    learner.interrupted = [
        _phase(phase, _part(tensors, f"phase{number}"), learner) for number, phase in enumerate(facts["phases"])
    ]


def _network(learner: "Learner", stage_index: int, weights: Tensors) -> Network:
    network = network_of(learner.method, learner.train.images.shape[1], stage_index, weights)
    return learner.acceleration.place(network, learner.device)


def _phase_tensors(phase: InterruptedPhase) -> Tensors:
    optimiser = {
        f"{number}.{name}": value for number, state in enumerate(phase.optimiser) for name, value in state.items()
    }
    return {
        "rows": phase.rows,
        "draws": phase.draws,
        **_named("totals", phase.totals),
        **_named("optimiser", optimiser),
    }


def _phase(facts: Mapping[str, Any], tensors: Tensors, learner: "Learner") -> InterruptedPhase:
    optimiser: list[Tensors] = [{} for _ in range(facts["num_parameters"])]
    for name, value in _part(tensors, "optimiser").items():
        number, _, kind = name.partition(".")
        optimiser[int(number)][kind] = value
    return InterruptedPhase(
        index=tuple(facts["index"]),
        epoch=facts["epoch"],
        batch=facts["batch"],
        rows=tensors["rows"].to(learner.device),
        draws=tensors["draws"],
        totals={name: tensors[f"totals.{name}"] for name in facts["losses"]},
        optimiser=optimiser,
    )


def _named(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def _part(tensors: Tensors, name: str) -> Tensors:
    prefix = name + "."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
