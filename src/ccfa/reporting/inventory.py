"""What there is: `ccfa list` shows what can be chosen, `ccfa doctor` what this machine has."""

import inspect
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from rich.table import Column, Table

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS, Stage, Transforms, data_set, describe_data_sets, order_names
from ccfa.errors import CcfaError, ModelError, ResourceError, UsageError, chosen_name
from ccfa.evaluation import Report
from ccfa.experiments.experiment import SCENARIOS, chosen_options, experiment_method
from ccfa.experiments.tables import FURTHER, PAPERS, SIZES, TABLES, cited_only
from ccfa.kernels import are_left_out, can_run
from ccfa.learning.acceleration import TINY, memory_errors_explained, threads_for
from ccfa.methods import METHODS
from ccfa.methods.method import EVERYTHING, Factory, Method
from ccfa.methods.parts import is_frozen, learns_one_class
from ccfa.models import BACKBONES
from ccfa.models.pretrained import import_timm
from ccfa.options import meanings, schema
from ccfa.reporting.kernel_check import compare_steps
from ccfa.reporting.tables import counted
from ccfa.settings import Experiment, Mix, Setting

TRAITS = {
    "exemplars": "it keeps images of old classes",
    "CCFA": "it keeps an old head to learn from, so CCFA can be added",
    "frozen": "the backbone is trained in the first stage only",
    "pretrained": "with `epochs=0` it uses the backbone as it is given, for example a pretrained one",
    "one class": "it also learns from a stage of a single class",
    "measured": "results/ has runs of it on CIFAR-100 or ImageNet",
}
NETWORKS = {
    "resnet32-podnet": "PODNet's ResNet-32 for CIFAR: no ReLU on the trunk.",
    "resnet32-ucir": "UCIR's ResNet-32 for CIFAR: no ReLU after the last block.",
    "resnet32-pycil": "PyCIL's ResNet-32 for CIFAR: a ReLU after every block.",
    "resnet32-gdumb": "GDumb's ResNet-32 for CIFAR: a ReLU ends every branch.",
    "resnet18-podnet": "PODNet's ResNet-18 for ImageNet, with a 3x3 stem.",
    "resnet18-ucir": "UCIR's ResNet-18 for ImageNet, with a 7x7 stem.",
    "resnet18-il2a": "IL2A's and PASS's ResNet-18 for CIFAR.",
    "resnet18-cifar": "DER's ResNet-18 for CIFAR: residual branches start at 0.",
    "small": "A ResNet of 3 blocks, for the digits.",
}
OPTIONS_OF = "ccfa list options METHOD --data DATA [--ccfa] [--mix KIND] shows its options."
STEP_SIZE = 128  # images in a step that tries kernels
PACKAGES = ("numpy", "scikit-learn", "safetensors", "tyro", "rich", "pillow", "jinja2")


def catalogue(
    what: str, name: str = "", data: str | None = None, ccfa: bool = False, mix: Mix | None = None
) -> list[Table | str]:
    """Return what there is to choose from, of one kind; or what there is to know of one method.

    Args:
        what: What to list: methods, options and so on.
        name: A method. Options are also those of ccfa or of a kind of mixing.
        data: The data whose values of options are shown; by default those of `ccfa run`.
        ccfa: Whether to show the options of CCFA beside the method's.
        mix: A kind of mixing whose options are shown beside the method's.
    """
    if name and what not in ("methods", "options"):
        raise UsageError("Only methods and options are listed by name, for example: ccfa list options podnet")
    if (data or ccfa or mix) and not (name and what == "options"):
        raise UsageError(
            "--data, --ccfa and --mix are for the options of a method: ccfa list options podnet --data DATA"
        )
    if what == "methods":
        return [_method(name)] if name else [_methods()]
    if what == "options":
        if not name:
            return [f"Name a method: {OPTIONS_OF}\nMethods: {', '.join(METHODS)}"]
        return [_options(name, data or Setting.data, ccfa, mix)]
    names: dict[str, Mapping[str, str]] = {
        "datasets": describe_data_sets(),
        "scenarios": SCENARIOS,
        "orders": order_names(),
        "backbones": {name: NETWORKS.get(name) or _documentation(one)[0] for name, one in BACKBONES.items()}
        | {"timm:NAME": "A model of timm, by default pretrained: docs/backbones.md."},
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


def methods_markdown(measured: Collection[str], folder: Path) -> str:
    """Return the methods with a tick for each trait, as a table in Markdown with the meaning of its columns.

    A method that has a page in the folder, by its own name or by that of its module, is a link to it.
    """
    lines = [["method", "what it is", "paper", *TRAITS], ["---", "---", "---", *[":-:"] * len(TRAITS)]]
    for name in METHODS:
        ticks = ["✓" if holds else "" for holds in traits(name, measured).values()]
        pages = [f"{page}.md" for page in (name, METHODS[name].__module__.rpartition(".")[2])]
        page = next((page for page in pages if (folder / page).exists()), None)
        linked = f"[`{name}`]({page})" if page else f"`{name}`"
        lines.append([linked, _documentation(METHODS[name])[0], PAPERS.get(name, ""), *ticks])
    meanings = [f"- *{name}*: {meaning}" for name, meaning in TRAITS.items()]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *meanings])


