"""The examples in docstrings run."""

import subprocess
import sys
from pathlib import Path

import ccfa

SOURCE = Path(ccfa.__file__).parents[1]
PROGRAM = """
import doctest, importlib, sys
sys.exit(sum(doctest.testmod(importlib.import_module(name)).failed for name in sys.argv[1:]) > 0)
"""


def test_examples_in_docstrings_run():
    """In a process of their own, where what they register disturbs no other test."""
    files = [path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in files]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
