"""A sweep: the experiments of a grid, each a run of its own, on images that all of them share."""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import load_parts
from ccfa.errors import CcfaError, Stopped, UsageError, choose, unknown
from ccfa.evaluation import Report
from ccfa.experiments.experiment import Resolved, build_method, canonical, experiment_method, resolve
from ccfa.experiments.first_stage import first_stage_key, leave_turn, stored_at, take_turn
from ccfa.experiments.run_directory import ERRORS, Run, left_alone
from ccfa.experiments.running import Audience, Stop, acceleration_of, finished, run
from ccfa.files import locked, make_folder
from ccfa.kernels.graphs import own_stream
from ccfa.methods import METHODS
from ccfa.options import decode, schema
from ccfa.settings import Experiment, Grid, Running, Setting

AXES = ("memory", "memory_total", "mix", "scenario", "image_size")
"""The fields of an experiment that can be an axis. Every option can be one, too."""


def experiments_of(grid: Grid) -> list[Experiment]:
    """Return every experiment of a grid, once. A method takes those of the options that it has.

    >>> grid = Grid(("podnet",), ccfa="on", memory=2, seeds=(0,), axes={"ccfa.count": ("1", "3")})
    >>> [(experiment.memory, experiment.options) for experiment in experiments_of(grid)]
    [(2, {'ccfa.count': '1'}), (2, {'ccfa.count': '3'})]
    """
    names = tuple(METHODS) if grid.methods == ("all",) else grid.methods
    if not names or not grid.seeds:
        raise UsageError("A sweep needs at least one method (or `all`) and one seed.")
    shared = {one.name: getattr(grid, one.name) for one in fields(Setting)}
    with_ccfa = {"off": (False,), "on": (True,), "both": (False, True)}[grid.ccfa]
    found: dict[str, Experiment] = {}
    known: set[str] = set()
    for method, ccfa, (chosen, options) in itertools.product(names, with_ccfa, list(_points(grid))):
        experiment = Experiment(method, ccfa, **{**shared, **chosen})
        takes = _options(experiment)
        known |= takes
        own = {name: text for name, text in {**grid.options, **options}.items() if name in takes}
        for order, seed in itertools.product(grid.orders or (None,), grid.seeds):
            one = canonical(replace(experiment, order=order, seed=seed, options=own))
            found.setdefault(repr(one), one)  # a method may lack the option of an axis
    _require_known(grid, known)
    return list(found.values())


def _points(grid: Grid) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield every choice of one value from each axis: fields of the experiment, and options."""
    hints = get_type_hints(Experiment)
    for texts in itertools.product(*grid.axes.values()):
        chosen = dict(zip(grid.axes, texts, strict=True))
        try:
            yield {name: decode(chosen.pop(name), hints[name]) for name in AXES if name in chosen}, chosen
        except ValueError as error:
            raise UsageError(f"An axis has a value that does not fit: {error}.") from None


def _require_known(grid: Grid, options: set[str]) -> None:
    for name in grid.options:
        if name not in options:
            raise unknown("option of these methods", name, options)
    defaults = Grid(())
    for axis in grid.axes:
        if axis.startswith("ccfa.") and grid.ccfa == "off":
            raise UsageError(f"The axis {axis} needs CCFA: use --ccfa on or both.")
        if axis not in options.union(AXES):
            raise unknown("axis", axis, options.union(AXES))
        if axis in grid.options or getattr(grid, axis, None) != getattr(defaults, axis, None):
            raise UsageError(f"{axis} is given twice: as an axis, and as one value for the whole sweep.")


def _options(experiment: Experiment) -> set[str]:
    """Return the names of all options of an experiment's method and of what is plugged into it."""
    options = set(schema(choose("method", experiment.method, METHODS)))
    if experiment.ccfa:
        options |= {f"ccfa.{phase}{name}" for phase in ("", "balanced.") for name in schema(CCFA)}
        options.remove("ccfa.balanced.phases")
    if experiment.mix:
        options |= {f"mix.{name}" for name in schema(choose("mixing", experiment.mix, MIXES))}
    return options


class Outcome(NamedTuple):
    """What became of a run: its report, or the error that ended it."""

    resolved: Resolved
    directory: Run
    report: Report | None
    error: CcfaError | Stopped | None = None


class Swept(NamedTuple):
    """What came of a sweep: reports and errors by the run's name, and why methods were not run with CCFA."""

    reports: dict[str, Report]
    refused: dict[str, str]
    errors: dict[str, CcfaError]


