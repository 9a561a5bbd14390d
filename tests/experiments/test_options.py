import contextlib
import functools
import json
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.augmentation import CCFA
from ccfa.data import Transforms
from ccfa.errors import UsageError
from ccfa.experiments.options import decode, decode_options, describe, plain, schema
from ccfa.methods import METHODS


def factory(*, memory: int = 20, rule: Literal["a", "b"] = "a", lr: float = 0.1, epochs: int = 2) -> None:
    """Takes options of several types."""


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    name: str


def test_schema_names_options_and_types():
    assert schema(factory) == {"memory": int, "rule": Literal["a", "b"], "lr": float, "epochs": int}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_complete_schema(name):
    options = schema(METHODS[name])
    assert {"backbone", "transforms", "epochs", "batch_size", "lr", "weight_decay"} <= options.keys()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("0.5", float, 0.5),
        ("1e-4", float, 1e-4),
        ("7", float, 7.0),
        ("true", bool, True),
        ("false", bool, False),
        ("small", str, "small"),
        ("b", Literal["a", "b"], "b"),
        ("none", int | None, None),
        ("4", int | None, 4),
        ("0.5,0.75", tuple[float, ...], (0.5, 0.75)),
        ("0.5, 0.75", tuple[float, ...], (0.5, 0.75)),
        ("", tuple[float, ...], ()),
        ("1,2", tuple[float, float], (1.0, 2.0)),
    ],
)
def test_text_becomes_the_value_of_its_type(text, kind, value):
    decoded = decode(text, kind)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("1.5", int, "a whole number"),
        ("x", float, "a number"),
        ("", int, "a whole number"),
        ("20 ", int, "a whole number"),
        ("1_000", int, "a whole number"),
        ("\u0663", int, "a whole number"),
        (" 0.1", float, "a number"),
        ("-1", int, "at least 0"),
        ("-0.1", float, "at least 0"),
        ("nan", float, "finite"),
        ("inf", float, "finite"),
        ("1e400", float, "finite"),
        ("True", bool, "true or false"),
        ("1", bool, "true or false"),
        ("c", Literal["a", "b"], "not one of a, b"),
        ("1", tuple[float, float], "2 values"),
        ("1,2,3", tuple[float, float], "2 values"),
        ("1,x", tuple[float, ...], "a number"),
        ("x", Transforms, "Python interface"),
    ],
)
def test_text_that_does_not_fit_is_refused_with_what_was_expected(text, kind, said):
    with pytest.raises(ValueError, match=said):
        decode(text, kind)


def test_whole_numbers_too_large_for_a_float_are_still_numbers():
    assert decode("1" + "0" * 400, int) == 10**400


@given(st.integers(0, 10**30))
def test_whole_numbers_survive_text(value):
    assert decode(str(value), int) == value


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_numbers_survive_text(value):
    assert decode(repr(value), float) == value


@given(st.text())
def test_any_text_is_decoded_or_refused(text):
    for kind in (int, float, bool, int | None, tuple[int, ...], Literal["a"]):
        with contextlib.suppress(ValueError):
            decode(text, kind)


def test_every_problem_is_reported_at_once():
    texts = {"memry": "3", "epochs": "x", "rule": "c", "lr": "0.1"}
    with pytest.raises(UsageError) as caught:
        decode_options(texts, factory, "toy")
    message = str(caught.value)
    assert "Unknown option of toy 'memry'. Did you mean 'memory'?" in message
    assert "Option epochs of toy: expected a whole number, got 'x'." in message
    assert "Option rule of toy" in message
    assert "lr of toy" not in message


def test_good_options_are_decoded_against_the_signature():
    assert decode_options({"lr": "1", "memory": "2"}, factory, "toy") == {"lr": 1.0, "memory": 2}
    assert decode_options({"step_size": "0.1,0.2"}, CCFA, "ccfa") == {"step_size": (0.1, 0.2)}
    assert decode_options({"step_size": "none"}, CCFA, "ccfa") == {"step_size": None}


def test_plain_values_go_through_json_unchanged():
    value = plain(Outer(Inner((1, 2)), "x"))
    assert value == {"inner": {"sizes": [1, 2]}, "name": "x"}
    assert json.loads(json.dumps(value)) == value


def test_parts_are_described_by_name_and_arguments():
    part = functools.partial(factory, 1, memory=3)
    assert describe(part) == {"part": "factory", "arguments": [1], "memory": 3}
    assert describe(Outer(Inner((1,)), "x")) == {
        "part": "Outer",
        "inner": {"part": "Inner", "sizes": [1]},
        "name": "x",
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_described_as_json_without_addresses(name):
    text = json.dumps(describe(METHODS[name]()))
    assert " at 0x" not in text
    assert json.loads(text)["name"] == name
