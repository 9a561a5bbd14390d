"""What there is: `ccfa list` shows what can be chosen, `ccfa doctor` what this machine has."""

import inspect
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS, Stage, describe_data_sets, order_names
from ccfa.errors import UsageError, choose
from ccfa.experiments.experiment import SCENARIOS, schema
from ccfa.experiments.tables import FURTHER, PAPERS, TABLES, cited_only, read_results
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING, Factory
from ccfa.methods.parts import is_frozen, learns_one_class
from ccfa.models import BACKBONES
from ccfa.models.pretrained import import_timm

TRAITS = {
    "exemplars": "it keeps images of old classes",
    "CCFA": "it keeps an old head to learn from, so CCFA can be added",
    "frozen": "the backbone is trained in the first stage only",
    "pretrained": "with `epochs=0` it uses the backbone as it is given, for example a pretrained one",
    "one class": "it also learns from a stage of a single class",
    "measured": "results/ has runs of it on CIFAR-100 or ImageNet",
}
PACKAGES = ("numpy", "scikit-learn", "safetensors", "tyro", "rich", "pillow", "jinja2")


def catalogue(what: str, name: str = "") -> list[Table]:
    """Return what there is to choose from, of one kind; options of one name only, if it is given."""
    if name and what != "options":
        raise UsageError("Only options are listed by name, for example: ccfa list options podnet")
    if what == "methods":
        return [_methods(), _traits()]
    if what == "options":
        factories: dict[str, Callable[..., Any]] = {**METHODS, "ccfa": CCFA, **MIXES}
        chosen = {name: choose("method or plug-in", name, factories)} if name else factories
        return [_options(one, function) for one, function in chosen.items()]
    names: dict[str, Mapping[str, str]] = {
        "datasets": describe_data_sets(),
        "scenarios": SCENARIOS,
        "orders": order_names(),
        "backbones": {name: str(builder) for name, builder in BACKBONES.items()}
        | {"timm:NAME": "a model of timm, pretrained unless --weights says otherwise; see docs/backbones.md"},
        "tables": {name: table.title for name, table in (TABLES | FURTHER).items()},
    }
    table = Table(what, "what it is")
    for name, meaning in names[what].items():
        table.add_row(name, meaning)
    return [table]


def traits(name: str, measured: Collection[str]) -> dict[str, bool]:
    """Return what holds of a method, by the names in `TRAITS`; `measured` names the methods that have results.

    >>> traits("podnet", ["podnet"])
    {'exemplars': True, 'CCFA': True, 'frozen': False, 'pretrained': False, 'one class': True, 'measured': True}
    """
    method = METHODS[name]()
    values = method.memory.quota(1) > 0, not method.no_old_head, *_leaves_backbone(METHODS[name])
    return dict(zip(TRAITS, (*values, learns_one_class(method), name in measured), strict=True))


@cache
def _leaves_backbone(factory: Factory) -> tuple[bool, bool]:
    """Whether a method does not train the backbone after the first stage, and can do without training it there."""
    first = Stage(0, 0, 2)
    if not is_frozen(factory(), first):
        return False, False
    if "epochs" not in inspect.signature(factory).parameters:
        return True, False
    # A method that needs its first stage has a phase of no epochs there.
    return True, all(phase.samples and phase.epochs for phase in factory(epochs=0).phases(first))


def methods_markdown(measured: Collection[str]) -> str:
    """Return the methods with a tick for each trait, as a table in Markdown with the meaning of its columns."""
    lines = [["method", "paper", *TRAITS], ["---", "---", *[":-:"] * len(TRAITS)]]
    for name in METHODS:
        ticks = ["✓" if holds else "" for holds in traits(name, measured).values()]
        lines.append([f"`{name}`", PAPERS.get(name, ""), *ticks])
    meanings = [f"- *{name}*: {meaning}" for name, meaning in TRAITS.items()]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *meanings])


def _methods() -> Table:
    table = Table("method", "what it is", "paper")
    for name, function in METHODS.items():
        first_line = (inspect.getdoc(function) or "").split("\n")[0]
        table.add_row(name, first_line, PAPERS.get(name, ""))
    for name in cited_only():
        table.add_row(name, "in tables with its published values only")
    return table


def _traits() -> Table:
    measured = {result.experiment.method for result in read_results(Path("results"))}
    shown = [name for name in TRAITS if name != "exemplars" and (measured or name != "measured")]
    table = Table("method", "memory", *shown, caption="\n".join(f"{name}: {TRAITS[name]}" for name in shown))
    for name, function in METHODS.items():
        method, held = function(), traits(name, measured)
        kept = method.memory.quota(1)
        memory = "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"
        needed = ", needed" if method.needs_memory else ""
        table.add_row(name, memory + needed, *("yes" if held[trait] else "" for trait in shown))
    return table


def _options(name: str, function: Callable[..., Any]) -> Table:
    prefix = "ccfa." if function is CCFA else "mix." if name in MIXES else ""
    table = Table("option", "type", "default on CIFAR-100", title=name, title_justify="left")
    parameters = inspect.signature(function).parameters
    for option, kind in schema(function).items():
        shown = re.sub(r"(\w+\.)+", "", inspect.formatannotation(kind))
        table.add_row(prefix + option, shown, str(parameters[option].default))
    return table


def findings(data_dir: Path | None) -> Iterator[str]:
    """Yield versions, devices, data and disk space, one line for each, with what to do about what is missing."""
    yield f"ccfa {ccfa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: missing. Try: pip install {package}"
    try:
        yield f"timm {import_timm().__version__}, torchvision {version('torchvision')}"
    except UsageError as error:
        yield f"timm: {error}"
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        yield f"GPU: none found (torch is {build}); runs use the CPU. See 'PyTorch for your machine' in docs/start.md."
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    where = data_dir or os.environ.get("CCFA_DATA")
    looked = f"not in {where}" if where else "no --data-dir and no $CCFA_DATA"
    for name, data in DATASETS.items():
        found = data.find(data_dir) if data.find else None
        missing = f"{looked}. " if data.find else ""
        yield f"{name}: {found or missing + data.description}"
    yield f"disk: {shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free here"
