"""Class orders: which original label is learned k-th, by name or as a list."""

import json
import re
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from ccfa.errors import UsageError, unknown

_ON_CIFAR = ("podnet-0", "podnet-1", "podnet-2")


def order_names() -> dict[str, str]:
    """Return every form of class order, with what it means."""
    return {
        "natural": "classes in the order of their labels",
        "seed-N": "a random order by NumPy's RandomState(N); seed-1993 is the one most papers use",
        **{name: f"number {name[-1]} of PODNet's three orders (cifar100 only)" for name in _ON_CIFAR},
        "podnet": "PODNet's order of ImageNet's classes, which is seed-1993",
        "3,1,2,0": "any order, as a list of labels",
    }


def class_order(name: str | Sequence[int], num_classes: int, data: str) -> tuple[int, ...]:
    """Return the order called `name` for the `num_classes` classes of `data`; order[k] is an original label.

    Whether a list holds every label once is checked where it is used, by `ImageSet.reorder`.

    >>> class_order("seed-1993", 4, "digits")
    (0, 2, 3, 1)
    """
    if not isinstance(name, str):
        return tuple(int(label) for label in name)
    text = name.strip()
    if text == "natural":
        return tuple(range(num_classes))
    if text in ("podnet", *_ON_CIFAR) and (text in _ON_CIFAR) != (data == "cifar100"):
        raise UsageError(f"Class order {text!r} does not fit {data!r}: {', '.join(_ON_CIFAR)} are for cifar100 only.")
    if text in _ON_CIFAR:
        published = files("ccfa.data").joinpath("class_orders.json").read_text(encoding="utf-8")
        return tuple(json.loads(published)[text])
    if seeded := re.fullmatch(r"seed-(\d{1,10})", "seed-1993" if text == "podnet" else text, re.ASCII):
        if int(seeded[1]) >= 2**32:
            raise UsageError(f"The seed of a class order must be from 0 to {2**32 - 1}, got {seeded[1]}.")
        order = np.arange(num_classes)
        np.random.RandomState(int(seeded[1])).shuffle(order)  # the legacy stream: published orders were drawn from it
        return tuple(order.tolist())
    if re.fullmatch(r"[-+\d\s,]+", text, re.ASCII):
        try:
            return tuple(int(label) for label in text.split(","))
        except ValueError:
            raise UsageError(f'Cannot read the class order {text!r}; expected labels such as "3,1,2,0".') from None
    raise unknown("class order", text, order_names())
