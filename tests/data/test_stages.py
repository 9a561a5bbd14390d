"""Stages: sizes add up, labels are contiguous, and what does not fit is refused with the numbers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.data.stages import Stage, parse_scenario, split
from ccfa.errors import UsageError


def sizes(stages):
    return [stage.num_new for stage in stages]


@pytest.mark.parametrize(
    ("scenario", "num_classes", "expected"),
    [
        ("B50-inc10", 100, [50, 10, 10, 10, 10, 10]),
        ("B0-inc10", 100, [10] * 10),
        ("B20-inc1", 23, [20, 1, 1, 1]),
        ("b50-INC7", 100, [50, 7, 7, 7, 7, 7, 7, 7, 1]),
        ("5,2,2,1", 10, [5, 2, 2, 1]),
        ("10", 10, [10]),
        (" B1-inc1 ", 2, [1, 1]),
    ],
)
def test_scenarios(scenario, num_classes, expected):
    stages = parse_scenario(scenario, num_classes)
    assert sizes(stages) == expected
    assert [stage.index for stage in stages] == list(range(len(expected)))
    assert stages[0].num_old == 0
    assert stages[-1].num_seen == num_classes
    assert all(a.num_seen == b.num_old for a, b in pairwise(stages))


def test_numpy_integers_are_taken():
    whole = np.arange(11)
    stages = split(whole[10], whole[5], whole[2])
    assert stages == split(10, 5, 2) == split(10, 5, np.array([2, 2, 1]))
    assert all(type(stage.num_seen) is int for stage in stages)


@given(st.integers(1, 60), st.data())
def test_split_against_a_plain_count(num_classes, data):
    initial = data.draw(st.integers(1, num_classes))
    increment = data.draw(st.integers(1, max(num_classes - initial, 1)))
    seen, expected = initial, [Stage(0, 0, initial)]
    while seen < num_classes:
        after = min(seen + increment, num_classes)
        expected.append(Stage(len(expected), seen, after))
        seen = after
    stages = split(num_classes, initial, increment)
    assert stages == tuple(expected)
    assert split(num_classes, initial, sizes(stages)[1:]) == stages


@pytest.mark.parametrize(
    ("scenario", "match"),
    [
        ("B120-inc10", "from 1 to all 100 classes, got 120"),
        ("B50-inc0", "at least 1 class"),
        ("B0-inc0", "got 0"),
        ("B50-inc60", "only 50 remain"),
        ("50,20,20", "add up to 90 classes, expected 100"),
        ("50,60,-10", "at least 1 class, got the sizes"),
        ("0,100", "got 0"),
        ("B50", "B<classes of the first stage>"),
        ("50,,50", "Cannot read the scenario"),
        ("", "Cannot read the scenario"),
        ("B50-inc10.5", "Cannot read the scenario"),
    ],
)
def test_what_does_not_fit_is_refused(scenario, match):
    with pytest.raises(UsageError, match=match):
        parse_scenario(scenario, 100)
