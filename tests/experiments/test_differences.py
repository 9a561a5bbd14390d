import pytest

from ccfa.experiments.run_directory import differences, leaves, two_columns

STORED = {"experiment": {"seed": 0, "options": {"lr": "0.1"}}, "order": [0, 1], "gone": 3}
NOW = {"experiment": {"seed": 1, "options": {"lr": "0.1"}}, "order": [1, 0], "new": None}


def test_only_what_differs_is_named():
    assert differences(STORED, STORED) == {}
    assert differences(STORED, NOW) == {"experiment.seed": (0, 1), "gone": (3, None), "order": ([0, 1], [1, 0])}
    assert differences({"a": [{"count": 1}]}, {"a": [{"count": 2}]}) == {"a.0.count": (1, 2)}


@pytest.mark.parametrize("more", [{}, {"a": {}}, [], {"a": 1}])
def test_nothing_that_was_added_is_overlooked(more):
    assert differences({"parts": [{"a": {}}]}, {"parts": [{"a": {}}, more]})


def test_leaves_name_every_value_once():
    assert dict(leaves({"a": [1, {"b": 2}], "c": "text"})) == {"a.0": 1, "a.1.b": 2, "c": "text"}
    assert dict(leaves({"sizes": [5, 1], "none": [], "nothing": {}})) == {"sizes": [5, 1], "none": [], "nothing": {}}


def test_both_values_stand_side_by_side_and_long_ones_are_cut():
    lines = two_columns(differences(STORED, NOW)).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["stored", "now"],
        ["experiment.seed", "0", "1"],
        ["gone", "3", "-"],
    ]
    assert max(map(len, two_columns({"x": (list(range(100)), "y" * 100)}).splitlines())) < 100
