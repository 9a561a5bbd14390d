"""Class orders and stages: known values, a plain count, and what does not fit is refused by name."""

import numpy as np
import pytest

from ccfa.data.stages import (
    Stage,
    class_order,
    order_names,
    parse_scenario,
    published,
    read_order,
    recognise_imagenet,
    split,
)
from ccfa.errors import UsageError


@pytest.mark.parametrize(
    ("scenario", "num_classes", "sizes"),
    [
        ("B50-inc10", 100, [50, 10, 10, 10, 10, 10]),
        ("B0-inc10", 100, [10] * 10),
        ("b50-INC7", 100, [50, 7, 7, 7, 7, 7, 7, 7, 1]),
        ("5,2,2,1", 10, [5, 2, 2, 1]),
        (" B10-inc5 ", 10, [10]),
    ],
)
def test_scenarios(scenario, num_classes, sizes):
    stages = parse_scenario(scenario, num_classes)
    assert [stage.num_new for stage in stages] == sizes
    assert [stage.num_old for stage in stages] == [sum(sizes[:index]) for index in range(len(sizes))]


@pytest.mark.parametrize("increment", [np.int64(2), np.array([2, 2, 1])])
def test_numbers_of_numpy_are_taken(increment):
    stages = split(np.int64(10), np.int64(5), increment)
    assert stages == (Stage(0, 0, 5), Stage(1, 5, 7), Stage(2, 7, 9), Stage(3, 9, 10))
    assert all(type(stage.num_seen) is int for stage in stages)


@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        ("B120-inc10", "120"),
        ("B0-inc0", "increment of 0"),
        ("B50-inc60", "at most 50"),
        ("50,20,20", "90 classes"),
        ("50,60,-10", "-10"),
        ("50,,50", "'50,,50'"),
        ("", "scenario"),
        ("B50-inc10.5", "10.5"),
    ],
)
def test_what_does_not_fit_is_refused(scenario, named):
    with pytest.raises(UsageError, match=named):
        parse_scenario(scenario, 100)


def test_known_orders():
    assert class_order("natural", 4, "digits") == (0, 1, 2, 3)
    assert class_order("seed-1993", 100, "cifar100")[:5] == (68, 56, 78, 8, 23)
    assert class_order("podnet-0", 100, "cifar100")[:5] == (87, 0, 52, 58, 44)
    assert class_order("podnet", 100, "imagenet100")[-3:] == (49, 57, 33)
    assert class_order("podnet", 1000, "imagenet1000")[:5] == (54, 7, 894, 512, 126)
    assert class_order("podnet", 1000, "imagenet1000")[-3:] == (945, 697, 417)
    assert class_order("3, 1,2,0", 4, "digits") == (3, 1, 2, 0)


@pytest.mark.parametrize(
    ("text", "names", "order"),
    [
        ("cat, ant,bee", ("ant", "bee", "cat"), (2, 0, 1)),
        ("Cat,ANT,bee", ("ant", "bee", "cat"), (2, 0, 1)),
        ("b,c;a", ("a", "b,c"), (1, 0)),
        ("2,10,1", ("1", "10", "2"), (2, 1, 0)),
        ("2,1,0", ("1", "10", "2"), (2, 1, 0)),
        ("only", ("only",), (0,)),
    ],
)
def test_orders_by_name(text, names, order):
    assert class_order(text, len(names), "photos", names) == order


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ant,bee,cta", "'cta'.*Did you mean 'cat'"),
        ("ant,cat", "missing: 'bee'"),
        ("ant,cat,bee,cat", "repeated: 'cat'"),
        ("cat,0,1", "'0'"),
        ("ct", "class order"),
    ],
)
def test_wrong_names_in_an_order_are_told(text, said):
    with pytest.raises(UsageError, match=said):
        class_order(text, 3, "photos", ("ant", "bee", "cat"))


def test_an_order_is_read_from_a_file(tmp_path):
    file = tmp_path / "my-order"
    for content, order in [
        ("cat\n\n dog \r\nant", "cat,dog,ant"),
        ("3\n1\n2\n0\n", "3,1,2,0"),
        ("\ufeffa,b\nc", "a,b;c"),
        ("cat,dog,ant\n", "cat,dog,ant"),
        ("cafe\u0301", "caf\u00e9"),
    ]:
        file.write_text(content, encoding="utf-8")
        assert read_order(str(file)) == order
    for content in (b"", b"\n \n", b"\xff\xfe", b"a;b\nc"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="my-order"):
            read_order(str(file))
    for text in ("none.txt", str(tmp_path), "no/where"):
        with pytest.raises(UsageError, match=text):
            read_order(text)
    assert read_order("n/a,cat") == "n/a,cat"  # a list, whatever its names look like
    assert [read_order(text) for text in ("PODNet-0", "Seed-7", "cat,Dog", "cat")] == [
        "podnet-0",
        "seed-7",
        "cat,Dog",
        "cat",
    ]


def test_orders_are_different_permutations():
    names = ("natural", "podnet-0", "podnet-1", "podnet-2", "seed-0", "seed-4294967295")
    orders = {class_order(name, 100, "cifar100") for name in names}
    assert len(orders) == len(names)
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert {*names[:4], "podnet"} <= set(order_names())


def test_imagenet_lists_are_recognised():
    wnids = published()["imagenet_wnids"]
    assert len(wnids) == 1000
    assert wnids[:100] == sorted(wnids)[:100]
    assert recognise_imagenet(wnids) == "imagenet1000"
    assert recognise_imagenet(wnids[:100]) == "imagenet100"
    assert recognise_imagenet(wnids[1:101]) is None


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("1,,2", "digits", "1,,2"),
        ("naturel", "digits", "Did you mean 'natural'"),
        ("seed-4294967296", "digits", "from 0 to 4294967295"),
        ("podnet-0", "digits", "cifar100 only"),
        ("podnet", "cifar100", "imagenet100 and imagenet1000 only"),
    ],
)
def test_unknown_orders_are_refused(name, data, match):
    with pytest.raises(UsageError, match=match):
        class_order(name, 4, data)
