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
class Training(Speed):
    """What all verbs that train have in common."""

    checkpoint_minutes: float = 5.0
    """Store the run whenever the last checkpoint is so old, 0 for after each epoch; finished stages always are."""
    max_minutes: float | None = None
    """Stop after so many minutes, with exit code 75; what was done is stored and can be continued."""
    tensorboard: bool = False
    """Also write event files for TensorBoard, an optional extra, into the run directory."""


@dataclass(frozen=True, kw_only=True)
class Setting(Training):
    """What a run and all runs of a sweep can be told; fields of an `Experiment` have its names."""

    mix: Literal["mixup", "cutmix", "manifold-mixup"] | None = None
    """Mix images, or maps, of the batch."""
    data: str = "digits"
    """digits, glyphs, cifar100, or the path of an image folder."""
    data_dir: Path | None = None
    """Where CIFAR-100 is, or is downloaded to; else $CCFA_DATA."""
    scenario: str | None = None
    """B50-inc10, B0-inc10, ... or a list of stage sizes such as 5,2,2,1."""
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
    batch_seed: int | None = None
    """Seed of batch order and augmentation; by default the seed of the run."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Other values for options of the method or, with the prefix ccfa. or mix., of what is plugged in; `ccfa list
    options` shows them. In a sweep each method takes those it has."""
    results: Path | None = None
    """A folder such as results/ where the report of each finished run is kept as well, for `ccfa table`."""


@dataclass(frozen=True, kw_only=True)
class Run(Setting):
    """Train a method over all stages and leave a run directory."""

    method: Positional[str]
    """What to train; `ccfa list methods` shows them."""
    ccfa: bool = False
    """Plug in Cross-Class Feature Augmentation."""
    order: str | None = None
    """Class order: natural, seed-1993, podnet-0, ... or a list."""
    seed: int = 0
    """Seed of initialisation and, unless --batch-seed is given, of batches."""
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
class Sweep(Setting):
    """Train several methods, with and without CCFA, over class orders, seeds and further axes; print one table."""

    methods: Positional[tuple[str, ...]]
    """Methods; `all` for every one."""
    ccfa: Literal["off", "on", "both"] = "both"
    """Without CCFA, with it, or both."""
    orders: tuple[str, ...] = ()
    """Class orders, e.g. podnet-0 podnet-1 podnet-2."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each is run with each order."""
    axis: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE,VALUE,... ...")] = ()
    """Run all of it with each value of an option, or of memory, memory_total, mix, scenario or image_size.
    Several axes are combined; values that contain commas are separated by ';'."""
    at_once: int = 1
    """How many runs share the device."""
    out: Path = Path("runs/sweep")
    """Where the run directories go; finished ones found there are not run again, unfinished ones are continued."""


@dataclass(frozen=True, kw_only=True)
class Table(Speed):
    """Show the paper's tables with our values beside them; run what is missing."""

    name: Positional[str] = ""
    """main, memory, ...; `ccfa list tables` shows them. Without a name: how much of each is measured."""
    rows: tuple[str, ...] = ()
    """Only these rows, by method or by label, such as podnet or 'PODNet* + CCFA'."""
    columns: tuple[str, ...] = ()
    """Only these columns, such as '5 tasks'."""
    results: Path = Path("results")
    """The folder of the reports, one for each finished run."""
    write: bool = False
    """Write REPRODUCTION.md and the README's table, in the current folder, from the reports."""
    fill: bool = False
    """Run what is missing, the most valuable first, and keep each report in the results."""
    plan: bool = False
    """Print the missing runs as one command per line. Repeating a command continues its run."""
    slurm: bool = False
    """Submit what is missing as Slurm jobs; needs the extra `cluster`."""
    minutes: float | None = None
    """Stop filling before so many minutes are over, with exit code 75; repeat the command to continue.
    With --slurm: the time limit of a job."""
    at_once: int = 1
    """How many runs share the device, or how many Slurm jobs run at a time."""
    orders: int = 3
    """On how many of the paper's three class orders each cell is shown and run."""
    checkpoint_minutes: float = 5.0
    """Store a run whenever its last checkpoint is so old; finished stages always are."""
    data_dir: Path | None = None
    """Where CIFAR-100 is, or is downloaded to; else $CCFA_DATA."""
    out: Path = Path("runs/tables")
    """Where the run directories go; unfinished ones found there are continued."""
    partition: str | None = None
    """The Slurm partition."""
    sbatch: tuple[str, ...] = ()
    """Further options of Slurm's jobs as NAME=VALUE, such as account=vision."""


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
    estimator: Literal["biased", "unbiased"] = "biased"
    """Of cka: biased values depend on the number of images and compare at equal numbers only."""


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
    | Annotated[Table, subcommand("table")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Figure, subcommand("figure")]
    | Annotated[Page, subcommand("report")]
    | Annotated[List, subcommand("list")]
    | Annotated[Doctor, subcommand("doctor")]
)
