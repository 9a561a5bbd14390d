"""The examples run, and what the README and the Makefile tell people to type can be typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa
from ccfa import cli
from ccfa.arguments import Compare, Doctor, Figure, List, Page, Resume, Run, Sweep, Table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
VERBS = {"run": Run, "resume": Resume, "sweep": Sweep, "compare": Compare, "figure": Figure, "report": Page}
VERBS |= {"list": List, "doctor": Doctor, "table": Table}


def section(heading):
    """The README from a heading to the next one of its kind."""
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def typed(text):
    """The words after `ccfa` of every command line, comments left out."""
    lines = re.findall(r"^(?:    |\t\$\(BIN\)/)ccfa (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


IN_README = typed(section("Use"))
IN_DEMO = typed((ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0])


@pytest.fixture
def parsed(monkeypatch):
    """What the command line makes of some words, without doing it."""

    def parse(words):
        verbs = []
        for name in VERBS:
            monkeypatch.setattr(cli, f"_{name}", lambda verb, console: verbs.append(verb))
        monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(sys, "argv", ["ccfa", *words])
        cli.main()
        (verb,) = verbs
        return verb

    return parse


def test_commands_were_found():
    assert len(IN_README) >= 9
    assert {words[0] for words in IN_README} == set(VERBS)
    assert [words[0] for words in IN_DEMO] == ["run", "run", "compare"]


@pytest.mark.parametrize("words", IN_README + IN_DEMO, ids=" ".join)
def test_commands_of_the_readme_and_the_demo_parse(parsed, words):
    assert type(parsed(words)) is VERBS[words[0]]


def test_the_demo_compares_the_runs_it_made(parsed):
    *runs, compare = [parsed(words) for words in IN_DEMO]
    assert compare.runs == tuple(run.out for run in runs)
    assert [run.ccfa for run in runs] == [False, True]


def test_a_command_that_does_not_exist_is_noticed(parsed):
    with pytest.raises(SystemExit) as stopped:
        parsed(["run", "podnet", "--no-such-option"])
    assert stopped.value.code == 2


def test_the_readme_shows_the_quickstart():
    (shown,) = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    docstring, _, code = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8").partition('"""\n\n')
    assert docstring.startswith('"""')
    assert shown == code


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_learn(path, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(ccfa.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r": (\d+\.\d)%$", done.stdout, flags=re.MULTILINE)]
    assert len(accuracies) == len(done.stdout.splitlines()) > 0
    assert min(accuracies) > 30  # a tenth would be chance
    assert list(tmp_path.iterdir()) == []
