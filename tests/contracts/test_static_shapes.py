"""No operator of a training step may look at the data to decide what to do: no such thing can be captured."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ccfa.learning.loop as loop
from ccfa.learning import Learner
from toys import COMBINATIONS, STAGES, plugged, tiny, toy_images

ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


class DependsOnDataError(Exception):
    """An operator whose shape or answer the host must wait for."""


class StaticShapes(TorchDispatchMode):
    """Refuses operators that depend on data; indexing is refused with masks only."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator, or refuse it."""
        if func.overloadpacket in INDEXING:
            refused = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            refused = bool(ON_DATA & set(func.tags))
        if refused:
            raise DependsOnDataError(str(func))
        return func(*args, **(kwargs or {}))


class Peeking(torch.autograd.Function):
    """A function whose gradient waits for the host."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.max().item()


@pytest.mark.parametrize(
    "depending",
    [
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, torch.zeros(2)),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.arange(3).repeat_interleave(torch.tensor([1, 2, 1])),
        lambda x: torch.equal(x, x),
        lambda x: Peeking.apply(x.requires_grad_()).sum().backward(),
    ],
)
def test_the_guard_catches(depending):
    x = torch.tensor([1.0, -1.0, 2.0])
    depending(x.clone())
    with StaticShapes(), pytest.raises(DependsOnDataError):
        depending(x)


def test_the_guard_lets_fixed_shapes_pass():
    x = torch.arange(6.0).reshape(2, 3)
    with StaticShapes():
        rows = x[torch.tensor([1, 0, 1])]
        masked = torch.where(x > 2, x, 0.0).masked_fill(x > 4, -1.0)
    assert rows.tolist() == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert masked.tolist() == [[0, 0, 0], [3, 4, -1]]


@pytest.mark.parametrize(
    ("name", "augmentation", "options"),
    [(*pair, {}) for pair in COMBINATIONS]
    + [("podnet", "ccfa", {"nca": "paper"}), ("podnet", "ccfa", {"pod": "paper"})]
    + [("afc", "ccfa", {"discrepancy": "paper"}), ("aanet", "nothing", {"learn_blend": True})],
)
def test_every_step_has_static_shapes(name, augmentation, options, monkeypatch):
    method = plugged(tiny(name, epochs=1, **options), augmentation)
    losses_of, descend, guarded = loop.step_losses, loop.descend, Counter()

    def guarded_losses(learner, rows, phase, generator):
        with StaticShapes():
            losses = losses_of(learner, rows, phase, generator)
        guarded[learner.stage.index, phase.name] += 1
        return losses

    def guarded_descend(*arguments):
        with StaticShapes():
            descend(*arguments)

    monkeypatch.setattr(loop, "step_losses", guarded_losses)
    monkeypatch.setattr(loop, "descend", guarded_descend)
    learner = Learner(method, toy_images())
    for stage in STAGES[:2]:
        learner.learn(stage)
    phases = [(stage.index, phase) for stage in STAGES[:2] for phase in method.phases(stage)]
    phases += [(index, phase.after_epoch) for index, phase in phases if phase.after_epoch]
    assert set(guarded) == {(index, phase.name) for index, phase in phases}
