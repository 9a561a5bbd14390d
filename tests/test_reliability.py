"""The exit codes are those that docs/reliability.md states."""

import re
from pathlib import Path

from ccfa import errors
from ccfa.experiments.stopping import TIME_LIMIT_CODE
from ccfa.reporting.terminal import BROKEN_PIPE_CODE

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def test_exit_codes_are_documented():
    stated = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CcfaError)]
    assert stated == {0, 129, 130, 138, 140, 143, TIME_LIMIT_CODE, BROKEN_PIPE_CODE} | {
        kind.exit_code for kind in kinds
    }
