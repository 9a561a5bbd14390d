import pytest

from ccfa.experiments.differences import differences, leaves, two_columns

STORED = {"experiment": {"seed": 0, "options": {"lr": "0.1"}}, "order": [0, 1], "gone": 3}
NOW = {"experiment": {"seed": 1, "options": {"lr": "0.1"}}, "order": [1, 0], "new": None}


def test_only_what_differs_is_named():
    assert differences(STORED, STORED) == {}
    assert differences(STORED, NOW) == {"experiment.seed": (0, 1), "gone": (3, None), "order": ([0, 1], [1, 0])}


def test_leaves_name_every_value_once():
    assert dict(leaves({"a": [1, {"b": 2}], "c": "text"})) == {"a.0": 1, "a.1.b": 2, "c": "text"}
    assert dict(leaves({"sizes": [5, 1], "none": [], "nothing": {}})) == {"sizes": [5, 1], "none": [], "nothing": {}}
    assert dict(leaves({})) == {}


def test_differences_are_found_inside_lists_of_parts():
    parts = [{"part": "CCFA", "count": 1}]
    assert differences({"parts": parts}, {"parts": [{**parts[0], "count": 2}]}) == {"parts.0.count": (1, 2)}


@pytest.mark.parametrize("more", [{}, {"a": {}}, [], {"a": 1}])
def test_nothing_that_was_added_is_overlooked(more):
    assert differences({"parts": [{"a": {}}]}, {"parts": [{"a": {}}, more]})


def test_both_values_stand_side_by_side():
    lines = two_columns(differences(STORED, NOW)).splitlines()
    assert lines[0].split() == ["stored", "now"]
    assert lines[1].split() == ["experiment.seed", "0", "1"]
    assert lines[2].split() == ["gone", "3", "-"]
    assert len({line.find(value) for line, value in zip(lines[1:3], ("0", "3"), strict=True)}) == 1


def test_long_values_are_cut():
    assert max(map(len, two_columns({"x": (list(range(100)), "y" * 100)}).splitlines())) < 100
