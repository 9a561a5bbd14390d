"""What can be typed: the verbs of the command line and their options, as records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from ccfa.errors import UsageError


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
class Training(Speed):
    """What all verbs that train have in common."""

    checkpoint_minutes: float = 5.0
    """Store the run whenever the last checkpoint is so old, 0 for after each epoch; finished stages always are."""
    max_minutes: float | None = None
    """Stop after so many minutes, with exit code 75; what was done is stored and can be continued."""
    tensorboard: bool = False
    """Also write event files for TensorBoard, an optional extra, into the run directory."""


@dataclass(frozen=True, kw_only=True)
class Run(Training):
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
    skip_bad: bool = False
    """Leave out files of a folder that are not usable images, instead of stopping."""
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
    """Show the result of a finished run of this very experiment instead of running it again; continue one that is
    not finished."""


@dataclass(frozen=True, kw_only=True)
class Resume(Training):
    """Continue a run where it was stopped; unless asked otherwise on the device and in the precision it began with."""

    run: Positional[Path]
    """The run directory."""
    data_dir: Path | None = None
    """Where CIFAR-100 is; else $CCFA_DATA."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Training):
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
    skip_bad: bool = False
    """Leave out files of a folder that are not usable images, instead of stopping."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Other values for options; each method takes those it has."""
    at_once: int = 1
    """How many runs share the device."""
    out: Path = Path("runs/sweep")
    """Where the run directories go; finished ones found there are not run again, unfinished ones are continued."""


@dataclass(frozen=True)
class Compare:
    """Show runs side by side: a table here, and a page with figures."""

    runs: Positional[tuple[Path, ...]]
    """Run directories or report.json files; runs of one experiment are averaged over class orders and seeds."""
    out: Path | None = None
    """The folder of the page and of the table as CSV, Markdown and LaTeX; by default comparison/ beside the runs."""


@dataclass(frozen=True)
class Figure:
    """Draw a figure of the paper from runs, as PNG and PDF, with its numbers as CSV and a caption."""

    kind: Positional[Literal["tsne", "cka", "accuracy"]]
    """tsne: memory, augmented and training features of one run's first stage; cka: how far each level's maps move from
    the first stage's; accuracy: on the seen classes after each stage."""
    runs: Positional[tuple[Path, ...]]
    """Run directories; runs of one experiment are averaged over class orders and seeds."""
    out: Path | None = None
    """The folder it goes to; by default figures/ in the run or, for several, beside them."""
    data_dir: Path | None = None
    """Where CIFAR-100 is, or is downloaded to; else $CCFA_DATA."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    images: int | None = None
    """At most so many: training images and augmented features for tsne (1,000), test images for cka (5,000)."""
    seed: int = 0
    """Seed of what is drawn at random."""


@dataclass(frozen=True)
class Page:
    """Write the page report.html of runs again, from what their directories hold."""

    runs: Positional[tuple[Path, ...]]
    """Run directories."""


@dataclass(frozen=True)
class List:
    """Show what there is to choose from."""

    what: Positional[Literal["methods", "datasets", "scenarios", "orders", "backbones", "options", "tables"]]
    """The kind of thing; options shows every method's options, tables the paper's tables."""


@dataclass(frozen=True)
class Doctor:
    """Show versions, device and data found, and what to do about what is missing."""

    data_dir: Path | None = None
    """Where to look for CIFAR-100; else $CCFA_DATA."""


Verb = (
    Annotated[Run, subcommand("run")]
    | Annotated[Resume, subcommand("resume")]
    | Annotated[Sweep, subcommand("sweep")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Figure, subcommand("figure")]
    | Annotated[Page, subcommand("report")]
    | Annotated[List, subcommand("list")]
    | Annotated[Doctor, subcommand("doctor")]
)


def gathered(words: list[str]) -> list[str]:
    """What was typed, with all values of --set behind one at the end: it may be repeated and precede the method."""
    kept, values, gathering, empty = [], [], False, False
    for word in words:
        if word == "--set":
            gathering = empty = True
        elif gathering and not word.startswith("-") and (empty or "=" in word):
            values.append(word)
            empty = False
        else:
            kept.append(word)
            gathering = False
    return [*kept, "--set", *values] if values or empty else kept


def given_options(texts: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE pairs as a dictionary."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set takes NAME=VALUE, such as epochs=10; got {text!r}.")
        if name in options:
            raise UsageError(f"--set gives {name} twice.")
        options[name] = value
    return options
