"""The stages in which classes arrive: old classes first, labels contiguous."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

from ccfa.errors import UsageError


@dataclass(frozen=True)
class Stage:
    """Stage k of a scenario: the classes [0, num_old) are old, [num_old, num_seen) are new.

    Args:
        index: The number k of the stage. The first stage is 0.
        num_old: How many classes earlier stages brought.
        num_seen: How many classes there are with those of this stage.

    Example:
        >>> from ccfa import Stage
        >>> Stage(index=1, num_old=5, num_seen=7).num_new
        2
    """

    index: int
    num_old: int
    num_seen: int

    @property
    def num_new(self) -> int:
        """How many classes this stage brings."""
        return self.num_seen - self.num_old


def split(num_classes: int, initial: int, increment: int | Sequence[int]) -> tuple[Stage, ...]:
    """Divide the classes into stages.

    Args:
        num_classes: How many classes there are in all.
        initial: How many classes the first stage has.
        increment: How many classes each later stage has; the last one may have fewer. Or a list of all their sizes.

    Returns:
        The stages in order. Together they have all classes.

    Example:
        >>> from ccfa import split
        >>> [stage.num_new for stage in split(10, 5, 2)]
        [5, 2, 2, 1]
        >>> split(10, 5, [4, 1])[1]
        Stage(index=1, num_old=5, num_seen=9)
    """
    num_classes, initial = index(num_classes), index(initial)
    if not 1 <= initial <= num_classes:
        raise UsageError(f"The first stage must have from 1 to all {num_classes} classes, got {initial}.")
    rest = num_classes - initial
    if isinstance(increment, Iterable):
        sizes = [index(size) for size in increment]
        if sum(sizes) != rest:
            raise UsageError(
                f"The stage sizes {[initial, *sizes]} add up to {initial + sum(sizes)} classes, expected {num_classes}."
            )
    else:
        increment = index(increment)
        if increment < 1 or increment > rest > 0:
            raise UsageError(f"An increment of {increment} does not fit: expected at least 1 and at most {rest}.")
        sizes = [min(increment, rest - done) for done in range(0, rest, increment)]
    if min(sizes, default=1) < 1:
        raise UsageError(f"Every stage must have at least 1 class, got the sizes {[initial, *sizes]}.")
    stages = [Stage(0, 0, initial)]
    for size in sizes:
        seen = stages[-1].num_seen
        stages.append(Stage(len(stages), seen, seen + size))
    return tuple(stages)


def parse_scenario(text: str, num_classes: int) -> tuple[Stage, ...]:
    """Return the stages of a scenario such as "B50-inc10", "B0-inc10" (no larger first stage) or "5,2,2,1"."""
    named = re.fullmatch(r"B(\d{1,9})-inc(\d{1,9})", text.strip(), re.IGNORECASE | re.ASCII)
    if named:
        return split(num_classes, int(named[1]) or int(named[2]), int(named[2]))
    try:
        first, *others = (int(size) for size in text.split(","))
    except ValueError:
        raise UsageError(
            f"Cannot read the scenario {text!r}. Expected B<classes of the first stage>-inc<classes per stage> "
            'such as "B50-inc10" or "B0-inc10", or the size of every stage such as "5,2,2,1".'
        ) from None
    return split(num_classes, first, others)
