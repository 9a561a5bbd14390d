"""Options by name: a function's typed signature is its schema, and text is decoded strictly against it."""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ccfa.errors import UsageError, unknown


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Option names and types of a factory."""
    hints = get_type_hints(function)
    return {name: hints[name] for name in inspect.signature(function).parameters}


def decode_options(texts: Mapping[str, str], function: Callable[..., Any], owner: str) -> dict[str, Any]:
    """Typed values for the options given as text; every problem is reported at once."""
    known = schema(function)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in texts.items():
        if name not in known:
            problems.append(str(unknown(f"option of {owner}", name, known)))
            continue
        try:
            values[name] = decode(text, known[name])
        except ValueError as error:
            problems.append(f"Option {name} of {owner}: {error}.")
    if problems:
        raise UsageError("\n".join(problems))
    return values


def decode(text: str, kind: Any) -> Any:
    """A value of that type from text; ValueError says what was expected."""
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
    if origin in (types.UnionType, typing.Union):
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
        value = kind(_plainly_written(text))
    except ValueError:
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"expected a finite number of at least 0, got {text!r}")
    return value


def _plainly_written(text: str) -> str:
    """The text, unless it is a number to Python alone: spaces around it, underscores, digits of other scripts."""
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError
    return text


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def describe(value: Any) -> Any:
    """A value made of parts as JSON can show it: records field by field, functions and classes by name."""
    if isinstance(value, functools.partial):
        return {
            "part": describe(value.func),
            "arguments": [describe(v) for v in value.args],
            **describe(value.keywords),
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"part": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return getattr(value, "__name__", type(value).__name__)  # of somebody's own part only the kind is known
