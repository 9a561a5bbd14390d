"""Which parameters BiC's correction phase trains, and how."""

from collections.abc import Sequence

from torch import nn, optim

from ccfa.methods.parts import sgd
from ccfa.models import Network

CORRECTION = ("head.beta", "head.gamma")


def correction_alone(network: Network) -> list[nn.Parameter]:
    """beta and gamma."""
    return [parameter for name, parameter in network.named_parameters() if name in CORRECTION]


def all_but_correction(network: Network) -> list[nn.Parameter]:
    """Everything trains but beta and gamma."""
    return [parameter for name, parameter in network.named_parameters() if name not in CORRECTION]


def sgd_decaying_the_last(parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> optim.Optimizer:
    """SGD whose weight decay acts on the last parameter alone, which is gamma."""
    optimiser = sgd(parameters[:-1], lr, 0.0)
    optimiser.add_param_group({"params": parameters[-1:], "weight_decay": weight_decay})
    return optimiser
