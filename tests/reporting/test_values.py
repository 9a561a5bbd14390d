import math

import pytest

from ccfa.reporting.values import counted, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.0 s"),
        (0.04, "0.0 s"),
        (59.4, "59.4 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599, "59 min 59 s"),
        (3661, "1 h 01 min"),
        (90061, "25 h 01 min"),
        (math.nan, "unknown time"),
    ],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_counts():
    assert [counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [counted(number, "class", "es") for number in (1, 3)] == ["1 class", "3 classes"]
