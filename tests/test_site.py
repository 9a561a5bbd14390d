"""The documentation site builds without a warning, its notebooks run, and its reference is complete."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ccfa
from ccfa import cli
from commands import environment

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_site_builds_and_is_complete(tmp_path):
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
        pytest.importorskip(package, reason="needs the extra docs: pip install 'ccfa[docs]'")
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees", "docs", tmp_path]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}

    anchors = set(re.findall(r'id="([^"]+)"', pages["api.html"]))
    assert {f"ccfa.{name}" for name in ccfa.__all__} - anchors == set()
    anchors = set(re.findall(r'id="([^"]+)"', pages["commands.html"]))
    assert {f"ccfa-{verb.__name__.lower()}" for verb in get_args(cli.Verb)} - anchors == set()
    assert "--memory-total" in pages["commands.html"]
    assert "recognised: " in pages["notebooks/your_images.html"]
    assert "podnet + CCFA 66.88" in pages["notebooks/one_row.html"]
    assert "<math" in pages["protocols.html"]

    loaded = r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*rel="stylesheet"[^>]*href="([^"]+)"'
    links = {link for text in pages.values() for pair in re.findall(loaded, text) for link in pair}
    assert [link for link in links if "//" in link] == []


def test_no_formula_becomes_a_list():
    """A line of a formula that begins with + is a bullet for Markdown."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/RESULTS.md"]
    assert [
        path.name for path in pages if re.search(r"^ {0,5}\+ ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []
