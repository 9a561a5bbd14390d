"""Class orders: which original label is learned k-th, by name or as a list."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ccfa.errors import UsageError, choose, unknown

_IMAGENET = {"imagenet100": 100, "imagenet1000": 1000}  # several subsets are called ImageNet-100: this is PODNet's
_ON_CIFAR = ("podnet-0", "podnet-1", "podnet-2")


@cache
def _published() -> dict[str, Any]:
    text = files("ccfa.data").joinpath("class_orders.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def order_names() -> dict[str, str]:
    """Every form of class order, with what it means."""
    return {
        "natural": "classes in the order of their labels",
        "seed-N": "a random order by NumPy's RandomState(N); seed-1993 is the one most papers use",
        **{name: f"number {name[-1]} of PODNet's three orders (cifar100 only)" for name in _ON_CIFAR},
        "podnet": "PODNet's order, which is seed-1993 (imagenet100 and imagenet1000 only)",
        "3,1,2,0": "any order, as a list of labels",
    }


def class_order(name: str | Sequence[int], num_classes: int, data: str) -> tuple[int, ...]:
    """The order called `name` for the `num_classes` classes of `data`; order[k] is an original label."""
    if not isinstance(name, str):
        return _checked([int(label) for label in name], num_classes)
    text = name.strip()
    fits = _IMAGENET if text == "podnet" else ["cifar100"]
    if text in ("podnet", *_ON_CIFAR) and data not in fits:
        raise UsageError(f"Class order {text!r} exists for {' and '.join(fits)} only, not for {data!r}.")
    if text in _ON_CIFAR:
        return _checked(_published()["cifar100"][_ON_CIFAR.index(text)], num_classes)
    if text == "natural":
        return tuple(range(num_classes))
    if seeded := re.fullmatch(r"seed-(\d{1,10})", "seed-1993" if text == "podnet" else text, re.ASCII):
        return _shuffled(int(seeded[1]), num_classes)
    if re.fullmatch(r"[-+\d\s,]+", text, re.ASCII):
        try:
            return _checked([int(label) for label in text.split(",")], num_classes)
        except ValueError:
            raise UsageError(f'Cannot read the class order {text!r}; expected labels such as "3,1,2,0".') from None
    raise unknown("class order", text, order_names())


def wnids(name: str) -> tuple[str, ...]:
    """The WordNet ids of "imagenet100" (PODNet's: the first hundred) or "imagenet1000", in label order."""
    return tuple(_published()["imagenet_wnids"][: choose("ImageNet class list", name, _IMAGENET)])


def recognise_imagenet(class_names: Iterable[str]) -> str | None:
    """Which ImageNet class list these class names are, if any."""
    names = tuple(class_names)
    return next((name for name in _IMAGENET if wnids(name) == names), None)


def _shuffled(seed: int, num_classes: int) -> tuple[int, ...]:
    if seed >= 2**32:
        raise UsageError(f"The seed of a class order must be from 0 to {2**32 - 1}, got {seed}.")
    order = np.arange(num_classes)
    np.random.RandomState(seed).shuffle(order)  # the legacy stream: published orders were drawn from it
    return tuple(order.tolist())


def _checked(order: list[int], num_classes: int) -> tuple[int, ...]:
    expected = f"A class order of {num_classes} classes must hold each of 0 to {num_classes - 1} once"
    outside = sorted({label for label in order if not 0 <= label < num_classes})
    repeated = sorted(label for label, count in Counter(order).items() if count > 1)
    missing = sorted(set(range(num_classes)) - set(order))
    faults = {"not a label": outside, "repeated": repeated, "missing": missing}
    found = [f"{fault}: {', '.join(map(str, labels[:10]))}" for fault, labels in faults.items() if labels]
    if found:
        raise UsageError(f"{expected}; got {len(order)} entries ({'; '.join(found)}).")
    return tuple(order)
