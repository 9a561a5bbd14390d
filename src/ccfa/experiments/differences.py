"""The differences of two configurations, side by side."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 40


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of everything that differs, by its dotted name; None stands for a missing value.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    {'a.c': (2, 3)}
    """
    before, after = dict(leaves(stored)), dict(leaves(now))
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries with its dotted name, `phases.later.0.epochs`.

    Lists are entered if they hold dictionaries or lists. A list of plain values is one value, and so is anything empty.
    """
    items = list(content.items()) if isinstance(content, Mapping) else []
    if isinstance(content, list) and any(isinstance(item, Mapping | list) for item in content):
        items = list(enumerate(content))
    if not items and prefix:
        yield prefix, content
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def two_columns(found: Mapping[str, tuple[Any, Any]], first: str = "stored", second: str = "now") -> str:
    """Return differences as lines of text: the name, the first value, the second value."""
    rows = [("", first, second)]
    rows += [(name, _short(stored), _short(now)) for name, (stored, now) in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {name:{widths[0]}}  {stored:{widths[1]}}  {now}" for name, stored, now in rows)


def _short(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, default=str)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
