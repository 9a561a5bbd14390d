"""A number over several runs, spelled the same wherever it is shown."""

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
