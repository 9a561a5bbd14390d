"""Class orders: known values, and names that do not fit."""

import numpy as np
import pytest

from ccfa.data.orders import class_order
from ccfa.errors import UsageError


@pytest.mark.parametrize(
    ("name", "num_classes", "data", "first", "last"),
    [
        ("natural", 100, "cifar100", (0, 1, 2), (97, 98, 99)),
        ("seed-1993", 100, "cifar100", (68, 56, 78), (49, 57, 33)),
        ("podnet-0", 100, "cifar100", (87, 0, 52), (26, 35, 39)),
        ("podnet-1", 100, "cifar100", (58, 30, 93), (23, 64, 61)),
        ("podnet-2", 100, "cifar100", (71, 54, 45), (85, 43, 11)),
        ("podnet", 1000, "./imagenet", (54, 7, 894), (945, 697, 417)),
        ("seed-4294967295", 100, "photos", (), ()),
        ("3, 1,2,0", 4, "digits", (3, 1, 2), (1, 2, 0)),
        (np.array([1, 0, 2]), 3, "digits", (1, 0, 2), (1, 0, 2)),
    ],
)
def test_known_values(name, num_classes, data, first, last):
    order = class_order(name, num_classes, data)
    assert sorted(order) == list(range(num_classes))
    assert order[: len(first)] == first
    assert order[num_classes - len(last) :] == last


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("1,,2", "digits", "1,,2"),
        ("naturel", "digits", "'natural'"),
        ("podnet-3", "cifar100", "'podnet-"),
        ("seed-x", "digits", "seed-x"),
        ("seed-4294967296", "digits", "4294967295"),
        ("podnet-0", "digits", "'digits'"),
        ("podnet", "cifar100", "podnet-0"),
    ],
)
def test_faults_are_named(name, data, named):
    with pytest.raises(UsageError, match=named):
        class_order(name, 4, data)
