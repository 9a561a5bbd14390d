"""Numbers as text: the same wherever they are shown."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ccfa.evaluation import mean_and_spread


class Value(NamedTuple):
    """The mean of several runs and their sample standard deviation; NaN where there is none.

    >>> str(Value.of([1.0, 3.0])), str(Value.of([1.0], sign="+")), str(Value.of([]))
    ('2.00 ± 1.41', '+1.00', '-')
    """

    mean: float
    spread: float
    decimals: int = 2
    sign: str = ""

    @classmethod
    def of(cls, values: Sequence[float], **form: Any) -> "Value":
        """Mean and spread of one value per run."""
        return cls(*mean_and_spread(values), **form)

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and spread as they are printed; empty where there is none."""
        mean = "" if math.isnan(self.mean) else f"{self.mean:{self.sign}.{self.decimals}f}"
        return mean, "" if math.isnan(self.spread) else f"{self.spread:.{self.decimals}f}"

    def __str__(self) -> str:
        mean, spread = self.texts
        return f"{mean} ± {spread}" if spread else mean or "-"


def percent(value: float | None, decimals: int = 2) -> str:
    """A fraction as a percentage; a dash where there is no value.

    >>> percent(0.12345), percent(0.5, 1), percent(None)
    ('12.35', '50.0', '-')
    """
    return "-" if value is None else str(Value(100 * value, math.nan, decimals))


def duration(seconds: float) -> str:
    """Seconds as people say them: 3 min 20 s."""
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 image`, `2 images`."""
    return f"{number} {noun}{'' if number == 1 else plural}"
