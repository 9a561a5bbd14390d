"""The examples run, and what the pages and the Makefile tell people to type can be typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa
from ccfa import cli
from ccfa.cli import Compare, Doctor, Figure, List, Page, Resume, Run, Sweep, Table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
VERBS = {"run": Run, "resume": Resume, "sweep": Sweep, "compare": Compare, "figure": Figure, "report": Page}
VERBS |= {"list": List, "doctor": Doctor, "table": Table}


def typed(text):
    """The words after `ccfa` of every command line, without comments and redirections."""
    lines = re.findall(r"^(?:    |\t(?:\w+=\w+ )?\$\(BIN\)/)ccfa (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


IN_PAGES = [words for page in sorted((ROOT / "docs").glob("*.md")) for words in typed(page.read_text(encoding="utf-8"))]
IN_DEMO = typed((ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0])


@pytest.fixture
def parsed(monkeypatch):
    """What the command line makes of some words, without doing it."""

    def parse(words):
        verbs = []
        for verb in VERBS.values():
            monkeypatch.setattr(verb, "__call__", lambda verb, console: verbs.append(verb))
        monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(sys, "argv", ["ccfa", *words])
        cli.main()
        (verb,) = verbs
        return verb

    return parse


def test_commands_were_found():
    assert {words[0] for words in IN_PAGES} == set(VERBS)
    assert [words[0] for words in IN_DEMO] == ["sweep"]


@pytest.mark.parametrize("words", IN_PAGES + IN_DEMO, ids=" ".join)
def test_commands_of_pages_parse(parsed, words):
    assert type(parsed(words)) is VERBS[words[0]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_unknown_option_is_refused(parsed):
    with pytest.raises(SystemExit) as stopped:
        parsed(["run", "podnet", "--no-such-option"])
    assert stopped.value.code == 2


def test_readme_shows_the_quickstart():
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
