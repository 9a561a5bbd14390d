"""The command line: parse, call, print."""

import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes

from ccfa import __version__
from ccfa.arguments import (
    Compare,
    Doctor,
    Figure,
    List,
    Page,
    Resume,
    Run,
    Setting,
    Speed,
    Sweep,
    Table,
    Training,
    Verb,
)
from ccfa.errors import CcfaError, ResourceError, Stopped, UsageError, one_line, printable
from ccfa.words import gathered, given_axes, given_options, typed

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ccfa.experiments import Experiment
    from ccfa.learning.acceleration import Acceleration

# torch, scikit-learn and everything built on them are imported inside the verbs: `ccfa --help` answers at once.


def main() -> None:
    """Run the command line and exit with the code that says how it went."""
    signal.signal(signal.SIGTERM, _terminate)
    # Threads that wait by spinning starve each other on a busy machine; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII, a file name that is not text
    warnings.formatwarning = one_line
    if sys.argv[1:] == ["--version"]:
        print(f"ccfa {__version__}")
        return
    verb = tyro.cli(
        Verb,
        prog="ccfa",
        description="Class-incremental learning with Cross-Class Feature Augmentation.",
        config=(FlagCreatePairsOff, OmitSubcommandPrefixes),
        args=gathered(sys.argv[1:]),
    )
    _require_folder()
    from ccfa.reporting.terminal import BROKEN_PIPE_CODE, Output

    console = Output()
    try:
        if isinstance(verb, Training):
            from ccfa.reporting.showing import require_ready

            require_ready(**_endurance(verb))
        verbs: dict[type, Any] = {Run: _run, Resume: _resume, Sweep: _sweep, Table: _table, Compare: _compare}
        verbs |= {Figure: _figure, Page: _report, List: _list, Doctor: _doctor}
        verbs[type(verb)](verb, console)
    except CcfaError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except Stopped as stopped:
        print(printable(stopped.message), file=sys.stderr)
        sys.exit(stopped.code)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, `head` say, has enough
        sys.stderr.close()
        sys.exit(BROKEN_PIPE_CODE)
    except MemoryError:
        print("error: Out of memory.", file=sys.stderr)
        sys.exit(ResourceError.exit_code)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}.", file=sys.stderr)
        sys.exit(ResourceError.exit_code)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}{_kept_traceback()}", file=sys.stderr)
        sys.exit(1)


def _kept_traceback() -> str:
    """Write the traceback of an error nobody foresaw to a file, and say where it is."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="ccfa-error-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError:
        traceback.print_exc()
        return ""
    return f"\nThis is a bug in ccfa or in code of your own; the traceback is in {file.name}"


def _require_folder() -> None:
    """Libraries that torch loads end the process where the current folder was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        told = f"error: The current folder cannot be used: {error.strerror}. Change to another one."
        print(told, file=sys.stderr)
        sys.exit(ResourceError.exit_code)


def _terminate(number: int, frame: object) -> None:
    print("Stopped.", file=sys.stderr)
    raise SystemExit(128 + number)


def _run(verb: Run, console: "Console") -> None:
    from ccfa import experiments
    from ccfa.experiments.ledger import store_result
    from ccfa.experiments.running import finished
    from ccfa.files import require_place
    from ccfa.reporting.showing import run_shown, show_result

    experiment = _experiment(verb, method=verb.method, ccfa=verb.ccfa, order=verb.order, seed=verb.seed)
    device, acceleration = _speed(verb)
    path = verb.out or Path("runs") / experiment.name
    directory = experiments.Run(path)
    if not verb.reuse:
        directory.require_new()
    require_place(path)
    resolved = experiments.resolve(experiment, verb.data_dir)
    if verb.reuse and (report := finished(directory, resolved, acceleration)):
        console.print(f"{path} holds this experiment already:", soft_wrap=True)
    else:
        report = run_shown(resolved, directory, device, acceleration, console, new=not verb.reuse, **_endurance(verb))
    if verb.results:
        store_result(report, verb.results)
    show_result(report, path, resolved, console)


def _experiment(verb: Setting, method: str, **own: Any) -> "Experiment":
    """The experiment with what both verbs take, and with a verb's own fields."""
    from ccfa.experiments import Experiment
    from ccfa.files import require_place

    if verb.results:
        require_place(verb.results)
    names = {field.name for field in fields(Experiment)} & {field.name for field in fields(Setting)}
    shared = {name: getattr(verb, name) for name in names}
    return Experiment(method, **shared, **own, options=given_options(verb.set))


