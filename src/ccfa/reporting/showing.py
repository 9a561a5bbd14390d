"""Run, resume and sweep, as people call them: what is about to happen, how it goes, and what came of it."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table as Screen

from ccfa import experiments
from ccfa.data import data_set
from ccfa.errors import CcfaError, DataError, LockedError, ResourceError, Stopped, UsageError, installing
from ccfa.evaluation import COSTS, METRICS, Report
from ccfa.experiments import Run, resolve
from ccfa.experiments import sweep as sweeping
from ccfa.experiments.experiment import Resolved, canonical
from ccfa.experiments.first_stage import first_stage_key
from ccfa.experiments.following import follow
from ccfa.experiments.running import (
    DEFAULTS,
    Audience,
    acceleration_of,
    finished,
    resolve_again,
    running_again,
    stoppable,
)
from ccfa.experiments.sweep import Outcome, Swept, experiments_of
from ccfa.experiments.tables import Result, store_result
from ccfa.files import require_place
from ccfa.learning.acceleration import describe_device, suit_threads
from ccfa.learning.processes import ALONE, Processes, joined, several
from ccfa.learning.progress import Pace, planned_work
from ccfa.plugins import load_plugin
from ccfa.reporting.comparison import Comparison, compare_entries, grouped, setting, show_comparison
from ccfa.reporting.page import read_pictures, write_page
from ccfa.reporting.tables import cost_texts, counted, metrics_table
from ccfa.reporting.terminal import Board, Display, StatusLines, SweepDisplay
from ccfa.reporting.trackers import require_tracker, watched
from ccfa.settings import Experiment, Grid, Running

WIDE = 120  # columns: in a narrower terminal the definitions would be long strips of single words


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    running: Running = DEFAULTS,
    *,
    results: Path | None = None,
    new: bool = False,
    console: Console | None = None,
) -> Run:
    """Run an experiment, or what is left of it, and write its page `report.html`.

    A directory that holds a finished run of this experiment is not run again; an unfinished one is continued. Under
    torchrun all its processes share the run, and process 0 writes and prints.

    Args:
        experiment: What to run.
        out: The run directory; by default `runs/` and the experiment's name.
        running: How to run it.
        results: A folder where the report is kept as well, for `ccfa table`.
        new: Refuse a directory in which something is already.
        console: Where progress and results are printed; by default nowhere.

    Returns:
        The run: its directory, with the report, the networks and the predictions.

    >>> import tempfile
    >>> quick = Experiment("finetune", scenario="9,1", options={"epochs": 1})
    >>> finished = run(quick, tempfile.mkdtemp() + "/run", Running(device="cpu"))
    >>> finished.report().finished, (finished.path / "report.html").exists()
    (True, True)
    """
    console = console or Console(quiet=True)
    require_ready(running)
    experiment = canonical(experiment)
    directory = Run(Path(out) if out else Path("runs") / experiment.name)
    with joined(running.device) as processes:
        if processes.rank:
            follow(running, processes)
            return directory
        if new:
            directory.require_new()
        require_place(directory.path)
        if results:
            require_place(results)
        resolved = resolve(experiment, running.data_dir)
        report = None if new else finished(directory, resolved, running)
        if report:
            processes.tell({})
            console.print(f"{directory.path} holds this experiment already:", soft_wrap=True)
        else:
            report = _run_shown(resolved, directory, running, console, new, processes)
        if results:
            store_result(report, results)
        show_result(report, directory.path, resolved, console)
        return directory


def resume(path: Path | str, running: Running = DEFAULTS, *, console: Console | None = None) -> Run:
    """Continue a run where it was stopped, by default on the device and in the precision it began with.

    Args:
        path: The run directory.
        running: How to continue it.
        console: Where progress and results are printed; by default nowhere.

    Returns:
        The run.

    >>> import contextlib, tempfile
    >>> place = tempfile.mkdtemp() + "/run"
    >>> with contextlib.suppress(SystemExit):  # the time is up
    ...     run(Experiment("finetune", options={"epochs": 1}), place, Running(device="cpu", max_minutes=0))
    >>> resume(place).report().finished
    True
    """
    console, directory = console or Console(quiet=True), Run(Path(path))
    require_ready(running)
    with joined(running.device) as processes:
        if processes.rank:
            follow(running, processes)
            return directory
        if directory.is_finished():
            processes.tell({})
            show_finished(directory, running.data_dir, console)
            return directory
        again = running_again(directory, running)
        resolved = resolve_again(directory, running.data_dir)
        report = _run_shown(resolved, directory, again, console, processes=processes)
        show_result(report, directory.path, resolved, console)
        return directory


def _run_shown(
    resolved: Resolved,
    directory: Run,
    running: Running,
    console: Console,
    new: bool = False,
    processes: Processes = ALONE,
) -> Report:
    """Run, or go on running, until the end or until a signal or the time limit stops it."""
    for note in resolved.notes:
        console.print(f"note: {note}", soft_wrap=True)
    device = acceleration_of(running)[0]
    if device.type == "cpu":
        suit_threads(math.prod(resolved.train.shape))  # before they are told
    shared = f", shared by {processes.number} processes" if processes.number > 1 else ""
    console.print(f"{resolved.headline} on {describe_device(device)}{shared}", soft_wrap=True)
    with stoppable(running.max_minutes) as stop:
        try:
            with (
                StatusLines(console, on_cpu=device.type == "cpu") as lines,
                watched(directory, running, Display(resolved, lines)) as audience,
            ):
                return experiments.run(resolved, directory, running, audience, stop, new, processes)
        except (Exception, Stopped) as ended:
            _show_page(directory, resolved, console, ended)
            raise


def sweep(
    what: Grid | Sequence[Experiment],
    out: Path | str = "runs/sweep",
    running: Running = DEFAULTS,
    *,
    results: Path | None = None,
    compared: bool = True,
    console: Console | None = None,
) -> list[Run]:
    """Run the experiments of a grid, write the page of each, and compare them.

    Finished runs found in the folder are not run again, and unfinished ones are continued. A run that fails does not
    stop the others; the error is raised at the end.

    Args:
        what: A grid, or experiments.
        out: The folder of the run directories and of the comparison.
        running: How to run them, and how many at once.
        results: A folder where the report of each finished run is kept as well, for `ccfa table`.
        compared: Whether to write the page that compares the runs.
        console: Where progress and results are printed; by default nowhere.

    Returns:
        The runs.

    >>> import tempfile
    >>> grid = Grid(("finetune",), ccfa="off", seeds=(0, 1), scenario="9,1", options={"epochs": 0})
    >>> [finished.report().finished for finished in sweep(grid, tempfile.mkdtemp(), Running(device="cpu"))]
    [True, True]
    """
    console, out = console or Console(quiet=True), Path(out)
    if several():
        raise UsageError(
            "torchrun shares one run among its processes, so it is for `ccfa run` and `ccfa resume`. Start a sweep "
            "without it; --at-once runs several experiments on one GPU."
        )
    require_ready(running)
    if results:
        require_place(results)
    planned = experiments_of(what) if isinstance(what, Grid) else [canonical(one) for one in what]
    running = replace(running, first_stages=running.first_stages or out / ".first-stages")
    device, acceleration = acceleration_of(running)
    board = Board(console, running.at_once, on_cpu=device.type == "cpu")

    def on_plan(left: Sequence[Resolved], num_done: int) -> None:
        if left and device.type == "cpu":
            suit_threads(math.prod(left[0].train.shape))  # before they are told; the data are the same for all
        before = f", {num_done} of them finished before" if num_done else ""
        runs = counted(num_done + len(left), "run")
        where = f"{min(running.at_once, len(left) or 1)} at a time, on {describe_device(device)}, in {out}"
        console.print(f"{runs}{before}, {where}", soft_wrap=True)
        trained: set[str] = set()  # first stages; a run takes one that another has trained
        sizes = []
        for resolved in left:
            key = first_stage_key(resolved, acceleration, device)
            stages = resolved.stages[key in trained :]
            trained.add(key)
            work = [planned_work(resolved.method, resolved.train, stage) for stage in stages]
            sizes.append((resolved.experiment.name, Pace().images_left(work)))
        board.plan(sizes, num_done)

    observing: dict[Path, ExitStack] = {}

    def audience(resolved: Resolved, directory: Run) -> Audience:
        stack = observing[directory.path] = ExitStack()
        return stack.enter_context(watched(directory, running, SweepDisplay(resolved, board)))

    def on_end(outcome: Outcome) -> None:
        resolved, directory, report, error = outcome
        if directory.path in observing:  # not if the sweep was stopped before
            observing.pop(directory.path).close()
        board.end(resolved.experiment.name, report is not None, isinstance(error, CcfaError))
        if isinstance(error, CcfaError):
            console.print(f"{directory.path.name}: {error}", soft_wrap=True)
        _show_page(directory, resolved, console, error)
        if report and results:
            try:
                store_result(report, results)
            except ResourceError as error:  # the other runs go on; repeating the command keeps this report
                console.print(f"note: the report is not kept. {error}", soft_wrap=True)

    with stoppable(running.max_minutes) as stop, board:
        swept = sweeping.sweep(planned, out, running, audience, on_end, stop, on_plan)
    if results:
        for report in swept.reports.values():  # also of runs that were finished before
            store_result(report, results)
    if compared and (swept.reports or not swept.errors):
        for folder, comparison in comparisons(swept, out).items():
            show_comparison(comparison, folder, console)
    console.print(f"Run directories: {out}", soft_wrap=True)
    if swept.errors:
        told = "\n".join(f"  {name}: {error}" for name, error in swept.errors.items())
        failed = CcfaError(f"Not every run finished; repeat the command to continue those that failed:\n{told}")
        failed.exit_code = next(iter(swept.errors.values())).exit_code
        raise failed
    return [Run(out / name) for name in swept.reports]


def comparisons(swept: Swept, out: Path) -> dict[Path, Comparison]:
    """The runs of a sweep side by side, by the folder for the page: one for all, or one for each scenario."""
    refused = [f"{method} + CCFA: {reason}" for method, reason in swept.refused.items()]
    if not swept.reports:
        raise UsageError("Nothing was run. " + " ".join(refused))
    entries = [Result(out / name, report) for name, report in swept.reports.items()]
    compared = [compare_entries(group, refused) for group in grouped(entries, setting).values()]
    folder = out / "comparison"
    return {folder / one.scenario if len(compared) > 1 else folder: one for one in compared}


def require_ready(running: Running) -> None:
    """Load plug-ins, and refuse what cannot be met before anything else is done."""
    for name in ("checkpoint_minutes", "max_minutes"):
        minutes = getattr(running, name)
        if minutes is not None and not 0 <= minutes < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} takes a number of minutes, 0 or more, got {minutes}.")
    if running.tensorboard and find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed. "
            f"Install it with: {installing('tensorboard')} (or pip install tensorboard), or leave --tensorboard out."
        )
    require_tracker(running)
    if running.first_stages and several():
        raise UsageError("--first-stages is for runs of one process. Leave it out under torchrun.")
    if running.first_stages:
        require_place(running.first_stages)
    for path in running.plugin:
        load_plugin(path)


def _show_page(directory: Run, resolved: Resolved, console: Console, ended: BaseException | None) -> None:
    """Write the page of a run that has finished a stage, and say where it is; not if another process has the run."""
    if not isinstance(ended, LockedError) and (directory.path / "report.json").exists():
        console.print(write_page(directory.path, resolved), soft_wrap=True)


def show_finished(directory: Run, data_dir: Path | None, console: Console) -> None:
    """Show a run that was finished before; pictures that its page lacks are made if its data are found."""
    report, resolved = directory.report(), None
    console.print(f"{directory.path} is finished:", soft_wrap=True)
    if read_pictures(directory.path, len(report.num_seen) - 1) is None:
        try:
            name = directory.experiment.data
            find = data_set(name).find
            if find and find(data_dir) is None:  # no reason for a download
                raise DataError(f"{name} was not found: name its folder with --data-dir.")
            resolved = resolve_again(directory, data_dir, same_method=False)
        except CcfaError as error:
            console.print(f"note: the report page has no pictures. {error}", soft_wrap=True)
    show_result(report, directory.path, resolved, console)


def show_result(report: Report, path: Path, resolved: Resolved | None, console: Console) -> None:
    """Show a run's result, write its page, and say where both are."""
    headings, rows = metrics_table(report)
    screen = Screen(title=report.name, title_justify="left")
    screen.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        screen.add_column(heading, justify="right")
    is_wide = console.width >= WIDE
    if is_wide:  # the page has the definitions, too
        screen.add_column("definition")
    shown = [metric.definition for metric in METRICS.values() if metric.column]
    for row, definition in zip(rows, shown, strict=True):
        screen.add_row(*map(str, row), *([definition] if is_wide else []))
    console.print(screen)
    others = ", ".join(str(name) for name, *_ in metrics_table(report, others=True).rows)
    console.print(f"Other definitions are on the page and in report.json: {others}.", style="dim")
    costs = [f"{COSTS[name].heading} {text}" for name, text in cost_texts(report).items()]
    console.print(", ".join(costs), soft_wrap=True)
    console.print(f"Run directory: {path}", soft_wrap=True)
    console.print(write_page(path, resolved), soft_wrap=True)
