"""What there is: `ccfa list` shows what can be chosen, `ccfa doctor` what this machine has."""

import inspect
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS, describe_data_sets, order_names
from ccfa.errors import UsageError, choose
from ccfa.experiments.experiment import SCENARIOS, schema
from ccfa.experiments.tables import FURTHER, PAPERS, TABLES, cited_only
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING
from ccfa.models import BACKBONES
from ccfa.models.pretrained import import_timm

PACKAGES = ("numpy", "scikit-learn", "safetensors", "tyro", "rich", "pillow", "jinja2")


def catalogue(what: str, name: str = "") -> list[Table]:
    """Return what there is to choose from, of one kind; options of one name only, if it is given."""
    if name and what != "options":
        raise UsageError("Only options are listed by name, for example: ccfa list options podnet")
    if what == "methods":
        return [_methods()]
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


def _methods() -> Table:
    table = Table("method", "what it is", "paper", "memory")
    for name, function in METHODS.items():
        method = function()
        kept = method.memory.quota(1)
        memory = "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"
        needed = ", needed" if method.needs_memory else ""
        first_line = (inspect.getdoc(function) or "").split("\n")[0]
        table.add_row(name, first_line, PAPERS.get(name, ""), memory + needed)
    for name in cited_only():
        table.add_row(name, "in tables with its published values only", "", "")
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
        yield f"GPU: none found (torch is {build}); runs use the CPU. See 'PyTorch for your machine' in docs/usage.md."
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
