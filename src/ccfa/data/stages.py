"""Which classes arrive when: the order in which classes are learned, and the stages that the order is divided into."""

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate, pairwise
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from ccfa.data.images import some
from ccfa.errors import DataError, UsageError, chosen_name, matching, unknown
from ccfa.files import read_regular

IMAGENET_LISTS = {"imagenet100": 100, "imagenet1000": 1000}  # several subsets are called ImageNet-100: this is PODNet's
_ON_CIFAR = ("podnet-0", "podnet-1", "podnet-2")


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
    if isinstance(increment, Iterable):
        sizes = [initial, *(index(size) for size in increment)]
    else:
        increment, rest = index(increment), num_classes - initial
        if increment < 1 or increment > rest > 0:
            raise UsageError(f"An increment of {increment} does not fit: expected at least 1 and at most {rest}.")
        sizes = [initial, *(min(increment, rest - done) for done in range(0, rest, increment))]
    if min(sizes) < 1 or sum(sizes) != num_classes:
        raise UsageError(
            f"The stage sizes {sizes} add up to {sum(sizes)} classes, expected {num_classes}, with 1 or more per stage."
        )
    boundaries = accumulate(sizes, initial=0)
    return tuple(Stage(k, num_old, num_seen) for k, (num_old, num_seen) in enumerate(pairwise(boundaries)))


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


@cache
def published() -> dict[str, Any]:
    """PODNet's three class orders of CIFAR-100, and the WordNet ids of ImageNet in label order."""
    return dict(json.loads(files("ccfa.data").joinpath("class_orders.json").read_text(encoding="utf-8")))


def order_names() -> dict[str, str]:
    """Every form of class order, with what it means."""
    return {
        "natural": "classes in the order of their labels",
        "seed-N": "a random order by NumPy's RandomState(N); seed-1993 is the one most papers use",
        **{name: f"number {name[-1]} of PODNet's three orders (cifar100 only)" for name in _ON_CIFAR},
        "podnet": "PODNet's order, which is seed-1993 (imagenet100 and imagenet1000 only)",
        "3,1,2,0": "any order, as a list of labels, which begin at 0",
        "cat,dog,ant": "any order, as a list of class names; with ';' between names that contain commas",
        "FILE": "a text file with one class name or one label per line",
    }


def read_order(text: str) -> str:
    """Return a class order that depends on no file: its known name, or the list of what the lines of a file say.

    >>> read_order("Seed-1993"), read_order("cat,dog")
    ('seed-1993', 'cat,dog')
    """
    known = text.strip().lower()
    if re.fullmatch(r"natural|podnet(-\d+)?|seed-\d+", known, re.ASCII):
        return known
    path = Path(os.path.expanduser(text))
    is_list = "," in text or ";" in text
    if not (os.path.isfile(path) or (not is_list and (os.sep in text or path.suffix.lower() in (".txt", ".csv")))):
        return text
    try:
        content = unicodedata.normalize("NFC", read_regular(path, 10**7).decode("utf-8-sig"))
    except (DataError, UnicodeDecodeError) as error:
        reason = error if isinstance(error, DataError) else "is not text in UTF-8"
        raise UsageError(f"The class order {path} {reason}.") from error
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"The class order {path} is empty; expected one class per line.")
    if len(lines) == 1 or not any("," in line or ";" in line for line in lines):
        return ",".join(lines)
    if unusable := [line for line in lines if ";" in line]:
        raise UsageError(f"The class order {path} holds {unusable[0]!r}; a class name with ';' cannot be listed.")
    return ";".join(lines)


def class_order(text: str, num_classes: int, data: str, class_names: Sequence[str] = ()) -> tuple[int, ...]:
    """The labels of `data` in the order that `text` names or lists. `ImageSet.reorder` checks that labels fit.

    A list of all class names is in names, even if these are numbers.
    """
    text = text.strip()
    if text in ("podnet", *_ON_CIFAR):
        fits = IMAGENET_LISTS if text == "podnet" else ["cifar100"]
        if data not in fits:
            raise UsageError(f"Class order {text!r} exists for {' and '.join(fits)} only, not for {data!r}.")
        if text in _ON_CIFAR:
            return tuple(published()["cifar100"][_ON_CIFAR.index(text)])
        text = "seed-1993"
    if text == "natural":
        return tuple(range(num_classes))
    if seeded := re.fullmatch(r"seed-(\d{1,10})", text, re.ASCII):
        if (seed := int(seeded[1])) >= 2**32:
            raise UsageError(f"The seed of a class order must be from 0 to {2**32 - 1}, got {seed}.")
        order = np.arange(num_classes)
        np.random.RandomState(seed).shuffle(order)  # the legacy stream: published orders were drawn from it
        return tuple(order.tolist())
    entries = [entry.strip() for entry in text.split(";" if ";" in text else ",")]
    if sorted(entries) == sorted(class_names):
        return tuple(list(class_names).index(entry) for entry in entries)
    if re.fullmatch(r"[-+\d\s,]+", text, re.ASCII):
        try:
            return tuple(int(label) for label in text.split(","))
        except ValueError:
            raise UsageError(f'Cannot read the class order {text!r}; expected labels such as "3,1,2,0".') from None
    if len(entries) == 1 and not matching(text, class_names):
        raise unknown("class order", text, order_names())
    return _named_order(entries, class_names)


def _named_order(entries: Sequence[str], class_names: Sequence[str]) -> tuple[int, ...]:
    """The labels of classes that are listed by name, each once."""
    names = [chosen_name("class", entry, class_names) for entry in entries]
    faults = {
        "repeated": [name for name, count in Counter(names).items() if count > 1],
        "missing": [name for name in class_names if name not in names],
    }
    if found := [f"{fault}: {some([*map(repr, those)])}" for fault, those in faults.items() if those]:
        raise UsageError(f"A class order must hold each of the {len(class_names)} classes once; {'; '.join(found)}.")
    return tuple(list(class_names).index(name) for name in names)


def recognise_imagenet(class_names: Iterable[str]) -> str | None:
    """Which ImageNet class list these class names are, if any."""
    names = list(class_names)
    return next((name for name, num in IMAGENET_LISTS.items() if names == published()["imagenet_wnids"][:num]), None)
