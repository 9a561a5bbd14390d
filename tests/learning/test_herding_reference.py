"""Herding against the NumPy reference."""

import numpy as np
import pytest
import torch

import reference
from ccfa.methods.selection import herd


def embeddings(seed: int, num_rows: int, dim: int, offset: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, dim)) + offset


def herded(classes: list[np.ndarray], num_exemplars: int) -> list[list[int]]:
    """The rows picked of each class, as plain lists."""
    tensors = [torch.tensor(rows) for rows in classes]
    return [rows.tolist() for rows in herd(tensors, num_exemplars, torch.Generator())]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("offset", [0.0, 2.0])
@pytest.mark.parametrize("num_exemplars", [1, 7, 20])
def test_the_same_rows_in_the_same_order(seed: int, offset: float, num_exemplars: int):
    rows = embeddings(seed, 60, 8, offset)
    assert herded([rows], num_exemplars) == [reference.herd(rows, num_exemplars)]


def test_classes_of_different_sizes_do_not_influence_each_other():
    classes = [embeddings(seed, size, 8, -1.0) for seed, size in enumerate([40, 3, 1, 25])]
    assert herded(classes, 10) == [reference.herd(rows, 10) for rows in classes]


def test_the_length_of_an_embedding_does_not_matter():
    rows = embeddings(1, 40, 6, 1.0)
    lengths = np.random.default_rng(2).uniform(0.1, 10, (40, 1))
    assert herded([rows], 12) == herded([rows * lengths], 12)


def test_a_shorter_selection_is_a_prefix_of_a_longer_one():
    rows = embeddings(3, 50, 5, 0.5)
    assert herded([rows], 8)[0] == herded([rows], 20)[0][:8]


def test_a_row_picked_again_costs_no_rank():
    near, far = np.eye(3)[:1] + 0.01 * embeddings(4, 12, 3), embeddings(5, 3, 3)
    rows = np.concatenate([near, far])
    (chosen,) = herded([rows], 8)
    assert len(set(chosen)) == 8
    assert chosen == reference.herd(rows, 8)
    assert chosen != herded_without_replacement(rows, 8)


def herded_without_replacement(rows: np.ndarray, num_exemplars: int) -> list[int]:
    """The variant that never considers a row twice; the published code is not this one."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    direction, chosen = unit.mean(axis=0), []
    for _ in range(num_exemplars):
        scores = unit @ direction
        scores[chosen] = -np.inf
        chosen.append(int(scores.argmax()))
        direction = direction + unit.mean(axis=0) - unit[chosen[-1]]
    return chosen


@pytest.mark.parametrize("num_rows", [1, 4])
def test_fewer_rows_than_asked_gives_each_row_once(num_rows: int):
    assert sorted(herded([embeddings(6, num_rows, 5)], 10)[0]) == list(range(num_rows))


def test_where_a_thousand_rounds_do_not_suffice_other_rows_follow_the_herded_ones():
    rows = np.concatenate([np.eye(3)[:1] + 0.01 * embeddings(4, 12, 3), embeddings(5, 3, 3)])
    expected = reference.herd(rows, 10)
    assert len(expected) < 10
    (chosen,) = herded([rows], 10)
    assert chosen[: len(expected)] == expected
    assert len(set(chosen)) == 10


def test_identical_images_still_fill_the_memory():
    (chosen,) = herded([np.ones((9, 4))], 5)
    assert len(set(chosen)) == 5


def test_the_mean_of_the_herded_is_nearer_to_the_class_mean_than_that_of_the_first_rows():
    rows = embeddings(7, 200, 10, 0.3)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    (chosen,) = herded([rows], 20)
    near, first = (np.linalg.norm(unit[x].mean(0) - unit.mean(0)) for x in (chosen, range(20)))
    assert near < 0.5 * first
