"""`make docs` builds without a warning and runs the notebooks; the reference is complete; pages fit the window."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from filelock import FileLock

import ccfa
from browsers import headless, look, resize
from ccfa import cli
from commands import environment

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it with this Python, once for all processes of the tests."""
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
        pytest.importorskip(package, reason="needs the extra docs")
    folder = tmp_path_factory.getbasetemp()
    build = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "build"
    with FileLock(f"{build}.lock"):
        if not (build / "whole").exists():
            installed = ["-o", ".venv/installed-dev", f"BIN={Path(sys.executable).parent}"]
            words = ["make", "docs", *installed, f"BUILD={build}"]
            done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (build / "whole").touch()
    return build / "docs"


@pytest.mark.slow
def test_site_is_complete(site):
    pages = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}

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


@pytest.mark.slow
def test_no_page_scrolls_sideways(site, tmp_path):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    wide = []
    with headless(tmp_path) as browser:
        for page in pages:
            look(browser, page)
            for width in (400, 1400):
                resize(browser, width)
                if browser.execute_script("return document.documentElement.scrollWidth") > width:
                    wide.append((str(page.relative_to(site)), width))
    assert wide == []


def test_no_formula_becomes_a_list():
    """A line of a formula that begins with + is a bullet for Markdown."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/RESULTS.md"]
    assert [
        path.name for path in pages if re.search(r"^ {0,5}\+ ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []
