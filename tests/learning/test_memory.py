import pytest
import torch

from ccfa.errors import UsageError
from ccfa.learning.learner import ExemplarMemory, joined
from ccfa.methods import Budget
from ccfa.methods.method import EVERYTHING, NOTHING
from toys import rows_of


@pytest.mark.parametrize(
    ("budget", "num_seen", "expected"),
    [
        (Budget(per_class=20), 50, 20),
        (Budget(per_class=20), 100, 20),
        (Budget(per_class=0), 10, 0),
        (Budget(total=2000), 50, 40),
        (Budget(total=2000), 60, 33),
        (Budget(total=2000), 100, 20),
        (Budget(total=5), 6, 0),
        (NOTHING, 10, 0),
    ],
)
def test_quota(budget, num_seen, expected):
    assert budget.quota(num_seen) == expected
    assert ExemplarMemory(budget).quota(num_seen) == expected


def test_everything_is_more_than_any_class_has():
    assert EVERYTHING.quota(1000) > 1_281_167


@pytest.mark.parametrize("options", [{"per_class": -1}, {"total": -1}])
def test_a_budget_is_never_negative(options):
    with pytest.raises(UsageError, match="-1"):
        Budget(**options)


def classes(*sizes: int, first: int = 0) -> list[torch.Tensor]:
    return [100 * (first + label) + torch.arange(size) for label, size in enumerate(sizes)]


def test_old_classes_are_kept_as_they_are():
    memory = ExemplarMemory(Budget(per_class=3))
    memory.update(classes(3, 3))
    memory.update(classes(3, 2, first=2))
    assert rows_of(memory.classes) == [[0, 1, 2], [100, 101, 102], [200, 201, 202], [300, 301]]
    assert len(memory) == 11


def test_a_shared_memory_cuts_the_least_preferred():
    memory = ExemplarMemory(Budget(total=12))
    memory.update(classes(6, 6))
    assert [rows.tolist() for rows in memory.rows(4)] == [[0, 1, 2], [100, 101, 102]]
    assert len(memory) == 12  # asking for rows cuts nothing
    memory.update(classes(3, 3, first=2))
    assert [len(rows) for rows in memory.classes] == [3, 3, 3, 3]
    memory.update(classes(2, first=4))
    assert rows_of(memory.classes) == [[0, 1], [100, 101], [200, 201], [300, 301], [400, 401]]
    assert len(memory) <= 12


def test_an_empty_memory():
    memory = ExemplarMemory(NOTHING)
    memory.update([])
    assert len(memory) == 0
    assert memory.rows(10) == []


def test_joined():
    device = torch.device("cpu")
    nothing = joined([], device)
    assert nothing.dtype == torch.int64
    assert nothing.shape == (0,)
    assert joined(classes(2, 0, 1), device).tolist() == [0, 1, 200]
