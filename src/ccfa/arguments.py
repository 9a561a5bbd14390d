"""What can be typed: the verbs of the command line and their options, as records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast, and where."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["float32", "tf32", "bf16"] | None = None
    """Of the backbone; bf16 on a GPU unless asked otherwise, float32 on a CPU."""
    no_compile: bool = False
    """Do not compile the backbone on a GPU."""
    no_graph: bool = False
    """Do not capture steps as CUDA graphs on a GPU."""
    first_stages: Path | None = None
    """A folder where first stages are kept for other runs that share them."""


@dataclass(frozen=True, kw_only=True)
class Run(Speed):
    """Train a method over all stages and leave a run directory."""

    method: Positional[str]
    """What to train; `ccfa list methods` shows them."""
    ccfa: bool = False
    """Plug in Cross-Class Feature Augmentation."""
    mix: Literal["mixup", "cutmix", "manifold-mixup"] | None = None
    """Mix images, or maps, of the batch."""
    data: str = "digits"
    """digits, cifar100, or the path of an image folder."""
    data_dir: Path | None = None
    """Where CIFAR-100 is, or is downloaded to; else $CCFA_DATA."""
    scenario: str | None = None
    """B50-inc10, B0-inc10, ... or a list of stage sizes such as 5,2,2,1."""
    order: str | None = None
    """Class order: natural, seed-1993, podnet-0, ... or a list."""
    memory: int | None = None
    """Exemplars kept of each class."""
    memory_total: int | None = None
    """Exemplars kept in all, shared by the seen classes; instead of --memory."""
    validation: float = 0.0
    """Hold out this fraction of the training images and evaluate on it instead of the test set."""
    image_size: int = 64
    """Side to which the photos of a folder are scaled."""
    seed: int = 0
    """Seed of initialisation and, unless --batch-seed is given, of batches."""
    batch_seed: int | None = None
    """Seed of batch order and augmentation."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Other values for options of the method or, with the prefix ccfa. or mix., of what is plugged in; `ccfa list
    options` shows them."""
    out: Path | None = None
    """The run directory; by default a name made from the experiment, under runs/."""
    reuse: bool = False
    """Show the result of a finished run of this very experiment instead of running it again."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Speed):
    """Train several methods, with and without CCFA, over class orders and seeds, and print one table."""

    methods: Positional[tuple[str, ...]]
    """Methods; `all` for every one."""
    ccfa: Literal["off", "on", "both"] = "both"
    """Without CCFA, with it, or both."""
    data: str = "digits"
    """digits, cifar100, or the path of an image folder."""
    data_dir: Path | None = None
    """Where CIFAR-100 is, or is downloaded to; else $CCFA_DATA."""
    scenario: str | None = None
    """B50-inc10, ... or a list of stage sizes."""
    orders: tuple[str, ...] = ()
    """Class orders, e.g. podnet-0 podnet-1 podnet-2."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each is run with each order."""
    memory: int | None = None
    """Exemplars kept of each class."""
    validation: float = 0.0
    """Hold out this fraction of the training images and evaluate on it instead of the test set."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Other values for options; each method takes those it has."""
    at_once: int = 1
    """How many runs share the device."""
    out: Path = Path("runs/sweep")
    """Where the run directories go; finished ones found there are not run again."""


@dataclass(frozen=True)
class Compare:
    """Show runs side by side."""

    runs: Positional[tuple[Path, ...]]
    """Run directories."""


@dataclass(frozen=True)
class List:
    """Show what there is to choose from."""

    what: Positional[Literal["methods", "datasets", "scenarios", "orders", "backbones", "options"]]
    """The kind of thing; options shows every method's options."""


@dataclass(frozen=True)
class Doctor:
    """Show versions, device and data found, and what to do about what is missing."""

    data_dir: Path | None = None
    """Where to look for CIFAR-100; else $CCFA_DATA."""


Verb = (
    Annotated[Run, subcommand("run")]
    | Annotated[Sweep, subcommand("sweep")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[List, subcommand("list")]
    | Annotated[Doctor, subcommand("doctor")]
)
