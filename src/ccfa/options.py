"""Options: the typed signature of a function is the schema of its options, and its docstring says what they mean.

Text and Python values are checked against the same types.
"""

import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ccfa.errors import UsageError, unknown


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the option names and types of a factory."""
    hints = get_type_hints(function)
    return {name: hints[name] for name in inspect.signature(function).parameters}


def meanings(function: Callable[..., Any]) -> dict[str, str]:
    """Return what each option means: the Args of the docstring, after those of what the function is built on.

    >>> def plant(trees: int = 3) -> None:
    ...     '''Plant trees.
    ...
    ...     Args:
    ...         trees: How many trees
    ...             are planted.
    ...     '''
    >>> meanings(plant)
    {'trees': 'How many trees are planted.'}
    """
    owners = reversed(function.__mro__) if isinstance(function, type) else [function]
    found: dict[str, str] = dict(getattr(function, "inherited_meanings", {}))
    for owner in owners:
        _, _, rest = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")
        section = re.split(r"\n(?=\S)", rest)[0]
        for entry in re.split(r"\n(?=    \S)", section):
            name, colon, text = entry.strip().partition(":")
            if colon:
                found[name] = " ".join(text.split())
    return found


def decode_options(texts: Mapping[str, str], function: Callable[..., Any], owner: str) -> dict[str, Any]:
    """Return typed values for the options given as text; every problem is reported at once."""
    return _each(texts, schema(function), owner, decode)


def checked(values: Mapping[str, Any], known: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the values of options, if each has the type that is known of it; every problem is reported at once."""
    return _each(values, known, owner, check)


def _each(
    given: Mapping[str, Any], known: Mapping[str, Any], owner: str, convert: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name not in known:
            problems.append(str(unknown(f"option of {owner}", name, known)))
            continue
        try:
            values[name] = convert(value, known[name])
        except ValueError as error:
            problems.append(f"Option {name} of {owner}: {error}.")
    if problems:
        raise UsageError("\n".join(problems))
    return values


def decode(text: str, kind: Any) -> Any:
    """Return a value of that type from text; a ValueError says what was expected."""
    origin = get_origin(kind)
    if origin is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{text!r} is not one of {', '.join(map(str, get_args(kind)))}")
        return text
    if origin is tuple:
        item, *rest = get_args(kind)
        parts = text.split(",") if text else []
        if rest and rest != [...] and len(parts) != 1 + len(rest):
            raise ValueError(f"expected {1 + len(rest)} values separated by commas, got {text!r}")
        return tuple(decode(part.strip(), item) for part in parts)
    if origin in (UnionType, Union):
        if text == "none":
            return None
        return decode(text, next(option for option in get_args(kind) if option is not type(None)))
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, got {text!r}")
        return text == "true"
    if kind in (int, float):
        return _number(text, kind)
    if kind is str:
        return text
    raise ValueError("it cannot be given as text; use the Python interface")


def _number(text: str, kind: type[int] | type[float]) -> float:
    try:
        if not text.isascii() or "_" in text or text != text.strip():
            raise ValueError  # a number to Python alone
        value = kind(text)
    except ValueError:
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"expected a finite number of at least 0, got {text!r}")
    return value


def check(value: Any, kind: Any) -> Any:
    """Return a Python value, if it is of that type; a ValueError says what was expected.

    The rules are those of `decode`: numbers are finite and at least 0, and a truth value is no number.
    """
    origin, expected = get_origin(kind), ""
    if origin is Literal:
        expected = "" if value in get_args(kind) else f"one of {', '.join(map(str, get_args(kind)))}"
    elif origin is tuple:
        item, *rest = get_args(kind)
        if not isinstance(value, tuple | list) or (rest and rest != [...] and len(value) != 1 + len(rest)):
            expected = "a tuple" if not rest or rest == [...] else f"a tuple of {1 + len(rest)} values"
        else:
            for one in value:
                check(one, item)
    elif origin in (UnionType, Union):
        if not (value is None and NoneType in get_args(kind)):
            _check_any(value, [one for one in get_args(kind) if one is not NoneType])
    elif kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
            expected = "a whole number" if kind is int else "a number"
        elif not 0 <= float(value) < math.inf:
            expected = "a finite number of at least 0"
        elif not isinstance(value, int | float):
            value = kind(value)  # NumPy's
    elif isinstance(kind, type) and not isinstance(value, kind):
        expected = "true or false" if kind is bool else "text" if kind is str else f"{kind.__name__}"
    elif origin is Callable and not callable(value):
        expected = "a function"
    if expected:
        raise ValueError(f"expected {expected}, got {value!r:.80}")
    return value


def _check_any(value: Any, kinds: Sequence[Any]) -> None:
    problems = []
    for kind in kinds:
        try:
            check(value, kind)
        except ValueError as error:
            problems.append(error)
    if len(problems) == len(kinds):
        raise problems[0]
