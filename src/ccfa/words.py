"""The words of the command line that tyro does not read as we want them."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ccfa.errors import UsageError


def gathered(words: list[str]) -> list[str]:
    """What was typed, with the values of --set and --axis moved to the end: both may be repeated and stand anywhere."""
    kept: list[str] = []
    values: dict[str, list[str]] = {}
    flag, is_first = "", False
    for word in words:
        if word in ("--set", "--axis"):
            flag, is_first = word, True
            values.setdefault(flag, [])
        elif flag and not word.startswith("-") and (is_first or "=" in word):
            values[flag].append(word)
            is_first = False
        else:
            kept.append(word)
            flag = ""
    return kept + [word for flag, texts in values.items() for word in (flag, *texts)]


def given_options(texts: tuple[str, ...], flag: str = "--set", example: str = "epochs=10") -> dict[str, str]:
    """The NAME=VALUE pairs of --set, or of another flag, as a dictionary."""
    return _pairs(texts, flag, f"NAME=VALUE, such as {example}")


def given_axes(texts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The values of each --axis; a ';' separates values that contain commas, and one value may end with it."""
    pairs = _pairs(texts, "--axis", "NAME=VALUE,VALUE,..., such as memory=5,10,20")
    axes = {name: tuple(text.removesuffix(";").split(";" if ";" in text else ",")) for name, text in pairs.items()}
    for name, values in axes.items():
        if not all(values):
            raise UsageError(f"--axis {name}={pairs[name]} has an empty value.")
    return axes


def typed(record: Any, names: Iterable[str]) -> list[str]:
    """The words that give these fields of a record their values, where those are not the defaults."""
    words: list[str] = []
    for field in fields(record):
        value, option = getattr(record, field.name), "--" + field.name.replace("_", "-")
        if field.name in names and value != field.default:
            words += [option] if value is True else [option, str(value)]
    return words


def _pairs(texts: tuple[str, ...], flag: str, expected: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} takes {expected}; got {text!r}.")
        if name in pairs:
            raise UsageError(f"{flag} gives {name} twice.")
        pairs[name] = value
    return pairs