def _methods() -> Table:
    measured = _measured_methods()
    shown = [name for name in TRAITS if measured or name != "measured"]  # of our own runs, in the repository
    letters = {name: "1" if name == "one class" else name[0].upper() for name in shown}
    meanings = " · ".join(f"{letters[name]} {name}" for name in shown)
    cited = f"Tables show published values of: {', '.join(cited_only())}"
    table = Table(
        "method",
        "what it is",
        Column("traits", no_wrap=True),
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"\n{meanings}\nccfa list methods METHOD says what that means.\n{OPTIONS_OF}\n{cited}",
        caption_justify="left",
    )
    for name, function in METHODS.items():
        holds = traits(name, measured)
        table.add_row(name, _documentation(function)[0], "".join(letters[one] if holds[one] else " " for one in shown))
    return table


def _measured_methods() -> set[str]:
    """The methods of finished runs whose reports are in results/, on data of the tables."""
    found = set()
    for path in Path("results").rglob("*.json"):
        with suppress(ModelError, OSError, LookupError, TypeError, ValueError):  # whatever else is called so
            report = Report.from_json(path.read_text())
            if report.finished and report.config["experiment"]["data"] in SIZES:
                found.add(str(report.config["experiment"]["method"]))
    return found


def _method(name: str) -> Table:
    """All there is to know of one method, except its options."""
    name = chosen_name("method", name, METHODS)
    method, (first, rest) = METHODS[name](), _documentation(METHODS[name])
    table = Table(show_header=False, title=name, title_justify="left", caption=OPTIONS_OF, caption_justify="left")
    table.add_row("what it is", f"{first} {rest}".strip())
    table.add_row("paper", PAPERS.get(name, ""))
    needed = f"; it needs {method.needs_memory:d} or more per class" if method.needs_memory else ""
    table.add_row("memory", _memory(method) + needed)
    measured = _measured_methods()
    for trait, holds in traits(name, measured).items():
        if holds:
            table.add_row(trait, f"yes: {TRAITS[trait]}")
        elif trait != "measured" or measured:
            table.add_row(trait, f"no: {method.no_old_head}" if trait == "CCFA" else "no")
    return table


def _documentation(function: Callable[..., Any]) -> tuple[str, str]:
    """The first line of a docstring, and what follows up to its sections."""
    first, _, rest = (inspect.getdoc(function) or "").partition("\n")
    return first, " ".join(re.split(r"(?m)^(?:Args|Returns|Example):", rest)[0].split())


def _memory(method: Method) -> str:
    kept = method.memory.quota(1)
    return "none" if not kept else "every image" if method.memory == EVERYTHING else f"{kept} per class"


def _options(name: str, data: str, ccfa: bool, mix: Mix | None) -> Table:
    """The options of a method, of CCFA or of a kind of mixing, with the values that they have on a data set."""
    plug_ins: dict[str, Callable[..., Any]] = {"ccfa": CCFA, **MIXES}
    name = chosen_name("method or plug-in", name, [*METHODS, *plug_ins])
    is_method = name in METHODS
    if is_method:
        experiment_method(Experiment(name, ccfa, data=data, mix=mix))  # what cannot be combined is refused
        shown = {name: METHODS[name]} | {one: plug_ins[one] for one in ("ccfa" if ccfa else "", mix or "") if one}
    else:
        shown = {name: plug_ins[name]}
    where = data_set(data)
    table = Table(
        "option",
        Column("value", max_width=20),
        "what it means",
        title=f"{' + '.join(shown)} on {where.name}",
        title_justify="left",
        caption=(
            "Change a value with --set OPTION=VALUE. --epochs, --batch-size, --lr and --backbone are flags, too."
            if is_method
            else "Change a value with --set OPTION=VALUE."
        ),
        caption_justify="left",
    )
    for one, function in shown.items():
        prefix = "" if one in METHODS else "ccfa." if one == "ccfa" else "mix."
        given = chosen_options(one, data, {}) if one in METHODS else where.method_options.get(one, {})
        known = meanings(function)
        for option, parameter in inspect.signature(function).parameters.items():
            kind = schema(function)[option]
            value = given.get(option, parameter.default)
            table.add_row(prefix + option, _shown(value), f"{known.get(option, '')}{_choices(kind)}")
    return table