def sweep(
    experiments: Iterable[Experiment],
    out: Path,
    running: Running,
    audience: Callable[[Resolved, Run], Audience],
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    stop: Stop | None = None,
    on_plan: Callable[[Sequence[Resolved], int], None] = lambda left, num_done: None,
) -> Swept:
    """Run what is not finished yet, and return all of it. A second sweep in the same folder is refused.

    Data are loaded once and shared by the runs; files that change while the sweep is at work are not read again. Before
    the first run, `on_plan` receives the experiments that are left and the number of those that were finished before.
    """
    with left_alone(out):
        pass  # refused at once, before any data is read
    load = functools.cache(load_parts)
    reports: dict[str, Report | None] = {}  # in the plan's order; None until the run is finished
    refused: dict[str, str] = {}
    left: list[Resolved] = []
    for experiment in experiments:
        try:
            experiment_method(experiment)
        except UsageError as error:
            if not (experiment.ccfa and build_method(experiment.method, experiment.data).no_old_head):
                raise
            refused[experiment.method] = str(error)  # CCFA has no meaning for this method
            continue
        resolved = resolve(experiment, running.data_dir, load)
        report = finished(Run(out / experiment.name), resolved, running)
        reports[experiment.name] = report
        if not report:
            left.append(resolved)
    errors: dict[str, CcfaError] = {}
    on_plan(left, len(reports) - len(left))
    if left:
        make_folder(out)
        with locked(out):
            try:
                outcomes = run_all(left, out, running, audience, on_end, stop)
            except Stopped as stopped:
                told = "Stopped; what the runs have stored is kept. Repeat the command to continue."
                raise Stopped(told, stopped.exit_code) from stopped
        for outcome in outcomes:
            name = outcome.resolved.experiment.name
            reports[name] = outcome.report
            if isinstance(outcome.error, CcfaError):
                errors[name] = outcome.error
    return Swept({name: report for name, report in reports.items() if report}, refused, errors)


def run_all(
    experiments: Sequence[Resolved],
    out: Path,
    running: Running,
    audience: Callable[[Resolved, Run], Audience],
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    stop: Stop | None = None,
) -> list[Outcome]:
    """Run experiments, `running.at_once` at a time, each in a directory of `out`.

    A run that fails does not stop the others; `stop` stops them all. Runs that were begun before go first: one of them
    may have trained a part of a first stage that others wait for. A run whose first stage another one is training
    begins after runs that need not wait. Each run draws from its own generators, so runs at once differ from runs alone
    only in the order in which the device works.
    """
    if running.at_once < 1:
        raise UsageError(f"At least one run must be at work at a time, got {running.at_once}.")
    running = replace(running, at_once=min(running.at_once, len(experiments) or 1))  # reports say who shared the device
    stopping, (device, acceleration) = stop or Stop(), acceleration_of(running)
    begun = [bool(Run(out / one.experiment.name).checkpoint_numbers()) for one in experiments]
    waiting, choosing = sorted(range(len(experiments)), key=lambda number: not begun[number]), threading.Lock()
    firsts: dict[int, Path] = {}  # where the first stages are stored, by the number of the run
    if folder := running.first_stages:
        keys = (first_stage_key(resolved, acceleration, device) for resolved in experiments)
        firsts = {number: stored_at(folder, key) for number, key in enumerate(keys)}
    training: set[Path | None] = set()

    def next_number() -> int:
        """Choose the next run: the first that need not wait for a first stage that another one is training."""
        with choosing:
            ready = (one for one in waiting if firsts.get(one) not in training or os.path.exists(firsts[one]))
            number = next(ready, waiting[0])
            waiting.remove(number)
            if number in firsts:
                training.add(firsts[number])
                take_turn(firsts[number])
            return number

    def work() -> tuple[int, Outcome]:
        resolved = experiments[number := next_number()]
        directory, report = Run(out / resolved.experiment.name), None
        error: CcfaError | Stopped | None = None
        try:
            if code := stopping.asked():
                raise Stopped("Stopped before this run began.", code)
            with own_stream(device):
                report = run(resolved, directory, running, audience(resolved, directory), stopping)
        except (CcfaError, Stopped) as ended:
            error = ended
        except Exception as ended:  # in a method of one's own, say; other runs may be well
            place = directory.path / ERRORS
            error = CcfaError(f"{type(ended).__name__}: {ended}. The traceback is in {place}.")
            error.__cause__ = ended
        training.discard(firsts.get(number))  # if it failed, another one has to train it
        leave_turn()
        outcome = Outcome(resolved, directory, report, error)
        on_end(outcome)
        if isinstance(error, Stopped):
            raise error
        return number, outcome

    if running.at_once == 1:  # in this thread, which a second Ctrl-C ends at once
        return [outcome for _, outcome in sorted(work() for _ in experiments)]
    with ThreadPoolExecutor(max_workers=running.at_once) as pool:
        futures = [pool.submit(work) for _ in experiments]
        try:
            return [outcome for _, outcome in sorted(future.result() for future in futures)]
        except BaseException:  # tell the others
            stopping.code = stopping.asked() or 130
            pool.shutdown(cancel_futures=True)
            raise
