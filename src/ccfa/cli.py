"""The command line: parse, call, print."""

import io
import itertools
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
    Positional,
    Suppress,
    UseAppendAction,
    arg,
)

from ccfa import __version__
from ccfa.errors import CcfaError, ResourceError, Stopped, UsageError, nearest, one_line, printable, unknown
from ccfa.plugins import load_plugin
from ccfa.settings import Computing, Experiment, Grid, Learning, Mix, Pairs, Running, Wanted

if TYPE_CHECKING:
    from rich.console import Console

# A verb is a record of what can be typed, and is called to do it. torch, scikit-learn and everything built on them are
# imported when a verb is called: `ccfa --help` answers at once.


@dataclass(frozen=True, kw_only=True)
class _TakesPlugins:
    plugin: UseAppendAction[tuple[Path, ...]] = ()
    """A Python file that registers your own methods, backbones or data sets."""


@dataclass(frozen=True)
class Run:
    """Train a method over all stages and write a run directory."""

    experiment: OmitArgPrefixes[Experiment]
    running: OmitArgPrefixes[Running]
    out: Path | None = None
    """The run directory; by default a folder in runs/ that is named after the experiment."""
    reuse: bool = False
    """If the directory holds this experiment, continue it, or show its result if it is finished."""
    results: Path | None = None
    """Copy the report of the finished run to this folder, such as results/, for `ccfa table`."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.showing import run

        new = not self.reuse
        run(self.experiment, self.out, self.running, results=self.results, new=new, console=console)


@dataclass(frozen=True)
class Resume:
    """Continue a stopped run, by default on the device and in the precision it began with."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run directory."""
    running: OmitArgPrefixes[Running]

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.showing import resume

        resume(self.run, self.running, console=console)


@dataclass(frozen=True)
class Sweep:
    """Train several methods, with and without CCFA, over class orders, seeds and other axes, and compare them."""

    grid: OmitArgPrefixes[Grid]
    running: OmitArgPrefixes[Running]
    at_once: int = 1
    """How many runs share the device."""
    out: Path = Path("runs/sweep")
    """The folder of the run directories. Finished runs in it are not repeated, and unfinished ones are continued."""
    results: Path | None = None
    """Copy the report of each finished run to this folder, such as results/, for `ccfa table`."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.showing import sweep

        running = replace(self.running, at_once=self.at_once)
        sweep(self.grid, self.out, running, results=self.results, console=console)


@dataclass(frozen=True)
class Table:
    """Show tables of the paper and of other published numbers with our values beside them, or run what is missing."""

    cells: OmitArgPrefixes[Wanted]
    running: OmitArgPrefixes[Running]
    fill: bool = False
    """Run what is missing, the most important first, and keep each report in the results folder."""
    plan: bool = False
    """Print the missing runs as one command per line. Repeating a command continues its run."""
    slurm: bool = False
    """Submit what is missing as Slurm jobs, with --minutes as their time limit. This needs the extra `cluster`."""
    write: bool = False
    """Write REPRODUCTION.md and the tables of the READMEs in the current folder, from the reports."""
    at_once: int = 1
    """How many runs share the device, or how many Slurm jobs run at the same time."""
    partition: str | None = None
    """The Slurm partition."""
    sbatch: Pairs = field(default_factory=dict)
    """Other options of the Slurm jobs, such as account=vision."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.paper_tables import fill_shown, print_plan, show_tables, submit_jobs, write_pages

        if self.fill + self.plan + self.slurm + self.write > 1:
            raise UsageError("Choose one of --fill, --plan, --slurm and --write.")
        if (self.partition or self.sbatch) and not self.slurm:
            raise UsageError("--partition and --sbatch belong to --slurm.")
        if self.running.max_minutes is not None and not (self.fill or self.slurm):
            raise UsageError("--minutes belongs to --fill or --slurm.")
        if (self.cells.rows or self.cells.columns) and not self.cells.name:
            raise UsageError("Name a table whose rows or columns you want, for example: ccfa table main --rows podnet")
        wanted, running = self.cells, replace(self.running, at_once=self.at_once)
        if self.write:
            write_pages(wanted, console)
        elif self.plan:
            print_plan(wanted, running, console)
        elif self.slurm:
            submit_jobs(wanted, running, console, self.partition, self.sbatch)
        else:
            if self.fill:
                fill_shown(wanted, running, console)
            show_tables(wanted, console)


