"""How much work an experiment is, before it is run: images and steps of each stage."""

from collections.abc import Sequence
from typing import NamedTuple

from ccfa.data import Stage
from ccfa.learning.loop import num_batches
from ccfa.methods import Method
from ccfa.methods.bic import held_out_exemplars, not_a_tenth, not_held_out, num_held_out
from ccfa.methods.method import RowSelector
from ccfa.methods.parts import balanced_exemplars, new_and_exemplars


class Work(NamedTuple):
    """The training of a stage: steps, and images counted with repetition."""

    steps: int
    images: int


def workload(method: Method, stages: Sequence[Stage], class_sizes: list[int]) -> list[Work]:
    """The work of each stage; `class_sizes` are the training images of each class, in learning order."""
    budget = method.memory
    works = []
    for stage in stages:
        new = sum(class_sizes[stage.num_old : stage.num_seen])
        old_quota, quota = budget.quota(max(stage.num_old, 1)), budget.quota(stage.num_seen)
        stored = [min(size, old_quota) for size in class_sizes[: stage.num_old]]
        balanced = [min(size, quota) for size in class_sizes[: stage.num_seen]]
        apart = sum(map(num_held_out, stored + balanced[stage.num_old :]))
        rows: dict[RowSelector, int] = {
            new_and_exemplars: new + sum(stored),
            balanced_exemplars: sum(balanced),
            not_held_out: new + sum(stored) - apart,
            not_a_tenth: sum(
                size - num_held_out(size) for size in class_sizes[stage.num_old : stage.num_seen] + stored
            ),
            held_out_exemplars: sum(map(num_held_out, balanced)),
        }
        steps = images = 0
        for phase in method.phases(stage):
            num_rows = rows.get(phase.rows, new + sum(stored))  # of one's own selector this is the best guess
            batches = phase.epochs * num_batches(num_rows, phase.batch_size)
            steps += batches
            images += batches * min(phase.batch_size, num_rows)
        works.append(Work(steps, images))
    return works
