"""Runs and sweeps as a person sees them: what is about to happen, how it goes, and what came of it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from ccfa.data.cifar100 import find_cifar100
from ccfa.errors import CcfaError, DataError, LockedError, ResourceError, Stopped, UsageError
from ccfa.evaluation import Report
from ccfa.experiments import Experiment, Run, run
from ccfa.experiments.analyses import reopen
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.ledger import store_result
from ccfa.experiments.running import Audience
from ccfa.experiments.schedule import Outcome
from ccfa.experiments.stopping import stoppable
from ccfa.experiments.sweep import Swept, sweep
from ccfa.learning.acceleration import Acceleration, describe_device
from ccfa.reporting.comparison import Comparison, Entry, compare_entries, grouped, setting
from ccfa.reporting.comparison_page import show_comparison
from ccfa.reporting.page import report_line
from ccfa.reporting.pictures import read_pictures
from ccfa.reporting.tables import metrics_table
from ccfa.reporting.tensorboard import TensorBoard, require_tensorboard
from ccfa.reporting.terminal import Display
from ccfa.reporting.values import counted

WIDE = 120  # columns: in a narrower terminal the definitions would be long strips of single words


def run_shown(
    resolved: Resolved,
    directory: Run,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    *,
    first_stages: Path | None,
    checkpoint_minutes: float,
    max_minutes: float | None,
    tensorboard: bool,
    new: bool = False,
) -> Report:
    """Run, or go on running, until the end or until a signal or the time limit stops it."""
    for note in resolved.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{resolved.headline} on {describe_device(device)}", soft_wrap=True)
    shared = FirstStages(first_stages) if first_stages else None
    with stoppable(max_minutes) as stop:
        try:
            with Display(resolved, console) as display:
                audience: Audience = TensorBoard(directory.path, display) if tensorboard else display
                return run(
                    resolved, directory, audience, device, acceleration, shared, stop, checkpoint_minutes, new=new
                )
        except (Exception, Stopped) as ended:
            _show_partial_page(directory, resolved, ended, console)
            raise


def sweep_shown(
    experiments: Sequence[Experiment],
    out: Path,
    data_dir: Path | None,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    *,
    at_once: int,
    first_stages: Path | None,
    checkpoint_minutes: float,
    max_minutes: float | None,
    tensorboard: bool,
    results: Path | None,
    compared: bool = True,
) -> None:
    """Run experiments, keep the report of each that finishes, and compare them; an error at the end if some failed."""
    shared = FirstStages(first_stages or out / ".first-stages")
    runs = counted(len(experiments), "run")
    console.print(f"{runs}, {at_once} at a time, on {describe_device(device)}, in {out}", soft_wrap=True)

    def audience(resolved: Resolved, directory: Run) -> Audience:
        display = Display(resolved, console, several=True)
        return TensorBoard(directory.path, display) if tensorboard else display

    def on_end(outcome: Outcome) -> None:
        show_end(outcome, console)
        if outcome.report and results:
            try:
                store_result(outcome.report, results)
            except ResourceError as error:  # the other runs go on; repeating the command keeps this report
                console.print(f"note: the report is not kept. {error}", soft_wrap=True)

    with stoppable(max_minutes) as stop:
        more = (at_once, shared, audience, on_end, stop, checkpoint_minutes)
        swept = sweep(experiments, out, data_dir, device, acceleration, *more)
    if results:
        for report in swept.reports.values():  # also of runs that were finished before
            store_result(report, results)
    if compared and (swept.reports or not swept.errors):
        for folder, comparison in comparisons(swept, out).items():
            show_comparison(comparison, folder, console)
    console.print(f"Run directories: {out}", soft_wrap=True)
    if swept.errors:
        raise failure(swept.errors)


def show_end(outcome: Outcome, console: Console) -> None:
    """Write the page of a run of a sweep and say where it is, and why the run failed, if it did."""
    (resolved, directory, *_), error = outcome.job, outcome.error
    if isinstance(error, CcfaError):
        console.print(f"{directory.path.name}: {error}", soft_wrap=True)
    if error:
        _show_partial_page(directory, resolved, error, console)
    else:
        console.print(report_line(directory.path, resolved), soft_wrap=True)


def failure(errors: Mapping[str, CcfaError]) -> CcfaError:
    """One error for runs that failed, with the exit code of the first."""
    told = "\n".join(f"  {name}: {error}" for name, error in errors.items())
    one = CcfaError(f"Not every run finished; repeat the command to continue those that failed:\n{told}")
    one.exit_code = next(iter(errors.values())).exit_code
    return one


def comparisons(swept: Swept, out: Path) -> dict[Path, Comparison]:
    """The runs of a sweep side by side, by the folder for the page: one for all, or one for each scenario."""
    refused = [f"{method} + CCFA: {reason}" for method, reason in swept.refused.items()]
    if not swept.reports:
        raise UsageError("Nothing was run. " + " ".join(refused))
    entries = [Entry(out / name, report) for name, report in swept.reports.items()]
    compared = [compare_entries(group, refused) for group in grouped(entries, setting).values()]
    folder = out / "comparison"
    return {folder / one.scenario if len(compared) > 1 else folder: one for one in compared}


def require_ready(
    first_stages: Path | None, checkpoint_minutes: float, max_minutes: float | None, tensorboard: bool
) -> None:
    """Refuse options of training that cannot be met, before anything else is done."""
    require_minutes("--checkpoint-minutes", checkpoint_minutes)
    require_minutes("--max-minutes", max_minutes)
    if tensorboard:
        require_tensorboard()
    if first_stages:
        FirstStages(first_stages)


def require_minutes(option: str, minutes: float | None) -> None:
    """Refuse what is not a length of time."""
    if minutes is not None and not 0 <= minutes < math.inf:
        raise UsageError(f"{option} takes a number of minutes, 0 or more, got {minutes}.")


def _show_partial_page(directory: Run, resolved: Resolved, ended: BaseException, console: Console) -> None:
    """Write the page of a run that ended early, if a stage is finished, and say where it is."""
    if not isinstance(ended, LockedError) and (directory.path / "report.json").exists():
        console.print(report_line(directory.path, resolved), soft_wrap=True)


def show_finished(directory: Run, data_dir: Path | None, console: Console) -> None:
    """Show a run that was finished before; pictures that its page lacks are made if its data are found."""
    report, resolved = directory.report(), None
    console.print(f"{directory.path} is finished:", soft_wrap=True)
    if read_pictures(directory.path, len(report.num_seen) - 1) is None:
        try:
            experiment = directory.read_json("config.json").get("experiment")
            is_cifar = isinstance(experiment, dict) and experiment.get("data") == "cifar100"
            if is_cifar and find_cifar100(data_dir) is None:  # no reason for a download
                raise DataError("CIFAR-100 was not found: name its folder with --data-dir.")
            resolved = reopen(directory, data_dir)
        except CcfaError as error:
            console.print(f"note: the report page has no pictures. {error}", soft_wrap=True)
    show_result(report, directory.path, resolved, console)


def show_result(report: Report, path: Path, resolved: Resolved | None, console: Console) -> None:
    """Show a run's result, write its page, and say where both are."""
    console.print(metrics_table(report, with_definitions=console.width >= WIDE))  # the page has the definitions too
    console.print(f"Run directory: {path}", soft_wrap=True)
    console.print(report_line(path, resolved), soft_wrap=True)