@dataclass(frozen=True)
class Compare:
    """Compare runs: print a table, and write a page with figures."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories or report.json files. Runs of one experiment are averaged over class orders and seeds."""
    out: Path | None = None
    """The folder of the page and of the table as CSV, Markdown and LaTeX; by default comparison/ beside the runs, or
    runs/comparison/ for report files."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.comparison import common_folder, compare, show_comparison

        comparison = compare(self.runs)
        show_comparison(comparison, self.out or common_folder(comparison.entries), console)


@dataclass(frozen=True)
class Figure(_TakesPlugins):
    """Draw a figure of the paper from runs, as PNG and PDF, with its numbers as CSV and a caption."""

    kind: Positional[Literal["tsne", "cka", "accuracy"]]
    """tsne: features of one run's first stage; cka: how later stages change its maps; accuracy: after each stage."""
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories. Runs of one experiment are averaged over class orders and seeds."""
    out: Path | None = None
    """The folder of the figure; by default figures/ in the run directory, beside several runs, or in runs/ for report
    files."""
    data_dir: Path | None = None
    """The folder of CIFAR-100, which is downloaded if it is not there; by default $CCFA_DATA."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    images: int | None = None
    """The largest number of images: training images for tsne (default 1,000), test images for cka (default 5,000)."""
    seed: int = 0
    """The seed of random choices."""
    estimator: Literal["biased", "unbiased"] = "biased"
    """The estimator of cka. Compare biased values only if they are of the same number of images."""

    def __call__(self, console: "Console") -> None:
        from ccfa.learning.acceleration import pick_device
        from ccfa.reporting.figures import FigureOptions, write_figure

        options = FigureOptions(self.data_dir, pick_device(self.device), self.images, self.seed, self.estimator)
        with console.status("Looking at the runs; networks of many stages take minutes on a CPU."):
            files = write_figure(self.kind, self.runs, self.out, options)
        for line in [*(f"note: {note}" for note in files.notes), files.caption, *files.paths]:
            console.print(str(line), soft_wrap=True)


@dataclass(frozen=True)
class Report:
    """Write the page report.html of runs again, from the files in their directories."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.page import write_report

        if not self.runs:
            raise UsageError("Name at least one run directory, e.g. ccfa report runs/*")
        for path in self.runs:
            console.print(f"Report: {write_report(path)}", soft_wrap=True)


_MODEL = Annotated[Positional[Path], arg(metavar="MODEL")]


@dataclass(frozen=True)
class Learn(_TakesPlugins):
    """Make a model from a folder of photos, or teach an existing model the folder's new classes."""

    model: _MODEL
    """The model's folder. A new one is created."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """A folder with one subfolder of photos per class."""
    learning: OmitArgPrefixes[Learning]
    computing: OmitArgPrefixes[Computing]
    dry_run: bool = False
    """Say what was found and how long learning would take, and stop there."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import learn_shown

        running = Running(**vars(self.computing))
        learn_shown(self.model, self.folder, self.learning, running, console, self.dry_run)


@dataclass(frozen=True)
class Predict(_TakesPlugins):
    """Predict the classes of photos, with confidences."""

    model: _MODEL
    """The model's folder."""
    paths: Annotated[Positional[tuple[str, ...]], arg(metavar="PATH ...")]
    """Photos, folders, or - to read paths from the standard input: one per line, or separated by NUL bytes."""
    format: Literal["table", "csv", "json"] = "table"
    """A table, CSV, or one line of JSON per photo."""
    top: int = 5
    """How many classes to list for each photo."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import predict_shown

        predict_shown(self.model, self.paths, self.top, self.format, self.device, console, sys.stdin)


@dataclass(frozen=True)
class Evaluate(_TakesPlugins):
    """Measure a model on a folder of photos: accuracy by class, confusions, wrong photos."""

    model: _MODEL
    """The model's folder."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """A folder with one subfolder of photos per class."""
    recursive: bool = False
    """Read the subfolders of class folders."""
    format: Literal["table", "json"] = "table"
    """A table, or one JSON document with the whole confusion and every wrong photo."""
    out: Path | None = None
    """Write the wrong photos to this CSV file."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import evaluate_shown

        evaluate_shown(self.model, self.folder, self.recursive, self.format, self.device, console, self.out)


@dataclass(frozen=True)
class History(_TakesPlugins):
    """Show what a model has learned and when, and verify its files."""

    model: _MODEL
    """The model's folder."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import show_history

        show_history(self.model, console)


