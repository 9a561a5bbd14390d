"""What every method keeps to, with every augmentation that has a meaning for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

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
PER_CLASS, TOTAL = Budget(per_class=3), Budget(total=14)
WITH_MEMORY = [pair for pair in COMBINATIONS if has_memory_size(METHODS[pair[0]]())]

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


@cache
def usual_run(name: str, augmentation: str, memory: Budget = PER_CLASS) -> Run:
    return run(plugged(tiny(name, memory), augmentation))


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


@every_combination
def test_losses_are_finite_and_predictions_seen(name, augmentation):
    result = usual_run(name, augmentation)
    assert {progress.stage.index for progress, _ in result.recorder.batches} == {0, 1, 2}
    for progress, losses in result.recorder.batches:
        assert all(map(math.isfinite, losses.values())), (progress, losses)
        parts = [loss for part, loss in losses.items() if part != "loss"]
        assert losses["loss"] == pytest.approx(sum(parts), rel=1e-5, abs=1e-5)
    for stage, predicted in zip(STAGES, result.predictions, strict=True):
        assert (predicted.dtype, predicted.shape) == (torch.int64, (len(TEST),))
        assert predicted.min() >= 0
        assert predicted.max() < stage.num_seen
    assert result.learner.network(torch.zeros(2, 3, 8, 8)).shape == (2, 6)


def readable(stage: Stage, stored: list[list[int]]) -> set[int]:
    return set(TRAIN.rows(stage.num_old, stage.num_seen).tolist()) | {row for rows in stored for row in rows}


@every_combination
def test_only_new_rows_and_exemplars_are_read(name, augmentation):
    result = usual_run(name, augmentation)
    stored: list[list[int]] = []
    for stage, read, memory in zip(STAGES, result.read, result.memories, strict=True):
        assert set(TRAIN.rows(stage.num_old, stage.num_seen).tolist()) <= read <= readable(stage, stored)
        stored = memory


@every_combination
def test_same_bits_whatever_other_images_show(name, augmentation):
    """Run again with the same method and seed: nothing unreadable counts, and nothing is left in the method."""
    first = usual_run(name, augmentation)
    method = first.learner.method
    before = parts_of(method)

    def spoil_the_rest(learner: Learner) -> None:
        stage = STAGES[learner.stage.index + 1]
        allowed = sorted(readable(stage, rows_of(learner.memory.classes)))
        learner.train.images.fill_(255)
        learner.train.images[allowed] = TRAIN.images[allowed]

    assert_same(first, run(method, before=spoil_the_rest))
    assert parts_of(method) == before == parts_of(plugged(tiny(name, PER_CLASS), augmentation))
    assert len(method.feature_augmentations) == (augmentation == "ccfa")


@pytest.mark.parametrize(("name", "augmentation"), WITH_MEMORY)
def test_nearest_mean_reads_exemplars_only(name, augmentation):
    learner = usual_run(name, augmentation).learner
    original = learner.train.images
    learner.train.images = recorded = RecordedImages(original)
    predicted = learner.predict_by_nearest_mean(TEST.images)
    learner.train.images = original
    assert recorded.read == {row for rows in rows_of(learner.memory.classes) for row in rows}
    assert (predicted.dtype, predicted.shape) == (torch.int64, (len(TEST),))
    assert predicted.min() >= 0
    assert predicted.max() < 6


@pytest.mark.parametrize(
    ("name", "augmentation", "budget"),
    [(*pair, PER_CLASS) for pair in WITH_MEMORY] + [(*pair, TOTAL) for pair in WITH_MEMORY if pair[1] == "nothing"],
)
def test_memory_keeps_its_budget_and_its_exemplars(name, augmentation, budget):
    stored: list[list[int]] = []
    for stage, memory in zip(STAGES, usual_run(name, augmentation, budget).memories, strict=True):
        quota = 3 if budget == PER_CLASS else 14 // stage.num_seen
        assert [len(rows) for rows in memory] == [quota] * stage.num_seen
        for label, rows in enumerate(memory):
            assert len(set(rows)) == len(rows)
            assert TRAIN.labels[rows].tolist() == [label] * len(rows)
        assert memory[: len(stored)] == [rows[:quota] for rows in stored]
        stored = memory


@every_combination
def test_one_class_at_a_time(name, augmentation):
    result = run(plugged(tiny(name, epochs=1), augmentation), stages=split(6, 1, 1)[:3])
    assert all(math.isfinite(losses["loss"]) for _, losses in result.recorder.batches)
    assert all(value.isfinite().all() for value in weights(result.learner).values())
    assert all(predicted.max() <= index for index, predicted in enumerate(result.predictions))