def _choices(kind: Any) -> str:
    """What may be given as a value, where the present one does not show it."""
    alternatives = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    names = [str(one) for each in alternatives if get_origin(each) is Literal for one in get_args(each)]
    if names:
        return f" ({', '.join(names)}{', none' if NoneType in alternatives else ''})"
    return " (in Python only)" if kind is Transforms else ""


def _shown(value: Any) -> str:
    """A value as it is typed, with four digits; of a record what is not its default."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):
        return ",".join(map(_shown, value))
    if is_dataclass(value):
        changed = [one for one in fields(value) if one.default not in (MISSING, getattr(value, one.name))]
        return ", ".join(f"{one.name}={_shown(getattr(value, one.name))}" for one in changed) or "normalised only"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def as_settings(words: Sequence[str]) -> list[str]:
    """Return what to write after --set instead of flags that are options of a method, of CCFA or of a kind of mixing.

    >>> as_settings(["--head-epochs", "3", "--milestones=0.5,0.7", "--no-translate", "--unheard-of"])
    ['head_epochs=3', 'milestones=0.5,0.7', 'translate=false']
    """
    kinds: dict[str, Any] = {}
    for prefix, functions in (("mix.", MIXES), ("ccfa.", {"ccfa": CCFA}), ("", METHODS)):
        for function in functions.values():
            kinds |= {prefix + option: kind for option, kind in schema(function).items()}
    settings = []
    for flag, *values in (group.split("\n") for group in re.split(r"\n(?=--)", "\n".join(words))):
        typed, equals, value = flag.removeprefix("--").partition("=")
        option = typed.replace("-", "_")
        texts = [value, *values] if equals else values
        is_negated = not texts and option.startswith("no_")
        names = [prefix + option.removeprefix("no_" if is_negated else "") for prefix in ("", "ccfa.", "mix.")]
        if found := [name for name in names if name in kinds]:
            alone = str(not is_negated).lower() if kinds[found[0]] is bool else "VALUE"
            settings.append(f"{found[0]}={','.join(texts) or alone}")
    return settings


def findings(data_dir: Path | None) -> Iterator[str]:
    """Yield versions, devices, data and disk space, one line for each, with what to do about what is missing."""
    yield f"ccfa {ccfa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}"
    tiny, usual = threads_for(0), threads_for(TINY + 1)
    fixed = "as OMP_NUM_THREADS says" if "OMP_NUM_THREADS" in os.environ else f"{tiny} for tiny images such as digits"
    yield f"CPU: {os.cpu_count()} logical cores; runs use {counted(usual, 'thread')}, {fixed}"
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
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    where = data_dir or os.environ.get("CCFA_DATA")
    looked = f"not in {where}" if where else "no --data-dir and no $CCFA_DATA"
    for name, data in DATASETS.items():
        found = data.find(data_dir) if data.find else None
        missing = f"{looked}. " if data.find else ""
        yield f"{name}: {found or missing + data.description}"
    yield f"disk: {shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free here"


def kernel_findings() -> Iterator[str]:
    """Yield how the kernels' training steps differ from torch's, one line for each GPU and method.

    Raises:
        ResourceError: There is no GPU.
        CcfaError: They differ by more than rounding.
    """
    if not torch.cuda.is_available():
        raise ResourceError("There is no GPU to try the kernels on.")
    wrong = []
    for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
        with torch.cuda.device(device):
            if not can_run(device):
                reason = "CCFA_KERNELS is off" if are_left_out() else "they need compute capability 8.0, and NVRTC"
                yield f"{device}: no CUDA kernels of ours: {reason}"
                continue
            for name in ("podnet", "ucir", "aanet"):
                with memory_errors_explained(STEP_SIZE):
                    found = compare_steps(name, device, STEP_SIZE)
                yield f"{device}: {name} + CCFA {found}"
                if not found.agrees:
                    wrong.append(f"{name} on {device}")
    if wrong:
        raise CcfaError(
            f"The kernels are wrong for {' and '.join(wrong)}. CCFA_KERNELS=off trains without them. Please tell us."
        )
