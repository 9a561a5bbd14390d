"""Class orders: known values, permutations, and faults named entry by entry."""

import numpy as np
import pytest

from ccfa.data.orders import class_order, order_names, recognise_imagenet, wnids
from ccfa.errors import UsageError


def test_known_values():
    assert class_order("natural", 4, "digits") == (0, 1, 2, 3)
    assert class_order("seed-1993", 100, "cifar100")[:5] == (68, 56, 78, 8, 23)
    assert class_order("podnet-0", 100, "cifar100")[:5] == (87, 0, 52, 58, 44)
    assert class_order("podnet", 100, "imagenet100")[-3:] == (49, 57, 33)
    assert class_order("podnet", 1000, "imagenet1000")[:5] == (54, 7, 894, 512, 126)
    assert class_order("podnet", 1000, "imagenet1000")[-3:] == (945, 697, 417)
    assert class_order("3, 1,2,0", 4, "digits") == (3, 1, 2, 0)
    assert class_order(np.array([1, 0]), 2, "digits") == (1, 0)


@pytest.mark.parametrize("name", ["podnet-0", "podnet-1", "podnet-2", "seed-0", "seed-4294967295"])
def test_orders_are_permutations(name):
    assert sorted(class_order(name, 100, "cifar100")) == list(range(100))


def test_orders_differ():
    names = ("natural", "seed-1", "podnet-0", "podnet-1", "podnet-2")
    assert len({class_order(name, 100, "cifar100") for name in names}) == 5
    assert set(names[2:]) | {"natural", "podnet"} <= set(order_names())


def test_imagenet_lists_are_recognised():
    assert len(wnids("imagenet1000")) == 1000
    assert wnids("imagenet100") == tuple(sorted(wnids("imagenet1000")))[:100]
    assert recognise_imagenet(wnids("imagenet100")) == "imagenet100"
    assert recognise_imagenet(wnids("imagenet1000")[1:101]) is None
    with pytest.raises(UsageError, match="Did you mean 'imagenet100'"):
        wnids("imagenet10")


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("3,1,2,2", "digits", "repeated: 2; missing: 0"),
        ("3,1,2", "digits", r"3 entries \(missing: 0\)"),
        ("0,1,2,3,4", "digits", "not a label: 4"),
        ([0, 1, 2, -1], "digits", "not a label: -1; missing: 3"),
        ("1,,2", "digits", "Cannot read the class order"),
        ("naturel", "digits", "Did you mean 'natural'"),
        ("podnet-3", "cifar100", "Did you mean 'podnet-"),
        ("seed-x", "digits", "Unknown class order"),
        ("seed-4294967296", "digits", "from 0 to 4294967295"),
        ("podnet-0", "digits", "cifar100 only, not for 'digits'"),
        ("podnet", "cifar100", "imagenet100 and imagenet1000 only"),
        ("podnet-1", "imagenet100", "cifar100 only"),
        ("podnet-0", "cifar100", "got 100 entries"),
    ],
)
def test_faults_are_named(name, data, match):
    with pytest.raises(UsageError, match=match):
        class_order(name, 4, data)