@dataclass(frozen=True)
class Undo(_TakesPlugins):
    """Go back to the model before its last update."""

    model: _MODEL
    """The model's folder."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import undo_shown

        undo_shown(self.model, console)


@dataclass(frozen=True)
class Model(_TakesPlugins):
    """Make a model of a finished run, to predict, learn more classes, export and serve."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run directory."""
    out: Annotated[Positional[Path], arg(metavar="MODEL")]
    """The model's folder, which is created."""
    computing: OmitArgPrefixes[Computing]
    data_dir: Path | None = None
    """The folder of ImageNet or of CIFAR-100; by default $CCFA_DATA."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import run_to_model

        run_to_model(self.run, self.out, Running(**vars(self.computing), data_dir=self.data_dir), console)


@dataclass(frozen=True)
class Export(_TakesPlugins):
    """Write a model as one file that predicts without ccfa, compared with the model before it is written."""

    model: _MODEL
    """The model's folder."""
    out: Annotated[Positional[Path | None], arg(metavar="FILE")] = None
    """The file, .onnx or .pt2; by default it is in the current folder and has the name of the model's folder."""
    format: Literal["onnx", "torch"] = "onnx"
    """onnx, which needs the extra `onnx`, or torch, for torch.export.load."""
    images: Path | None = None
    """A photo or a folder of photos on which the file is compared with the model, too."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.models import export_shown

        export_shown(self.model, self.out, self.format, self.images, console)


@dataclass(frozen=True)
class Serve(_TakesPlugins):
    """Serve a model on the web: post an image and get its classes, or drop a photo on a page."""

    model: _MODEL
    """The model's folder."""
    port: int = 8000
    """The port to listen on; 0 means a free one."""
    host: str = "127.0.0.1"
    """The address to listen on. By default only programs on this machine can reach it; 0.0.0.0 is for all."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    corrections: Path | None = None
    """Let people correct answers on the page, and store these photos in this folder, for `ccfa learn --more`."""

    def __call__(self, console: "Console") -> None:
        from ccfa.deployment.serving import serve

        def tell(line: str) -> None:
            console.print(line, soft_wrap=True)

        serve(self.model, self.host, self.port, self.device, self.corrections, tell)


@dataclass(frozen=True)
class Prepare:
    """Decode ImageNet once, into a folder that training reads without decoding. Repeat the command to continue."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """imagenet100, imagenet1000, or imagenet:FILE with a file that lists classes, one WordNet id per line."""
    data_dir: Path | None = None
    """The folder with train/<class>/*.JPEG and val/<class>/*.JPEG; by default $CCFA_DATA."""
    out: Path | None = None
    """The folder to write; by default prepared-DATA in the data folder, where runs look for it."""
    image_size: int = 256
    """The width and height in pixels; training crops are 7/8 of it."""
    skip_bad: bool = False
    """Leave out unreadable photos instead of stopping."""
    dry_run: bool = False
    """Only tell how much space and time it takes."""
    verify: bool = False
    """Read a finished folder again, and decode the images that are damaged."""

    def __call__(self, console: "Console") -> None:
        from ccfa.data import Preparation, find_photos, prepared_folder

        source = find_photos(self.data, self.data_dir)
        out = self.out or prepared_folder(self.data, self.data_dir)
        assert out  # the photos were found
        work = Preparation(source, out, self.image_size, self.skip_bad)
        console.print(work.describe(), soft_wrap=True)
        if not work.is_finished():
            console.print(f"Decoding will take about {work.seconds() / 60:.1f} minutes.")
        if self.dry_run:
            return
        with console.status("Beginning") as status:

            def tell(done: int, total: int) -> None:
                status.update(f"{done:,} of {total:,} images")

            work.run(tell)
            repaired = work.verify(tell) if self.verify else 0
        checked = f"All images were read again; {repaired} were damaged and are repaired. " if self.verify else ""
        console.print(f"{checked}Ready: ccfa run podnet --data {self.data} --data-dir {out}", soft_wrap=True)


@dataclass(frozen=True)
class List(_TakesPlugins):
    """List methods, data sets, options and whatever else can be chosen."""

    what: Positional[Literal["methods", "datasets", "scenarios", "orders", "backbones", "options", "tables"]]
    """What to list. options are those of a method, tables those of `ccfa table`."""
    name: Annotated[Positional[str], arg(metavar="METHOD")] = ""
    """Describe this method, or list its options. ccfa and the kinds of mixing have options, too."""
    data: str | None = None
    """Show the values that options have on this data; by default on digits."""
    ccfa: bool = False
    """Show the options of CCFA, too."""
    mix: Mix | None = None
    """Show the options of this kind of mixing, too."""

    def __call__(self, console: "Console") -> None:
        from ccfa.reporting.inventory import catalogue

        for table in catalogue(self.what, self.name, self.data, self.ccfa, self.mix):
            console.print(table)


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices and data that were found, and how to get what is missing; or check photos or kernels."""

    data_dir: Path | None = None
    """The folder to look for CIFAR-100 in; by default $CCFA_DATA."""
    data: Path | None = None
    """An image folder to check instead: its classes, bad files, duplicates and whatever else is to know about it."""
    recursive: bool = False
    """Read the folders inside the class folders of --data, too."""
    kernels: bool = False
    """Try our CUDA kernels on each GPU instead: compare two training steps by them with two by torch."""

    def __call__(self, console: "Console") -> None:
        from ccfa.data import inspect_folder
        from ccfa.reporting.inventory import findings, kernel_findings

        if self.recursive and not self.data:
            raise UsageError("--recursive belongs to --data.")
        if self.kernels and (self.data or self.data_dir):
            raise UsageError("--kernels needs no data.")
        if self.kernels:
            lines: Iterable[str] = kernel_findings()
        else:
            lines = inspect_folder(self.data, recursive=self.recursive) if self.data else findings(self.data_dir)
        for line in lines:
            console.print(line, soft_wrap=True)


Verb = (
    Run
    | Resume
    | Sweep
    | Table
    | Compare
    | Figure
    | Report
    | Learn
    | Predict
    | Evaluate
    | History
    | Undo
    | Model
    | Export
    | Serve
    | Prepare
    | List
    | Doctor
)


_NO_FLAG = {get_args(kind)[1] for kind in (Positional[str], Suppress[str])}


def main() -> None:
    """Run the command line and exit with the code that says how it went."""
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII, a file name that is not text
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # file names that are not text, too
    warnings.formatwarning = one_line
    if sys.argv[1:] == ["--version"]:
        print(f"ccfa {__version__}")
        return
    try:
        verb = _parsed(sys.argv[1:])
        from ccfa.reporting.terminal import Output

        verb(Output())
    except BrokenPipeError:  # the reader of our output, `head` say, has enough
        sys.stderr.close()
        sys.exit(128 + 13)  # as if SIGPIPE had ended it
    except (Exception, KeyboardInterrupt, Stopped) as error:
        message, code = _explained(error)
        print(printable(message), file=sys.stderr)
        sys.exit(code)


def _explained(error: BaseException) -> tuple[str, int]:
    """Return what to print about an error, and the exit code."""
    match error:
        case CcfaError():
            return f"error: {error}", error.exit_code
        case Stopped():
            return error.message, error.exit_code
        case KeyboardInterrupt():
            return "Stopped.", 130
        case MemoryError():
            return "error: Out of memory.", ResourceError.exit_code
        case OSError():
            name = f"{error.filename}: " if error.filename else ""
            return f"error: {name}{error.strerror or error}.", ResourceError.exit_code
        case _:
            where = " ".join(getattr(error, "__notes__", ())) or _kept_traceback()  # a run has notes of its own
            told = f"error: {type(error).__name__}: {error}\nThis is a bug in ccfa or in code of your own. {where}"
            return told.rstrip(), 1


def _kept_traceback() -> str:
    """Write the traceback of an unexpected error to a file, and say where it is."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="ccfa-error-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError:
        traceback.print_exc()
        return ""
    return f"The traceback is in {file.name}"


def _require_folder() -> None:
    """Libraries that torch loads end the process where the current folder was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        told = f"The current folder cannot be used: {error.strerror}. Change to another one."
        raise ResourceError(told) from error


def _terminate(number: int, frame: object) -> None:
    raise Stopped("Stopped.", 128 + number)


def _parsed(words: list[str]) -> Verb:
    """Return the verb that was typed, with its plug-ins loaded. What cannot be understood ends the process."""
    verbs = {verb.__name__.lower(): verb for verb in get_args(Verb)}
    kind: Any = Verb
    about: str | None = "Class-incremental learning with Cross-Class Feature Augmentation."
    prog, rest = "ccfa", words
    if words and not words[0].startswith("-"):
        if words[0] not in verbs:
            raise unknown("command", words[0], verbs)
        kind, prog, about, rest = verbs[words[0]], f"ccfa {words[0]}", None, words[1:]  # errors point to its help
        _require_known_flags(words, kind)
        _require_known_choices(words, kind)
    verb: Verb
    verb, left = tyro.cli(
        kind,
        prog=prog,
        description=about,
        config=(FlagCreatePairsOff, OmitSubcommandPrefixes),
        args=_gathered(rest),
        return_unknown_args=True,
    )
    _require_folder()
    for path in getattr(getattr(verb, "running", verb), "plugin", ()):
        load_plugin(path)
    if left:
        raise UsageError(f"`ccfa {words[0]}` does not take {left[0]}. See `ccfa {words[0]} --help`.")
    return verb


def _require_known_flags(words: list[str], verb: type) -> None:
    """Name the nearest flag, or what to write after --set, for a flag that the verb does not have."""
    flags = ["--", "--help", *dict(_flags(verb))]
    strange = [place for place, word in enumerate(words) if word[:2] == "--" and _typed(word) not in flags]
    if not strange:
        return
    if "--set" in flags:
        from ccfa.reporting.inventory import as_settings

        _require_folder()
        for flag, path in itertools.pairwise(words):
            if flag == "--plugin":
                load_plugin(Path(path))
        ends = [place for place, word in enumerate(words) if word[:2] == "--"] + [len(words)]
        given = [word for place in strange for word in words[place : min(end for end in ends if end > place)]]
        if settings := as_settings(given):
            raise UsageError(
                f"Options of a method are given with --set: --set {' '.join(settings)}. "
                f"`ccfa list options METHOD` shows them."
            )
    wrong = words[strange[0]]
    meant = nearest(_typed(wrong)[2:], [flag[2:] for flag in flags])
    hint = f" Did you mean --{meant}?" if meant else ""
    raise UsageError(f"`ccfa {words[0]}` does not take {wrong}.{hint} See `ccfa {words[0]} --help`.")


def _typed(word: str) -> str:
    """The flag of a word such as --image_size=64."""
    return word.partition("=")[0].replace("_", "-")


def _flags(verb: type) -> Iterator[tuple[str, Any]]:
    """The flags of a verb, each with the type of its value: of its fields and of the records in them."""
    for name, kind in get_type_hints(verb, include_extras=True).items():
        plain, *marks = get_args(kind) if get_origin(kind) is Annotated else [kind]
        if isinstance(plain, type) and is_dataclass(plain):
            yield from _flags(plain)
        elif _NO_FLAG.isdisjoint(marks):
            named = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
            yield from ((flag, plain) for mark in marks for flag in getattr(mark, "aliases", None) or ())
            negated = "no-" * (getattr(verb, name, None) is True)  # what is on can be switched off
            yield f"--{negated}{named.replace('_', '-')}", plain


def _require_known_choices(words: list[str], verb: type) -> None:
    """Name the nearest choice where a value is none of the few that there are: of a flag, or of the verb's object."""
    words, flags = list(itertools.takewhile(lambda word: word != "--", words)), dict(_flags(verb))
    if {"-h", "--help"} & {*words}:
        return
    marked = [kind for kind in get_type_hints(verb, include_extras=True).values() if get_origin(kind) is Annotated]
    without_flag = [plain for plain, *marks in map(get_args, marked) if not _NO_FLAG.isdisjoint(marks)]
    given = [(f"argument of `ccfa {words[0]}`", kind, words[1]) for kind in without_flag[:1] if words[1:]]
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, is_joined, value = word.partition("=")
        given.append((flag.lstrip("-"), flags.get(_typed(word)), value if is_joined else following))
    for name, kind, value in given:
        kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else [kind]
        choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
        if choices and value not in (*choices, "", "None") and not value.startswith("-"):
            raise unknown(name, value, choices)


def _gathered(words: list[str]) -> list[str]:
    """Move the values of --set and --axis to the end: both may be repeated and stand anywhere."""
    kept: list[str] = []
    values: dict[str, list[str]] = {}
    flag, is_first = "", False
    for word in words:
        if word in ("--set", "--axis"):
            flag, is_first = word, True
            values.setdefault(flag, [])
        elif flag and not word.startswith("-") and (is_first or "=" in word):
            values[flag].append(word)
            is_first = False
        else:
            kept.append(word)
            flag = ""
    return kept + [word for flag, texts in values.items() for word in (flag, *texts)]


if __name__ == "__main__":
    main()
