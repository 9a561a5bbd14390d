"""What can be asked for: `Experiment`, `Grid` and `Running`.

An experiment says what to run, a grid names several experiments, and `Running` says how to run them. These records are
the schema of the command line, of config.json and of the Python functions: a new field is a new option of all three.
The module does not import torch, so that `ccfa --help` answers at once.
"""

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import Positional, Suppress, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from ccfa.errors import UsageError


def _pairs(words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"expected NAME=VALUE, got {word!r}")
        if name in pairs:
            raise ValueError(f"{name} is given twice")
        pairs[name] = value
    return pairs


def _axes(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Split the values of each axis at commas, or at ';' where there is one."""
    pairs = _pairs(words)
    axes = {name: tuple(text.removesuffix(";").split(";" if ";" in text else ",")) for name, text in pairs.items()}
    if empty := [name for name, values in axes.items() if not all(values)]:
        raise ValueError(f"{empty[0]}={pairs[empty[0]]} has an empty value")
    return axes


def _words(metavar: str, parse: Any) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda pairs: [f"{name}={value}" for name, value in pairs.items()],
    )


Pairs = Annotated[dict[str, str], _words("NAME=VALUE ...", _pairs)]
Axes = Annotated[dict[str, tuple[str, ...]], _words("NAME=VALUE,VALUE,... ...", _axes)]

Mix = Literal["mixup", "cutmix", "manifold-mixup"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an experiment and a grid of experiments have in common.

    Args:
        data: digits, glyphs, cifar100, imagenet100, imagenet1000, a registered name, or the path of an image folder.
        scenario: B50-inc10 (50 classes first, then 10 per stage), or stage sizes such as 5,2,2,1; by default the data
            set's.
        memory: The number of exemplars to keep per class; by default the method's.
        options: Options of the method; those of CCFA and of --mix begin with ccfa. and mix. See `ccfa list options
            METHOD`.
        mix: Mix the images of a batch (mixup, cutmix) or their feature maps (manifold-mixup).
        memory_total: The number of exemplars in total, shared by the classes seen so far; give it instead of --memory.
        validation: Hold out this fraction of the training images, and evaluate on it instead of the test set.
        epochs: Epochs of the main phase of a stage. This and the next three are options of the method, as with --set.
        batch_size: Images per batch.
        lr: The learning rate at the start.
        backbone: The backbone: see `ccfa list backbones`, or timm:NAME.
        weights: The backbone's first weights: pretrained (the default for timm:NAME), none (random), or a file of
            tensors.
        image_size: The width and height to which photos of a folder are resized; by default 64, or what the model of
            timm takes.
        skip_bad: Skip unreadable files of an image folder instead of stopping.
        recursive: Read the folders inside the class folders of an image folder, too.
        batch_seed: The seed of batch order and augmentation; by default the seed of the run.
    """

    data: str = "digits"
    scenario: str | None = None
    memory: int | None = None
    options: Annotated[Pairs, arg(name="set")] = field(default_factory=dict)
    mix: Mix | None = None
    memory_total: int | None = None
    validation: float = 0.0
    epochs: InitVar[int | None] = None
    batch_size: InitVar[int | None] = None
    lr: InitVar[float | None] = None
    backbone: InitVar[str | None] = None
    weights: str | None = None
    image_size: int | None = None
    skip_bad: bool = False
    recursive: bool = False
    batch_seed: int | None = None

    def __post_init__(self, epochs: int | None, batch_size: int | None, lr: float | None, backbone: str | None) -> None:
        flags = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "backbone": backbone}
        object.__setattr__(self, "options", _all_options(self.options, flags))


Shared = TypeVar("Shared", bound=type[Setting])


def _with_shared_args(record: Shared) -> Shared:
    """Add the Args of `Setting` to the docstring of a record, after its own: `help` shows no docstrings of bases."""
    shared = inspect.cleandoc(Setting.__doc__ or "").partition("Args:\n")[2]
    own, blank, rest = inspect.cleandoc(record.__doc__ or "").partition("\n\nArgs:\n")
    args, _, after = rest.partition("\n\n")
    record.__doc__ = f"{own}{blank}{args}\n{shared}\n\n{after}"
    return record


@dataclass(frozen=True)
class _One:
    method: Annotated[Positional[str], arg(metavar="METHOD")]
    ccfa: bool = False
    order: str | None = None
    seed: int = 0


