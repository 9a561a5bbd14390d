"""docs/reliability.md and the tests agree: each row is covered by the tests it names, or says why it is not."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
SIZES = {"K": 21, "D": 10, "C": 16, "P": 8, "E": 25, "G": 8, "N": 8, "O": 8, "S": 9}
ROWS = [f"{letter}{number}" for letter, size in SIZES.items() for number in range(1, size + 1)]
STATED = dict(re.findall(r"^\| ([A-Z]\d+) \|.*\| (.*?) \|$", PAGE, re.MULTILINE))


def marked() -> dict[str, set[str]]:
    """The names of the tests that carry each row."""
    found = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", []):
                if ast.unparse(decorator).startswith("pytest.mark.row("):
                    for row in decorator.args:
                        found[row.value].add(node.name)
    return found


MARKED = marked()


def test_every_row_is_there_once():
    assert sorted(STATED) == sorted(ROWS)
    assert len(re.findall(r"^\| [A-Z]\d+ \|", PAGE, re.MULTILINE)) == len(ROWS) == 113


def test_no_test_carries_a_row_that_does_not_exist():
    assert set(MARKED) <= set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_page_names_the_tests_of_a_row_or_says_why_there_are_none(row):
    named = set(re.findall(r"`(test_\w+)`", STATED[row]))
    assert named == MARKED.get(row, set())
    assert named or re.match(r"not covered: .{10}", STATED[row])


def test_exit_codes_are_those_of_the_page():
    from ccfa import errors
    from ccfa.experiments.stopping import TIME_LIMIT_CODE
    from ccfa.reporting.output import BROKEN_PIPE_CODE

    stated = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CcfaError)]
    assert stated == {0, 129, 130, 138, 140, 143, TIME_LIMIT_CODE, BROKEN_PIPE_CODE} | {
        kind.exit_code for kind in kinds
    }
