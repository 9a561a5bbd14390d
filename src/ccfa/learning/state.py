"""Where a learner stands, as named tensors and plain facts and back, and networks made from stored weights."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn, optim

from ccfa.data import Stage
from ccfa.errors import ModelError, UsageError
from ccfa.kernels.graphs import StepFunction
from ccfa.methods import Method
from ccfa.models import Network
from ccfa.models.backbone import backbone_builder, require_backbone
from ccfa.models.pretrained import untrained

if TYPE_CHECKING:
    from ccfa.learning.learner import Learner

Tensors = dict[str, Tensor]
Facts = Mapping[str, Any]
_GLOBAL_GENERATOR = threading.Lock()  # layers initialise from torch's one generator; runs may share a process


@dataclass(frozen=True)
class StoredPhase:
    """A phase that was at work when its learner was stored."""

    index: tuple[int, ...]
    facts: Facts
    tensors: Tensors


@dataclass
class PhaseAtWork:
    """A phase that runs: what it works with, and how far it has come."""

    index: tuple[int, ...]  # its number in the stage; a phase after an epoch adds the number of that epoch
    rows: Tensor
    batch_size: int
    optimiser: optim.Optimizer
    draws: Generator  # of transforms and augmentations
    step: StepFunction
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0  # of the epoch so far
    totals: Tensors = field(default_factory=dict)  # the epoch's losses, added up

    def state(self) -> tuple[Tensors, Facts]:
        """All that cannot be computed anew. The order of batches can; balanced rows depend on the network's past."""
        optimiser = {
            f"{number}.{name}": value
            for number, values in self.optimiser.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        tensors = {"rows": self.rows, "draws": self.draws.get_state()}
        tensors |= _named("totals", self.totals) | _named("optimiser", optimiser)
        place = {"index": list(self.index), "epoch": self.epoch, "batch": self.batch, "seconds": self.seconds}
        return tensors, {**place, "losses": list(self.totals)}

    def take_up(self, stored: StoredPhase) -> None:
        """Continue where the stored phase stood. Tensors are filled in place, since a captured step reads them."""
        facts, tensors = stored.facts, stored.tensors
        parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        for key, value in _part(tensors, "optimiser").items():
            number, _, name = key.partition(".")
            parameter = parameters[int(number)]
            state = self.optimiser.state[parameter]
            if name not in state:
                like = parameter if value.shape == parameter.shape else value.to(parameter.device)
                state[name] = torch.empty_like(like, dtype=value.dtype)
            state[name].copy_(value)
        if tensors["draws"].shape == self.draws.get_state().shape:  # another kind of device has other generators
            self.draws.set_state(tensors["draws"].cpu())
        self.epoch, self.batch, self.seconds = facts["epoch"], facts["batch"], facts.get("seconds", 0.0)
        self.totals = {name: tensors[f"totals.{name}"].to(self.rows.device) for name in facts["losses"]}


def state_of(learner: "Learner") -> tuple[Tensors, dict[str, Any]]:
    """Everything needed to continue exactly, between two steps or between two stages; tensors stay where they are."""
    if (learner.is_learning or learner.interrupted) and not learner.at_work:
        raise UsageError(
            f"Stage {learner.stage.index + 1} was begun and not ended: save between two of its steps, or after it."
        )
    midway = [work.state() for work in learner.at_work]
    parts: dict[str, Mapping[str, Tensor]] = {"network": learner.network.state_dict()}
    if midway and learner.previous:
        parts["previous"] = learner.previous.state_dict()  # between stages it equals the network
    if learner.initial and learner.initial is not learner.previous:
        parts["initial"] = learner.initial.state_dict()
    parts |= {f"term{number}": term.state_dict() for number, term in enumerate(learner.terms)}
    parts["memory"] = {str(label): rows for label, rows in enumerate(learner.memory.classes)}
    parts |= {f"phase{number}": tensors for number, (tensors, _) in enumerate(midway)}
    tensors: Tensors = {}
    for name, part in parts.items():
        tensors |= _named(name, part)
    stage = learner.stage
    return tensors, {
        "stage": [stage.index, stage.num_old, stage.num_seen],
        "num_auxiliary": learner.network.head.num_auxiliary,
        "num_classes_stored": len(learner.memory.classes),
        "phases": [facts for _, facts in midway],
    }


def restore(learner: "Learner", tensors: Tensors, facts: Facts) -> None:
    """Put a learner where the stored one stood. `learn` with the same stage, or the next, continues from there."""
    stage = Stage(*facts["stage"])
    learner.stage, learner.is_learning = stage, True  # until all of it is restored
    learner.previous = learner.initial = None
    learner.terms = learner.new_terms()
    learner.network = _network(learner, stage.index, _part(tensors, "network"), midway=bool(facts["phases"]))
    learner.network.head.num_auxiliary = facts["num_auxiliary"]
    if not facts["phases"]:
        learner.previous = learner.network.frozen_copy()
    elif weights := _part(tensors, "previous"):
        learner.previous = _network(learner, stage.index - 1, weights).frozen_copy()
    learner.initial = learner.previous
    if weights := _part(tensors, "initial"):
        learner.initial = _network(learner, 0, weights).frozen_copy()
    for number, term in enumerate(learner.terms):
        take_over(term, _part(tensors, f"term{number}"))
    labels = range(facts["num_classes_stored"])
    learner.memory.classes = [tensors[f"memory.{label}"].to(learner.device) for label in labels]
    learner.interrupted = [
        StoredPhase(tuple(phase["index"]), phase, _part(tensors, f"phase{number}"))
        for number, phase in enumerate(facts["phases"])
    ]
    learner.is_learning = False


def _network(learner: "Learner", stage_index: int, weights: Tensors, midway: bool = False) -> Network:
    network = network_of(learner.method, learner.train.images.shape[1], stage_index, weights, midway)
    return learner.acceleration.place(network, learner.device)


def new_network(method: Method, channels: int, seed: int = 0) -> Network:
    """A freshly initialised network without classes."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = require_backbone(backbone_builder(method.backbone)(channels))
    return Network(backbone, method.head(backbone.dim))


def network_of(
    method: Method, channels: int, stage_index: int, weights: Mapping[str, Tensor], midway: bool = False
) -> Network:
    """The network after a stage, or midway in it, from its weights, on the CPU."""
    network = new_network(replace(method, backbone=untrained(method.backbone)), channels)
    method.shape_network(network, stage_index)
    if not midway:
        method.reduce_network(network)
    take_over(network, weights)
    return network


def take_over(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Load stored values into a new module. Blocks that are empty in it, such as a head's classes, take their size."""
    for name, tensor in module.state_dict().items():
        grown = name in values and not tensor.numel() and values[name].numel()
        if grown and (tensor.dim() == 1 or tensor.shape[1:] == values[name].shape[1:]):
            owner, _, leaf = name.rpartition(".")
            empty = tensor.new_empty(values[name].shape)
            is_parameter = isinstance(getattr(module.get_submodule(owner), leaf), nn.Parameter)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(empty) if is_parameter else empty)
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        raise ModelError(f"The stored weights are of another network. {error}") from error


def _named(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def _part(tensors: Tensors, name: str) -> Tensors:
    prefix = name + "."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