@_with_shared_args
@dataclass(frozen=True)
class Experiment(Setting, _One):  # the fields of the last base come first
    """What to run: everything that decides the numbers of a run.

    Args:
        method: The name of a method. See `ccfa list methods`.
        ccfa: Add Cross-Class Feature Augmentation to the method.
        order: The class order: natural, seed-1993, podnet-0, ..., a list of classes such as cat,dog, or a file with
            one class per line; by default the data set's. See `ccfa list orders`.
        seed: The seed of the initial weights and, without --batch-seed, of the batches.

    Options may be Python values or text, as on the command line.

    >>> Experiment("podnet", ccfa=True, options={"epochs": 10}).options
    {'epochs': '10'}
    """

    @property
    def name(self) -> str:
        """A directory name: what differs from the defaults. A long name ends with a digest.

        >>> Experiment("podnet", ccfa=True, seed=3).name
        'digits-podnet-ccfa-seed3'
        """
        parts = [Path(self.data).name, self.scenario, self.order, self.method, self.mix, "ccfa" if self.ccfa else None]
        named = {
            "m": self.memory,
            "total": self.memory_total,
            "val": self.validation or None,
            "size": self.image_size if self._has_own_size else None,
            "skip-bad": "" if self.skip_bad else None,
            "recursive": "" if self.recursive else None,
            "seed": self.seed,
            "batches": self.batch_seed,
            "weights=": self.weights and Path(self.weights).stem,
        }
        parts += [f"{name}{value}" for name, value in named.items() if value is not None]
        parts += [f"{name}={text}" for name, text in sorted(self.options.items())]
        text = re.sub(r"[^\w.=+-]+", "_", "-".join(part for part in parts if part))
        whole = text.encode()
        if len(whole) <= 150:
            return text
        return f"{whole[:141].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"

    def arguments(self) -> list[str]:
        """Return the words after `ccfa run` that run this experiment.

        >>> Experiment("podnet", ccfa=True, options={"epochs": "10"}).arguments()
        ['podnet', '--data', 'digits', '--seed', '0', '--ccfa', '--set', 'epochs=10']
        """
        never = ("method",) if self._has_own_size else ("method", "image_size")
        return [self.method, *command_words(self, always=("data", "seed"), never=never)]

    @property
    def _has_own_size(self) -> bool:
        """Whether the image size is another than the default of the backbone."""
        timm = self.options.get("backbone", "").startswith("timm:")
        return self.image_size is not None and (self.image_size != 64 or timm)


@dataclass(frozen=True)
class _Several:
    methods: Annotated[Positional[tuple[str, ...]], arg(metavar="METHOD ...")]
    ccfa: Literal["off", "on", "both"] = "both"
    orders: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    axes: Annotated[Axes, arg(name="axis")] = field(default_factory=dict)


@_with_shared_args
@dataclass(frozen=True)
class Grid(Setting, _Several):
    """What to sweep over: methods, with and without CCFA, axes, class orders and seeds, in all combinations.

    Args:
        methods: The names of methods; `all` means every method.
        ccfa: Run without CCFA, with it, or both.
        orders: Class orders, such as podnet-0 podnet-1 podnet-2, or files; by default the data set's.
        seeds: Seeds. Each is run with each class order.
        axes: Values of an option, or of memory, memory_total, mix, scenario or image_size. Several axes are combined.
            Separate values that contain commas by ';'.

    A method takes those options that it has.

    >>> Grid(("podnet",), memory=2, seeds=(0,), axes={"ccfa.count": ("1", "3")}).ccfa
    'both'
    """


@dataclass(frozen=True, kw_only=True)
class Computing:
    """What to compute with.

    Args:
        device: auto (the GPU if there is one), cpu, cuda or cuda:N.
        precision: The precision of the backbone; by default bf16 on a GPU. On a CPU everything is float32.
        compile: On a GPU the backbone is compiled; --no-compile switches that off.
        graph: On a GPU a step is one CUDA graph; --no-graph switches that off.
    """

    device: str = "auto"
    precision: Literal["float32", "tf32", "bf16"] | None = None
    compile: bool = True
    graph: bool = True


