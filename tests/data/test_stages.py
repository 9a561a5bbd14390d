"""Stages: sizes add up, labels are contiguous, and what does not fit is refused with the numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.data.stages import Stage, parse_scenario, split
from ccfa.errors import UsageError


@pytest.mark.parametrize(
    ("scenario", "num_classes", "sizes"),
    [
        ("B50-inc10", 100, [50, 10, 10, 10, 10, 10]),
        ("B0-inc10", 100, [10] * 10),
        ("b50-INC7", 100, [50, 7, 7, 7, 7, 7, 7, 7, 1]),
        ("5,2,2,1", 10, [5, 2, 2, 1]),
        ("10", 10, [10]),
        (" B10-inc5 ", 10, [10]),
    ],
)
def test_scenarios(scenario, num_classes, sizes):
    assert [stage.num_new for stage in parse_scenario(scenario, num_classes)] == sizes


@given(st.integers(1, 60), st.data())
def test_split_against_a_plain_count(num_classes, data):
    initial = data.draw(st.integers(1, num_classes))
    increment = data.draw(st.integers(1, max(num_classes - initial, 1)))
    seen, expected = initial, [Stage(0, 0, initial)]
    while seen < num_classes:
        after = min(seen + increment, num_classes)
        expected.append(Stage(len(expected), seen, after))
        seen = after
    stages = split(np.int64(num_classes), np.int64(initial), np.int64(increment))
    assert stages == tuple(expected)
    assert all(type(stage.num_seen) is int for stage in stages)
    assert split(num_classes, initial, np.array([stage.num_new for stage in stages[1:]], int)) == stages


@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        ("B120-inc10", "120"),
        ("B50-inc0", "increment of 0"),
        ("B0-inc0", "got 0"),
        ("B50-inc60", "at most 50"),
        ("50,20,20", "90 classes"),
        ("50,60,-10", "-10"),
        ("0,100", "got 0"),
        ("B50", "'B50'"),
        ("50,,50", "'50,,50'"),
        ("", "scenario"),
        ("B50-inc10.5", "10.5"),
    ],
)
def test_what_does_not_fit_is_refused(scenario, named):
    with pytest.raises(UsageError, match=named):
        parse_scenario(scenario, 100)
