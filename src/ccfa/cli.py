"""The command line: parse, call, print."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes

from ccfa.arguments import Compare, Doctor, List, Run, Speed, Sweep, Verb
from ccfa.errors import CcfaError, UsageError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ccfa.learning.acceleration import Acceleration

# torch, scikit-learn and everything built on them are imported inside the verbs: `ccfa --help` answers at once.


def main() -> None:
    """Run the command line and exit with the code that says how it went."""
    signal.signal(signal.SIGTERM, _terminate)
    # Threads that wait by spinning starve each other on a busy machine; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII, a file name that is not text
    verb = tyro.cli(
        Verb,
        prog="ccfa",
        description="Class-incremental learning with Cross-Class Feature Augmentation.",
        config=(FlagCreatePairsOff, OmitSubcommandPrefixes),
    )
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    try:
        match verb:
            case Run():
                _run(verb, console)
            case Sweep():
                _sweep(verb, console)
            case Compare():
                _compare(verb, console)
            case List():
                _list(verb, console)
            case Doctor():
                _doctor(verb, console)
    except CcfaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, `head` say, has enough
        sys.stderr.close()
        sys.exit(141)


def _terminate(number: int, frame: object) -> None:
    print("Stopped.", file=sys.stderr)
    raise SystemExit(128 + number)


def _run(verb: Run, console: "Console") -> None:
    from ccfa.experiments import Experiment, RunDirectory, resolve, run
    from ccfa.experiments.first_stage import FirstStages
    from ccfa.experiments.rundir import environment
    from ccfa.learning.acceleration import suit_threads
    from ccfa.reporting.tables import metrics_table
    from ccfa.reporting.terminal import Display

    experiment = Experiment(
        method=verb.method,
        ccfa=verb.ccfa,
        mix=verb.mix,
        data=verb.data,
        scenario=verb.scenario,
        order=verb.order,
        memory=verb.memory,
        memory_total=verb.memory_total,
        validation=verb.validation,
        image_size=verb.image_size,
        seed=verb.seed,
        batch_seed=verb.batch_seed,
        options=_options(verb.set),
    )
    device, acceleration = _speed(verb)
    resolved = resolve(experiment, verb.data_dir)
    suit_threads(resolved.train.images[0].numel())
    path = verb.out or Path("runs") / experiment.name
    if verb.reuse and (report := RunDirectory.finished(path, resolved.config, acceleration)):
        console.print(f"{path} holds this experiment already:", soft_wrap=True)
    else:
        surroundings = environment(device, acceleration)
        directory = RunDirectory.create(path, resolved.config, surroundings)
        for note in resolved.notes:
            console.print(f"note: {note}", soft_wrap=True)
        console.print(f"{resolved.headline} on {surroundings['device']}", soft_wrap=True)
        shared = FirstStages(verb.first_stages) if verb.first_stages else None
        with Display(resolved, console) as display:
            report = run(resolved, directory, display, device, acceleration, shared)
    console.print(metrics_table(report))
    console.print(f"Run directory: {path}", soft_wrap=True)


def _sweep(verb: Sweep, console: "Console") -> None:
    from ccfa.experiments.first_stage import FirstStages
    from ccfa.experiments.sweep import Plan, sweep
    from ccfa.reporting.sweeps import StageLines, sweep_table

    device, acceleration = _speed(verb)
    plan = Plan(
        methods=verb.methods,
        ccfa={"off": (False,), "on": (True,), "both": (False, True)}[verb.ccfa],
        data=verb.data,
        scenario=verb.scenario,
        orders=verb.orders,
        seeds=verb.seeds,
        memory=verb.memory,
        validation=verb.validation,
        options=_options(verb.set),
    )
    cells, scenario = sweep(
        plan,
        verb.out,
        verb.data_dir,
        device,
        acceleration,
        verb.at_once,
        FirstStages(verb.first_stages or verb.out / ".first-stages"),
        lambda name, num_stages: StageLines(name, num_stages, console),
    )
    console.print(sweep_table(cells, verb.data, scenario))
    console.print(f"Run directories: {verb.out}", soft_wrap=True)


def _speed(verb: Speed) -> "tuple[torch.device, Acceleration]":
    """The device, and how fast to be on it."""
    from ccfa.learning.acceleration import Acceleration, pick_device

    device = pick_device(verb.device)
    return device, Acceleration.for_device(device, verb.precision, not verb.no_compile, not verb.no_graph)


def _options(texts: tuple[str, ...]) -> dict[str, str]:
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


def _compare(verb: Compare, console: "Console") -> None:
    from ccfa.experiments import RunDirectory
    from ccfa.reporting.tables import comparison_table, definitions

    if not verb.runs:
        raise UsageError("Name at least one run directory, e.g. ccfa compare runs/*")
    console.print(comparison_table([(path, RunDirectory(path).report()) for path in verb.runs]))
    for line in definitions():
        console.print(line, style="dim")


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
