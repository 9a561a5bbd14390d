"""Numbers as text, the same wherever they are shown."""

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
        """Compute mean and spread of one value per run."""
        return cls(*mean_and_spread(values), **form)

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and spread as text, empty where there is none."""
        mean = "" if math.isnan(self.mean) else f"{self.mean:{self.sign}.{self.decimals}f}"
        return mean, "" if math.isnan(self.spread) else f"{self.spread:.{self.decimals}f}"

    def __str__(self) -> str:
        mean, spread = self.texts
        return f"{mean} ± {spread}" if spread else mean or "-"


def number(value: float, unit: str = "", decimals: int = 1) -> str:
    """Format a value, or a dash where there is none.

    >>> number(1234.56), number(math.nan), number(12.3456, " %", 2)
    ('1,234.6', '-', '12.35 %')
    """
    return f"{value:,.{decimals}f}{unit}" if math.isfinite(value) else "-"


def percent(value: float | None, decimals: int = 2) -> str:
    """Format a fraction as a percentage, or a dash where there is none.

    >>> percent(0.12345), percent(0.5, 1), percent(None)
    ('12.35', '50.0', '-')
    """
    return "-" if value is None else number(100 * value, decimals=decimals)


def duration(seconds: float) -> str:
    """Format a length of time for people.

    >>> duration(59.4), duration(200), duration(3661), duration(math.nan)
    ('59.4 s', '3 min 20 s', '1 h 01 min', 'unknown time')
    """
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun.

    >>> counted(1, "image"), counted(2, "class", "es")
    ('1 image', '2 classes')
    """
    return f"{number} {noun}{'' if number == 1 else plural}"
