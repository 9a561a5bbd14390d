"""Networks made from a method: freshly initialised, or as stored weights say."""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ccfa.errors import ModelError
from ccfa.methods import Method
from ccfa.models import Network
from ccfa.models.backbone import require_backbone

_GLOBAL_GENERATOR = threading.Lock()  # layers initialise from torch's one generator; runs may share a process


def new_network(method: Method, channels: int, seed: int = 0) -> Network:
    """A freshly initialised network without classes."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = require_backbone(method.backbone(channels))
    return Network(backbone, method.head(backbone.dim))


def network_of(method: Method, channels: int, stage_index: int, weights: Mapping[str, Tensor]) -> Network:
    """The network of a stage from its weights, on the CPU."""
    network = new_network(method, channels)
    method.shape_network(network, stage_index)
    take_over(network, weights)
    return network


def take_over(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put stored values in place of a new module's own; class blocks and memories, empty in it, take their size."""
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
