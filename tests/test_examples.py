"""Examples run, in files and in docstrings, and the commands that the pages and the Makefile show can be typed."""

import doctest
import importlib
import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import ccfa
from ccfa import cli
from ccfa.data import DATASETS

ROOT = Path(__file__).parents[1]
SOURCE = Path(ccfa.__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
VERBS = {verb.__name__.lower(): verb for verb in get_args(cli.Verb)}
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("ccfa/**/*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def typed(text):
    """The words after `ccfa` of every command line, without comments and redirections."""
    lines = re.findall(r"^(?:    |\t(?:\w+=\w+ )?\$\(BIN\)/)ccfa (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


TAKE_FILES = ("draw_photos", "use_exported_model")  # these have tests of their own
LEARNING = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in TAKE_FILES]
SHOWN = [
    words for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"] for words in typed(page.read_text())
]


def test_pages_show_every_verb():
    assert {words[0] for words in SHOWN} == set(VERBS)


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_shown_commands_parse(words, monkeypatch):
    called = []
    for name, verb in VERBS.items():
        monkeypatch.setattr(verb, "__call__", lambda verb, console, name=name: called.append(name))
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(cli, "load_plugin", lambda path: None)
    monkeypatch.setattr(sys, "argv", ["ccfa", *words])
    cli.main()
    assert called == [words[0]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("page", "example"), [("README.md", "quickstart.py"), ("docs/progress.md", "your_own_observer.py")]
)
def test_pages_show_the_examples(page, example):
    text = (ROOT / page).read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert (ROOT / "examples" / example).read_text(encoding="utf-8").endswith(f'"""\n\n{shown}')


@pytest.fixture
def quickly(tmp_path, monkeypatch):
    """Train on the digits with fewer epochs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    digits = DATASETS["digits"]
    methods = {**digits.method_options, "podnet": {"balanced_epochs": 2}}
    shorter = replace(digits, options={**digits.options, "epochs": 3}, method_options=methods)
    monkeypatch.setitem(DATASETS._added, "digits", shorter)


@pytest.mark.slow
@pytest.mark.parametrize("path", LEARNING, ids=lambda path: path.stem)
def test_examples_run_and_learn(path, tmp_path, capsys, quickly):
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    accuracies = [float(value) for value in re.findall(r": (\d+\.\d)%$", output, flags=re.MULTILINE)]
    assert len(accuracies) == len(output.splitlines()) > 0
    assert min(accuracies) > 30  # a tenth would be chance
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_usage_page_s_code_runs(tmp_path, capsys, quickly):
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "usage.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert 0 < float(capsys.readouterr().out) < 1
    assert (tmp_path / "runs" / "several" / "comparison" / "index.html").exists()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
