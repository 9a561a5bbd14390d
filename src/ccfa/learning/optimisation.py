"""One optimisation step, the only place that calls `backward`."""

from torch import Tensor, nn, optim

from ccfa.methods import Phase


def set_learning_rate(optimiser: optim.Optimizer, phase: Phase, epoch: int) -> float:
    """Put the epoch's learning rate into the optimiser."""
    lr = phase.lr * phase.schedule(epoch, phase.epochs)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads this tensor
        else:
            group["lr"] = lr
    return lr


def descend(loss: Tensor, optimiser: optim.Optimizer, parameters: list[nn.Parameter], clip_value: float | None) -> None:
    """Move the phase's parameters one step down the loss."""
    optimiser.zero_grad()
    loss.backward(inputs=parameters)
    if clip_value is not None:
        nn.utils.clip_grad_value_(parameters, clip_value)
    optimiser.step()
