"""A run as a person sees it: what is about to happen, how it goes, and what came of it."""

import math
from pathlib import Path

import torch
from rich.console import Console

from ccfa.data.cifar100 import find_cifar100
from ccfa.errors import CcfaError, DataError, LockedError, Stopped, UsageError
from ccfa.evaluation import Report
from ccfa.experiments import Run, run
from ccfa.experiments.analyses import reopen
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.stopping import stoppable
from ccfa.learning.acceleration import Acceleration, describe_device
from ccfa.reporting.page import report_line
from ccfa.reporting.rundata import read_pictures
from ccfa.reporting.tables import metrics_table
from ccfa.reporting.tensorboard import require_tensorboard, with_tensorboard
from ccfa.reporting.terminal import Display

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
                audience = with_tensorboard(tensorboard, directory.path, resolved, display)
                return run(
                    resolved, directory, audience, device, acceleration, shared, stop, checkpoint_minutes, new=new
                )
        except (Exception, Stopped) as ended:
            show_partial_page(directory, resolved, ended, console)
            raise


def require_ready(
    first_stages: Path | None, checkpoint_minutes: float, max_minutes: float | None, tensorboard: bool
) -> None:
    """Refuse what cannot be done about a run's course, before anything else is."""
    require_minutes("--checkpoint-minutes", checkpoint_minutes)
    require_minutes("--max-minutes", max_minutes)
    if tensorboard:
        require_tensorboard()
    if first_stages:
        FirstStages(first_stages)


def require_minutes(option: str, minutes: float | None) -> None:
    """Refuse what is no length of time."""
    if minutes is not None and not 0 <= minutes < math.inf:
        raise UsageError(f"{option} takes a number of minutes, 0 or more, got {minutes}.")


def show_partial_page(directory: Run, resolved: Resolved, ended: BaseException, console: Console) -> None:
    """Write the page of a run that ended early, if it came to a result, and say where it is."""
    if not isinstance(ended, LockedError) and (directory.path / "report.json").exists():
        console.print(report_line(directory.path, resolved), soft_wrap=True)


def show_finished(directory: Run, data_dir: Path | None, console: Console) -> None:
    """The result of a run that was finished before; pictures that its page lacks are made, if its data are found."""
    report, resolved = directory.report(), None
    console.print(f"{directory.path} is finished:", soft_wrap=True)
    if read_pictures(directory.path, len(report.num_seen) - 1) is None:
        try:
            resolved = _data_again(directory, data_dir)
        except CcfaError as error:
            console.print(f"note: the report page has no pictures. {error}", soft_wrap=True)
    show_result(report, directory.path, resolved, console)


def _data_again(directory: Run, data_dir: Path | None) -> Resolved:
    experiment = directory.read_json("config.json").get("experiment")
    if isinstance(experiment, dict) and experiment.get("data") == "cifar100" and find_cifar100(data_dir) is None:
        raise DataError("CIFAR-100 was not found: name its folder with --data-dir.")  # no reason for a download
    return reopen(directory, data_dir)


def show_result(report: Report, path: Path, resolved: Resolved | None, console: Console) -> None:
    """A run's result, and where it is."""
    console.print(metrics_table(report, with_definitions=console.width >= WIDE))  # the report has them too
    console.print(f"Run directory: {path}", soft_wrap=True)
    console.print(report_line(path, resolved), soft_wrap=True)
