"""Examples run: files, docstrings, and pages. Every command that the pages and the Makefile show can be typed."""

import doctest
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import ccfa
from ccfa import ImageSet, cli
from ccfa.data import DATASETS
from ccfa.data.folder import FOLDER_OPTIONS
from ccfa.errors import DataError
from ccfa.evaluation.metrics import METRICS
from ccfa.evaluation.report import COSTS
from ccfa.experiments import tables
from pictures import draw

ROOT = Path(__file__).parents[1]
SOURCE = Path(ccfa.__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
VERBS = {verb.__name__.lower(): verb for verb in get_args(cli.Verb)}
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("ccfa/**/*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def read(name):
    """The text of a page, with fenced commands indented as the others are."""
    text = (ROOT / name).read_text(encoding="utf-8")
    fenced = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return fenced.sub(lambda block: indent(block[1], "    "), text)


def typed(text):
    """The words after `ccfa` of every command line, without comments and redirections."""
    lines = re.findall(
        r"^(?:    |\t(?:\w+=\w+ )?\$\(BIN\)/)(?:ccfa|torchrun .* -m ccfa\.cli) (.*)$", text, flags=re.MULTILINE
    )
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


TAKE_FILES = ("draw_photos", "use_exported_model")  # these have tests of their own
LEARNING = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in TAKE_FILES]
GUIDES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
SHOWN = [words for name in [*GUIDES, "Makefile"] for words in typed(read(name))]


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


def test_shown_targets_and_extras_exist():
    text = "\n".join(map(read, GUIDES))
    targets = set(re.findall(r"^    make ([a-z]+)", text, flags=re.MULTILINE))
    assert targets >= {"demo", "test", "docs"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = {name for names in re.findall(r"-e '\.\[([\w,]+)\]'", text) for name in names.split(",")}
    assert extras >= {"onnx", "timm", "trackio"}
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("README.md", "quickstart.py"),
        ("docs/start.md", "quickstart.py"),
        ("docs/progress.md", "your_own_observer.py"),
    ],
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


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Train for an epoch on a few images of each class, in a folder with photos."""
    for name in ("digits", "glyphs"):
        data = DATASETS[name]

        def few(loader=data.loader):
            def taken(images, count):
                rows = torch.cat([images.rows(label, label + 1)[:count] for label in range(10)])
                return ImageSet(images.images[rows], images.labels[rows], images.class_names[:10])

            train, test = loader()
            return taken(train, 10), taken(test, 4)

        options = {"podnet": {"balanced_epochs": 1}, "fetril": {"head_epochs": 1}, "ranpac": {"projection": 20}}
        small = replace(
            data, loader=few, scenario="7,2,1", options={**data.options, "epochs": 1}, method_options=options
        )
        monkeypatch.setitem(DATASETS._added, name, small)

    def noise(data_dir):
        if data_dir is None:
            raise DataError("CIFAR-100 needs a folder")
        pixels = np.random.default_rng(0).integers(0, 256, (300, 3, 10, 10), dtype=np.uint8)
        return ImageSet(pixels, np.arange(300) % 100, list(map(str, range(100)))).hold_out(0.3, seed=0)

    options = {"backbone": "small", "epochs": 1, "balanced_epochs": 1}
    small = replace(DATASETS["cifar100"], loader=noise, options=options, method_options={"ccfa": {"count": 1}})
    monkeypatch.setitem(DATASETS._added, "cifar100", small)
    monkeypatch.setattr(tables, "steps", tables.steps.__wrapped__)  # else later tests find those of one epoch
    for option, value in {"epochs": 1, "batch_size": 8, "backbone": "small"}.items():
        monkeypatch.setitem(FOLDER_OPTIONS, option, value)
    for folder, classes in {"photos": "abcd", "more-photos": "ef", "test-photos": "abef"}.items():
        draw(tmp_path / folder, classes, count=13)
    draw(tmp_path / "corrected", "abg", seed=1)
    shutil.copytree(tmp_path / "photos" / "a", tmp_path / "holiday")
    for name in ("new.jpg", "photo.jpg"):
        shutil.copy(tmp_path / "photos" / "a" / "00.png", tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "your_own_method.py", tmp_path)
    (tmp_path / "my-order.txt").write_text("\n".join(map(str, reversed(range(10)))), encoding="utf-8")


# What cannot be executed in a test, and what else tests it.
ONLY_PARSED = {
    r"--backbone timm:": "downloads weights; tests/models/test_pretrained.py",
    r"^ccfa (prepare|run .*--data) imagenet100": "needs ImageNet; tests/data/test_imagenet.py prepares a small one",
    r"^ccfa table .* --fill": "hours; tests/experiments/test_tables.py",
    r"^ccfa table main --slurm|^from ccfa.experiments.cluster import": "needs Slurm; tests/experiments/test_cluster.py",
    r"^ccfa sweep all ": "minutes; tests/contracts trains every method",
}
# What has to be there before the page's own commands, and words of the page that name something else in the test.
BEFORE = {
    "docs/deployment.md": ["learn flowers photos/", "learn birds photos/"],
    "docs/distributed.md": ["run podnet --ccfa --data cifar100 --data-dir data"],
    "docs/formats.md": ["run finetune --out runs/podnet"],
    "docs/photos.md": ["run finetune --out runs/podnet"],
}
ONE_ORDER = ("--orders podnet-0 podnet-1 podnet-2", "--orders podnet-0")
OTHERWISE = {
    "docs/notebooks/one_row.md": [ONE_ORDER],
    "docs/reproducing.md": [ONE_ORDER],
    "README.md": [(" photos", " drawn")],
    "docs/photos.md": [
        ("birds more-photos/ --more", "birds corrected/ --more"),
        ("ccfa model runs/podnet birds", "ccfa model runs/podnet of-a-run"),
        ("birds photos/ --method", "mine photos/ --method"),
        ("predict birds new.jpg --plugin", "predict mine new.jpg --plugin"),
        ('"birds"', '"other"'),
        ('backbone="timm:resnet18.a1_in1k"', 'backbone="small"'),
    ],
    "docs/methods/gaussians.md": [
        (" --out runs/first-stages", " --out runs/first-stages --seeds 0"),
        (" --data glyphs", " --data glyphs --seeds 0"),
    ],
    "docs/usage.md": [
        ONE_ORDER,
        ("run mine --plugin mine.py", "run distilled-replay --plugin your_own_method.py"),
        (" --axis ccfa.count", " --seeds 0 --axis ccfa.count"),
        (" --axis memory", " --seeds 0 --axis memory"),
    ],
}
STEPS = re.compile(
    r"^    ((?:ccfa|rm|python examples/\S+) [^\n]*)$|^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL
)


def steps(name):
    """The commands and snippets of a page that can be executed, in its order."""
    text = read(name)
    for shown, played in OTHERWISE.get(name, []):
        text = text.replace(shown, played)
    found = STEPS.findall(text)
    return [step for step in found if not any(re.search(part, "".join(step), re.MULTILINE) for part in ONLY_PARSED)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(steps, GUIDES)], ids=str)
def test_pages_run_from_top_to_bottom(page, tmp_path, call, tiny, monkeypatch):
    """Commands and snippets in the order of the page, in one folder, on small data."""
    for name in ("uvicorn.run", "uvicorn.Server.run"):
        monkeypatch.setattr(name, lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", Mock())
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    registering = ""
    assert [shown for shown, _ in OTHERWISE.get(page, []) if shown not in read(page)] == []
    for line in BEFORE.get(page, []):
        assert call(*line.split())[0] == 0
    for command, code in steps(page):
        if "@register" in code:  # the page's next command takes it from a file
            registering = code
        elif code:
            exec(code, {})
        elif not command.startswith("ccfa "):
            subprocess.run(command, shell=True, check=True)
        else:
            words = [
                word
                for text in shlex.split(command.partition(" > ")[0], comments=True)[1:]
                for word in (sorted(map(str, Path().glob(text))) if "*" in text else [text])
            ]
            if registering and "--plugin" in words:
                Path(words[-1]).write_text(registering)
                registering = ""
            ended, _, told = call(*words, *(["--port", "0"] if words[0] == "serve" else []))
            assert ended == 0, f"{command}: {told}"


def test_page_defines_every_metric():
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    assert [name for name in [*METRICS, *COSTS] if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
