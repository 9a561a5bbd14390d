"""Herding against the NumPy reference."""

import numpy as np
import pytest
import torch

import reference
from ccfa.methods.parts import herd


def embeddings(seed, num_rows, dim, offset=0.0):
    return np.random.default_rng(seed).standard_normal((num_rows, dim)) + offset


def herded(classes, num_exemplars):
    """The rows picked of each class, as plain lists."""
    tensors = [torch.tensor(rows) for rows in classes]
    return [rows.tolist() for rows in herd(tensors, num_exemplars, torch.Generator())]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_the_same_rows_in_the_same_order(seed, offset):
    rows = embeddings(seed, 60, 8, offset)
    lengths = np.random.default_rng(2).uniform(0.1, 10, (60, 1))  # they do not matter
    (longest,) = herded([rows * lengths], 20)
    assert longest == reference.herd(rows, 20)
    assert herded([rows], 7) == [longest[:7]]


def test_classes_do_not_influence_each_other():
    classes = [embeddings(seed, size, 8, -1.0) for seed, size in enumerate([40, 3, 1, 25])]
    assert herded(classes, 10) == [reference.herd(rows, 10) for rows in classes]


# A few rows are picked again and again; the published code then goes on without counting them.
CROWDED = np.concatenate([np.eye(3)[:1] + 0.01 * embeddings(4, 12, 3), embeddings(5, 3, 3)])


def test_a_row_picked_again_costs_no_rank():
    unit = CROWDED / np.linalg.norm(CROWDED, axis=1, keepdims=True)
    direction, without_replacement = unit.mean(axis=0), []
    for _ in range(8):
        scores = unit @ direction
        scores[without_replacement] = -np.inf
        without_replacement.append(int(scores.argmax()))
        direction = direction + unit.mean(axis=0) - unit[without_replacement[-1]]
    (chosen,) = herded([CROWDED], 8)
    assert len(set(chosen)) == 8
    assert chosen == reference.herd(CROWDED, 8) != without_replacement


def test_other_rows_follow_the_herded_ones():
    expected = reference.herd(CROWDED, 10)
    assert len(expected) < 10  # a thousand rounds are not enough
    (chosen,) = herded([CROWDED], 10)
    assert chosen[: len(expected)] == expected
    assert len(set(chosen)) == 10


@pytest.mark.parametrize(("rows", "count"), [(embeddings(6, 1, 5), 1), (embeddings(6, 4, 5), 4), (np.ones((9, 4)), 5)])
def test_few_or_equal_rows_are_each_kept_once(rows, count):
    (chosen,) = herded([rows], max(count, 5))
    assert len(set(chosen)) == len(chosen) == count


def test_herded_rows_have_the_mean_of_their_class():
    rows = embeddings(7, 200, 10, 0.3)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    (chosen,) = herded([rows], 20)
    near, first = (np.linalg.norm(unit[x].mean(0) - unit.mean(0)) for x in (chosen, range(20)))
    assert near < 0.5 * first
