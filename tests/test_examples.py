"""Examples run: files, docstrings, and pages. Every command that the pages and the Makefile show can be typed."""

import doctest
import importlib
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import ccfa
from ccfa import ImageSet, cli
from ccfa.data import DATASETS
from ccfa.data.folder import FOLDER_OPTIONS
from ccfa.evaluation.metrics import METRICS
from ccfa.evaluation.report import COSTS
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


def typed(text):
    """The words after `ccfa` of every command line, without comments and redirections."""
    lines = re.findall(
        r"^(?:    |\t(?:\w+=\w+ )?\$\(BIN\)/)(?:ccfa|torchrun .* -m ccfa\.cli) (.*)$", text, flags=re.MULTILINE
    )
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


TAKE_FILES = ("draw_photos", "use_exported_model")  # these have tests of their own
LEARNING = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in TAKE_FILES]
SHOWN = [
    words for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "Makefile"] for words in typed(page.read_text())
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
    for option, value in {"epochs": 1, "batch_size": 8, "backbone": "small"}.items():
        monkeypatch.setitem(FOLDER_OPTIONS, option, value)
    for folder, classes in {"photos": "abcd", "more-photos": "ef", "test-photos": "abef"}.items():
        draw(tmp_path / folder, classes, count=13)
    draw(tmp_path / "corrected", "abg", seed=1)
    shutil.copytree(tmp_path / "photos" / "a", tmp_path / "holiday")
    shutil.copy(tmp_path / "photos" / "a" / "00.png", tmp_path / "new.jpg")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "your_own_method.py", tmp_path)
    (tmp_path / "my-order.txt").write_text("\n".join(map(str, reversed(range(10)))), encoding="utf-8")


# What makes a command too long for a test, and what else runs or checks it.
ONLY_PARSED = {
    "cifar100": "hours",
    "imagenet": "needs ImageNet; tests/data prepares a small one",
    "timm:": "downloads weights; tests/models has timm",
    "sweep all": "hours",
    "--fill": "hours",
    "--slurm": "needs Slurm; tests/experiments/test_cluster.py",
    "serve": "does not end; tests/deployment serves",
    "export": "tests/deployment exports",
    "--axis": "minutes; tests/experiments/test_sweep.py",
    "--track": "needs a tracker; tests/reporting/test_trackers.py",
    "wandb": "needs an account",
    "experiments.cluster": "needs Slurm; tests/experiments/test_cluster.py",
}
# What has to be there before the page's own commands, and words of the page that name something else in the test.
BEFORE = {
    "photos.md": ["run finetune --out runs/podnet"],
    "deployment.md": ["learn flowers photos/"],
    "formats.md": ["run finetune --out runs/podnet"],
}
OTHERWISE = {
    "photos.md": [
        ("birds more-photos/ --more", "birds corrected/ --more"),
        ("ccfa model runs/podnet birds", "ccfa model runs/podnet of-a-run"),
        ("birds photos/ --method", "mine photos/ --method"),
        ("predict birds new.jpg --plugin", "predict mine new.jpg --plugin"),
        ('"birds"', '"other"'),
        ('backbone="timm:resnet18.a1_in1k"', 'backbone="small"'),
    ],
    "methods/gaussians.md": [(" --out runs/first-stages", " --out runs/first-stages --seeds 0")],
    "usage.md": [("run mine --plugin mine.py", "run distilled-replay --plugin your_own_method.py")],
}
STEPS = re.compile(r"^    ccfa ([^\n]*)$|^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PLAYED = [
    name
    for name in sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    if any(
        not any(part in command + code for part in ONLY_PARSED)
        for command, code in STEPS.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PLAYED, ids=str)
def test_pages_run_from_top_to_bottom(page, tmp_path, call, tiny, monkeypatch):
    """Commands and snippets in the order of the page, in one folder, on small data."""
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for shown, played in OTHERWISE.get(page, []):
        assert shown in text
        text = text.replace(shown, played)
    registering = ""
    for line in BEFORE.get(page, []):
        assert call(*line.split())[0] == 0
    for command, code in STEPS.findall(text):
        if any(part in command + code for part in ONLY_PARSED):
            continue
        if "@register" in code:  # the page's next command takes it from a file
            registering = code
        elif code:
            exec(code, {})
        else:
            words = [
                word
                for text in shlex.split(command.partition(" > ")[0], comments=True)
                for word in (sorted(map(str, Path().glob(text))) if "*" in text else [text])
            ]
            if registering and "--plugin" in words:
                Path(words[-1]).write_text(registering)
                registering = ""
            ended, _, told = call(*words)
            assert ended == 0, f"{command}: {told}"


def test_page_defines_every_metric():
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    assert [name for name in [*METRICS, *COSTS] if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
