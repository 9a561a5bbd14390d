"""Numbers over several runs, durations and counts, spelled the same wherever they are shown."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ccfa.evaluation import mean_and_spread


class Value(NamedTuple):
    """What several runs gave: mean and sample standard deviation, NaN where there is none."""

    mean: float
    spread: float
    decimals: int = 2
    sign: str = ""

    @classmethod
    def of(cls, values: Sequence[float], **form: Any) -> "Value":
        """The mean and spread of one value a run."""
        return cls(*mean_and_spread(values), **form) if len(values) else cls(math.nan, math.nan, **form)

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and spread as they are printed everywhere; empty where there is none."""
        mean = "" if math.isnan(self.mean) else f"{self.mean:{self.sign}.{self.decimals}f}"
        return mean, "" if math.isnan(self.spread) else f"{self.spread:.{self.decimals}f}"

    def __str__(self) -> str:
        mean, spread = self.texts
        return f"{mean} ± {spread}" if spread else mean or "-"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """So many of something: `1 image`, `2 images`."""
    return f"{number} {noun}{'' if number == 1 else plural}"
