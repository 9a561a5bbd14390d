"""What every method keeps to, with every augmentation that has a meaning for it.

Each combination is trained three times: as usual; again, with images spoilt that must not count, and with operators
refused that look at data to decide what to do, for no such thing can be captured; and one class at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ccfa.learning.loop as loop
from ccfa.data import Stage, split
from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.methods import METHODS, Budget, Method
from toys import (
    COMBINATIONS,
    EVERY_PAIR,
    REFUSED,
    STAGES,
    RecordedImages,
    Recorder,
    has_memory_size,
    plugged,
    rows_of,
    tiny,
    toy_images,
)

TRAIN = toy_images()
TEST = toy_images(seed=1, per_class=5)
PER_CLASS, TOTAL = Budget(per_class=3), Budget(total=11)

every_combination = pytest.mark.parametrize(("name", "augmentation"), COMBINATIONS)


@dataclass
class Run:
    """What a whole run left behind, stage by stage."""

    learner: Learner
    recorder: Recorder
    predictions: list[Tensor] = field(default_factory=list)
    memories: list[list[list[int]]] = field(default_factory=list)
    read: list[set[int]] = field(default_factory=list)


def run(
    method: Method, stages: tuple[Stage, ...] = STAGES, before: Callable[[Learner], None] = lambda learner: None
) -> Run:
    """Learn every stage of the toy images, noting what is read, predicted and stored."""
    recorder = Recorder()
    learner = Learner(method, toy_images(), observer=recorder)
    result = Run(learner, recorder)
    for stage in stages:
        before(learner)
        original = learner.train.images
        learner.train.images = recorded = RecordedImages(original)
        learner.learn(stage)
        result.read.append(set(recorded.read))
        result.memories.append(rows_of(learner.memory.classes))
        result.predictions.append(learner.predict(TEST.images))
        learner.train.images = original
    return result


def weights(learner: Learner) -> dict[str, Tensor]:
    return learner.network.state_dict() | {
        f"terms.{k}": v for k, v in nn.ModuleList(learner.terms).state_dict().items()
    }


def assert_same(first: Run, second: Run) -> None:
    """Two runs agree in every bit."""
    old, new = weights(first.learner), weights(second.learner)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], new[key]) for key in old)
    assert all(map(torch.equal, first.predictions, second.predictions))
    assert first.memories == second.memories
    assert first.recorder.batches == second.recorder.batches


def parts_of(value: object) -> object:
    """A value with everything inside it, as plain tuples that can be compared later."""
    if is_dataclass(value):
        return type(value), tuple((part.name, parts_of(getattr(value, part.name))) for part in fields(value))
    if isinstance(value, partial):
        return value.func, tuple(map(parts_of, value.args)), parts_of(value.keywords)
    if isinstance(value, dict):
        return tuple((key, parts_of(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(parts_of, value))
    return repr(value)


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


@contextmanager
def guarded() -> Iterator[Counter[tuple[int, str]]]:
    """Run every step under the guard; counts the steps of each stage and phase."""
    descend, steps = loop.descend, Counter()

    def guarded_losses(losses_of, learner, data, phase, *others):
        steps[learner.stage.index, phase.name] += 1
        with StaticShapes():
            return losses_of(learner, data, phase, *others)

    def guarded_descend(*arguments):
        with StaticShapes():
            descend(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("step_losses", "head_losses"):
            patch.setattr(loop, name, partial(guarded_losses, getattr(loop, name)))
        patch.setattr(loop, "descend", guarded_descend)
        yield steps


def phases_of(method: Method) -> set[tuple[int, str]]:
    """The stages and names of all phases."""
    phases = [(stage.index, phase) for stage in STAGES for phase in method.phases(stage)]
    phases += [(index, phase.after_epoch) for index, phase in phases if phase.after_epoch]
    return {(index, phase.name) for index, phase in phases}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("podnet", {"nca": "paper", "pod": "paper"}),
        ("afc", {"discrepancy": "paper"}),
        ("aanet", {"learn_blend": True}),
        ("wa", {"nonnegative": True}),
        ("replay", {"policy": "autoaugment", "cutout": 4}),
        ("finetune", {"policy": "trivial"}),
    ],
)
def test_variants_have_static_shapes(name, options):
    method = plugged(tiny(name, epochs=1, **options), "ccfa")
    with guarded() as steps:
        run(method)
    assert set(steps) == phases_of(method)


def test_every_method_is_covered():
    assert {name for name, _ in EVERY_PAIR} == set(METHODS) == {name for name, _ in COMBINATIONS}
    assert all(METHODS[name]().name == name for name in METHODS)


@pytest.mark.parametrize(("name", "augmentation"), REFUSED)
def test_refusals_name_method_and_reason(name, augmentation):
    method = tiny(name)
    reason = method.no_old_head if augmentation == "ccfa" else type(method.image_augmentation).__name__
    with pytest.raises(UsageError) as refusal:
        plugged(method, augmentation)
    assert reason
    assert reason in str(refusal.value)
    assert name in str(refusal.value)


def assert_sound(result: Run, stages: tuple[Stage, ...]) -> None:
    """Losses are finite and add up, and predictions are of classes seen so far."""
    for progress, losses in result.recorder.batches:
        assert all(map(math.isfinite, losses.values())), (progress, losses)
        parts = [loss for part, loss in losses.items() if part != "loss"]
        assert losses["loss"] == pytest.approx(sum(parts), rel=1e-5, abs=1e-5)
    assert all(value.isfinite().all() for value in weights(result.learner).values())
    for stage, predicted in zip(stages, result.predictions, strict=True):
        assert (predicted.dtype, predicted.shape) == (torch.int64, (len(TEST),))
        assert predicted.min() >= 0
        assert predicted.max() < stage.num_seen
    assert result.learner.network(torch.zeros(2, 3, 8, 8)).shape == (2, stages[-1].num_seen)


def readable(stage: Stage, stored: list[list[int]]) -> set[int]:
    return set(TRAIN.rows(stage.num_old, stage.num_seen).tolist()) | {row for rows in stored for row in rows}


def assert_honest(result: Run) -> None:
    """Only new rows and exemplars are read in training, and only exemplars for the nearest mean."""
    stored: list[list[int]] = []
    for stage, read, memory in zip(STAGES, result.read, result.memories, strict=True):
        assert set(TRAIN.rows(stage.num_old, stage.num_seen).tolist()) <= read <= readable(stage, stored)
        stored = memory
    if has_memory_size(result.learner.method):
        result.learner.train.images = recorded = RecordedImages(TRAIN.images)
        predicted = result.learner.predict_by_nearest_mean(TEST.images)
        assert recorded.read == {row for rows in stored for row in rows}
        assert set(predicted.tolist()) <= set(range(6))


def assert_within_budget(result: Run, stages: tuple[Stage, ...]) -> None:
    """Every class has its quota of different rows of its own, and keeps the first of those it had."""
    stored: list[list[int]] = []
    for stage, memory in zip(stages, result.memories, strict=True):
        quota = result.learner.method.memory.quota(stage.num_seen)
        assert [len(rows) for rows in memory] == [quota] * stage.num_seen
        for label, rows in enumerate(memory):
            assert len(set(rows)) == len(rows)
            assert TRAIN.labels[rows].tolist() == [label] * len(rows)
        assert memory[: len(stored)] == [rows[:quota] for rows in stored]
        stored = memory


def spoil_the_rest(learner: Learner) -> None:
    """Make white what the next stage must not read."""
    allowed = sorted(readable(STAGES[learner.stage.index + 1], rows_of(learner.memory.classes)))
    learner.train.images.fill_(255)
    learner.train.images[allowed] = TRAIN.images[allowed]


@every_combination
def test_stages_of_two_classes(name, augmentation):
    method = plugged(tiny(name, PER_CLASS, epochs=1), augmentation)
    before = parts_of(method)
    first = run(method)
    assert_sound(first, STAGES)
    assert_honest(first)
    if has_memory_size(method):
        assert_within_budget(first, STAGES)
    with guarded() as steps:
        second = run(method, before=spoil_the_rest)
    assert set(steps) == phases_of(method)
    assert_same(first, second)
    assert parts_of(method) == before == parts_of(plugged(tiny(name, PER_CLASS, epochs=1), augmentation))
    assert len(method.feature_augmentations) == (augmentation == "ccfa")


@every_combination
def test_stages_of_one_class_with_a_shared_memory(name, augmentation):
    stages = split(6, 1, 1)[:3]
    method = plugged(tiny(name, TOTAL, epochs=1), augmentation)
    result = run(method, stages)
    assert_sound(result, stages)
    if has_memory_size(method):
        assert_within_budget(result, stages)