@dataclass(frozen=True, kw_only=True)
class Running(Computing):
    """How to run. This does not change the results, up to the rounding of the chosen precision.

    Args:
        device: auto (the GPU if there is one), cpu, cuda or cuda:N.
        precision: The precision of the backbone; by default bf16 on a GPU. On a CPU everything is float32.
        compile: On a GPU the backbone is compiled; --no-compile switches that off.
        graph: On a GPU a step is one CUDA graph; --no-graph switches that off.
        at_once: How many runs share the device.
        data_dir: The folder of ImageNet, or of CIFAR-100, which is downloaded if it is not there; default $CCFA_DATA.
        first_stages: A folder of trained first stages, for runs that have the same first stage.
        checkpoint_minutes: Minutes between checkpoints; 0 means after every epoch. The end of a stage that
            trains is always saved.
        max_minutes: Stop after this many minutes, with exit code 75. The run is saved and can be continued.
        tensorboard: Write event files for TensorBoard, an optional extra, into the run directory.
        track: Send the numbers to a tracker, an optional extra: trackio (which needs no account), wandb or swanlab.
        project: The tracker's project.
        plugin: A Python file that registers your own methods, backbones or data sets.

    >>> Running(device="cpu", max_minutes=10).checkpoint_minutes
    5.0
    """

    at_once: Suppress[int] = 1
    data_dir: Path | None = None
    first_stages: Path | None = None
    checkpoint_minutes: float = 5.0
    max_minutes: Annotated[float | None, arg(aliases=["--minutes"])] = None
    tensorboard: bool = False
    track: Literal["trackio", "wandb", "swanlab"] | None = None
    project: str = "ccfa"
    plugin: UseAppendAction[tuple[Path, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a model learns from a folder of photos. The first group of options is for a new model and stays with it.

    Args:
        method: The method; by default ranpac, which keeps no photos. See `ccfa list methods`.
        ccfa: Add Cross-Class Feature Augmentation to the method.
        backbone: The backbone, such as timm:resnet18.a1_in1k; by default the method's. See `ccfa list backbones`.
        weights: What the backbone starts from: pretrained (downloaded, for timm), none, or the path of a file. A
            method that freezes the backbone does not train one that starts from weights, unless epochs are set.
        image_size: The width and height of the model's images; by default the backbone's, or 64.
        options: Options of the method. See `ccfa list options`.
        epochs: Epochs of the main phase of a stage. This and the next two are options of the method, as with --set.
        batch_size: Images per batch.
        lr: The learning rate at the start.
        memory: How many images of each class the model keeps, to learn from again; by default the method's.
        memory_mb: How many megabytes of images the model keeps in all; give it instead of --memory.
        seed: The seed of the initial weights, of the batches and of the images that are held out.
        held_out: The fraction of each class's photos that is not trained on but measured with.
        more: Learn from photos of known classes too. Without it they are left out.
        recursive: Read the subfolders of class folders.
        keep: How many earlier states the model's folder keeps, for `ccfa undo`.

    >>> Learning(method="podnet", memory=10).held_out
    0.2
    """

    method: str | None = None
    ccfa: bool = False
    backbone: str | None = None
    weights: str | None = None
    image_size: int | None = None
    options: Annotated[Pairs, arg(name="set")] = field(default_factory=dict)
    epochs: InitVar[int | None] = None
    batch_size: InitVar[int | None] = None
    lr: InitVar[float | None] = None
    memory: int | None = None
    memory_mb: float | None = None
    seed: int | None = None
    held_out: float = 0.2
    more: bool = False
    recursive: bool = False
    keep: int = 5

    def __post_init__(self, epochs: int | None, batch_size: int | None, lr: float | None) -> None:
        flags = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
        object.__setattr__(self, "options", _all_options(self.options, flags))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which cells of the tables to show or to measure."""

    name: Annotated[Positional[str], arg(metavar="TABLE")] = ""
    """main, memory, ...; see `ccfa list tables`. Without a name, show how much of each table is measured."""
    rows: tuple[str, ...] = ()
    """Use only these rows, by method or by label, such as podnet or 'PODNet* + CCFA'."""
    columns: tuple[str, ...] = ()
    """Use only these columns, such as '5 tasks'."""
    orders: int = 3
    """How many of the paper's three class orders to show and run."""
    results: Path = Path("results")
    """The folder of the reports of finished runs."""
    out: Path = Path("runs/tables")
    """The folder of the run directories. Unfinished runs in it are continued."""


def command_words(record: Any, always: Sequence[str] = (), never: Sequence[str] = ()) -> list[str]:
    """Return the words that give the fields of a record their values, where those are not the defaults.

    >>> command_words(Running(device="cpu", graph=False))
    ['--device', 'cpu', '--no-graph']
    """
    needed: dict[str, list[str]] = {name: [] for name in always}
    others, last = [], []
    for one in fields(record):
        value, flag = getattr(record, one.name), "--" + one.name.replace("_", "-")
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        if one.name in never or (value == default and one.name not in always):
            continue
        if isinstance(value, bool):
            others.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, Mapping):
            last += ["--set", *(f"{name}={text}" for name, text in value.items())]
        elif isinstance(value, tuple):
            others += [word for item in value for word in (flag, str(item))]
        else:
            needed.get(one.name, others).extend([flag, str(value)])
    return [*(word for words in needed.values() for word in words), *others, *last]


def _all_options(options: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, str]:
    """Return options as they are typed, together with those that have a flag of their own."""
    given = {name: value for name, value in flags.items() if value is not None}
    if both := [name for name in given if name in options]:
        raise UsageError(f"{both[0]} is given twice: by itself (--{both[0].replace('_', '-')}), and among the options.")
    return {name: _text(value) for name, value in {**options, **given}.items()}


def _text(value: Any) -> str:
    """Return an option's value as it is typed."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, tuple | list) else str(value)