def _resume(verb: Resume, console: "Console") -> None:
    from ccfa import experiments
    from ccfa.experiments.running import resolve_again, speed_again
    from ccfa.reporting.showing import run_shown, show_finished, show_result

    directory = experiments.Run(verb.run)
    if directory.is_finished():
        return show_finished(directory, verb.data_dir, console)
    speed = speed_again(directory, verb.device, verb.precision, not verb.no_compile, not verb.no_graph)
    resolved = resolve_again(directory, verb.data_dir)
    report = run_shown(resolved, directory, *speed, console, **_endurance(verb))
    return show_result(report, verb.run, resolved, console)


def _endurance(verb: Training) -> dict[str, Any]:
    """What is said about a run's course."""
    return {name: getattr(verb, name) for name in ("first_stages", "checkpoint_minutes", "max_minutes", "tensorboard")}


def _sweep(verb: Sweep, console: "Console") -> None:
    from ccfa.experiments.plan import Plan
    from ccfa.reporting.showing import sweep_shown

    plan = Plan(
        methods=verb.methods,
        base=_experiment(verb, method=""),
        ccfa={"off": (False,), "on": (True,), "both": (False, True)}[verb.ccfa],
        orders=verb.orders,
        seeds=verb.seeds,
        axes=given_axes(verb.axis),
    )
    course = {**_endurance(verb), "at_once": verb.at_once, "results": verb.results}
    sweep_shown(plan.experiments(), verb.out, verb.data_dir, *_speed(verb), console, **course)


def _table(verb: Table, console: "Console") -> None:
    from ccfa.reporting.paper_tables import Wanted, fill_shown, print_plan, show_tables, submit_jobs, write_pages

    if verb.fill + verb.plan + verb.slurm + verb.write > 1:
        raise UsageError("Choose one of --fill, --plan, --slurm and --write.")
    if (verb.partition or verb.sbatch) and not verb.slurm:
        raise UsageError("--partition and --sbatch belong to --slurm.")
    if verb.minutes is not None and not (verb.fill or verb.slurm):
        raise UsageError("--minutes belongs to --fill or --slurm.")
    wanted = Wanted(**{field.name: getattr(verb, field.name) for field in fields(Wanted)})
    speed = typed(verb, ("device", "precision", "no_compile", "no_graph", "checkpoint_minutes"))
    if verb.write:
        write_pages(wanted, console)
    elif verb.plan:
        print_plan(wanted, speed, console)
    elif verb.slurm:
        options = given_options(verb.sbatch, "--sbatch", "account=vision")
        submit_jobs(wanted, speed, console, verb.partition, verb.minutes, verb.at_once, options)
    else:
        if verb.fill:
            fill_shown(wanted, *_speed(verb), console, verb.at_once, verb.checkpoint_minutes, verb.minutes)
        show_tables(wanted, console)


def _speed(verb: Speed) -> "tuple[torch.device, Acceleration]":
    """The device, and how fast to be on it."""
    from ccfa.learning.acceleration import Acceleration, pick_device

    device = pick_device(verb.device)
    return device, Acceleration.for_device(device, verb.precision, not verb.no_compile, not verb.no_graph)


def _compare(verb: Compare, console: "Console") -> None:
    from ccfa.reporting.comparison import common_folder, compare
    from ccfa.reporting.comparison_page import show_comparison

    comparison = compare(verb.runs)
    show_comparison(comparison, verb.out or common_folder(comparison.entries), console)


def _figure(verb: Figure, console: "Console") -> None:
    from ccfa.learning.acceleration import pick_device
    from ccfa.reporting.figures import FigureOptions, write_figure

    options = FigureOptions(verb.data_dir, pick_device(verb.device), verb.images, verb.seed, verb.estimator)
    with console.status("Looking at the runs; networks of many stages take minutes on a CPU."):
        files = write_figure(verb.kind, verb.runs, verb.out, options)
    for line in [*(f"note: {note}" for note in files.notes), files.caption, *files.paths]:
        console.print(str(line), soft_wrap=True)


def _report(verb: Page, console: "Console") -> None:
    from ccfa.reporting.page import write_report

    if not verb.runs:
        raise UsageError("Name at least one run directory, e.g. ccfa report runs/*")
    for path in verb.runs:
        console.print(f"Report: {write_report(path)}", soft_wrap=True)


def _list(verb: List, console: "Console") -> None:
    from ccfa.reporting.tables import catalogue

    for table in catalogue(verb.what):
        console.print(table)


def _doctor(verb: Doctor, console: "Console") -> None:
    from ccfa.reporting.doctor import findings

    for line in findings(verb.data_dir):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
