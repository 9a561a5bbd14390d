import pytest
import torch

from ccfa.learning.loop import batches, named_generator, num_batches

CPU = torch.device("cpu")


def drawn(num_rows: int, batch_size: int, *purpose: object) -> list[list[int]]:
    rows = 100 + torch.arange(num_rows)
    return [batch.tolist() for batch in batches(rows, batch_size, named_generator(CPU, *purpose))]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"),
    [(25_000, 128, 196), (6_000, 128, 47), (1_200, 128, 10), (256, 128, 2), (257, 128, 3), (1, 128, 1)],
)
def test_num_batches(num_rows, batch_size, expected):
    assert num_batches(num_rows, batch_size) == expected


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 4), (12, 4), (5, 5), (3, 16), (1, 1), (17, 16)])
def test_every_row_once_then_filled_to_one_size(num_rows, batch_size):
    epoch = drawn(num_rows, batch_size, "epoch")
    assert len(epoch) == num_batches(num_rows, batch_size)
    assert {len(batch) for batch in epoch} == {min(batch_size, num_rows)}
    flat = [row for batch in epoch for row in batch]
    assert sorted(flat[:num_rows]) == list(range(100, 100 + num_rows))
    assert set(flat[num_rows:]) <= set(flat[:num_rows])


def test_rows_keep_how_often_they_occur():
    rows = torch.tensor([7, 7, 7, 2])
    (batch,) = batches(rows, 8, named_generator(CPU))
    assert sorted(batch.tolist()) == [2, 7, 7, 7]


def test_order_depends_on_the_purpose_alone():
    assert drawn(50, 10, 0, "batches", 1) == drawn(50, 10, 0, "batches", 1)
    orders = [drawn(50, 10, seed, "batches", epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4
    assert drawn(50, 10, "1") != drawn(50, 10, 1)


def test_named_generators_do_not_share_a_stream():
    torch.manual_seed(0)
    first = torch.rand(4, generator=named_generator(CPU, "a"))
    torch.rand(100)
    torch.rand(7, generator=named_generator(CPU, "b"))
    assert torch.equal(first, torch.rand(4, generator=named_generator(CPU, "a")))


def test_the_seed_of_a_purpose_never_changes():
    # Stored traces and resumed runs rely on it, also between processes (unlike hash()).
    assert named_generator(CPU, 0, 1, "batches").initial_seed() == 2456056753479729668
