"""A run as a person sees it: what is about to happen, how it goes, and what came of it."""

from pathlib import Path

import torch
from rich.console import Console

from ccfa.evaluation import Report
from ccfa.experiments import RunDirectory, run
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.stopping import stoppable
from ccfa.learning.acceleration import Acceleration, describe_device
from ccfa.reporting.page import report_line
from ccfa.reporting.tables import metrics_table
from ccfa.reporting.tensorboard import with_tensorboard
from ccfa.reporting.terminal import Display

WIDE = 120  # columns: in a narrower terminal the definitions would be long strips of single words


def run_shown(
    resolved: Resolved,
    directory: RunDirectory,
    device: torch.device,
    acceleration: Acceleration,
    console: Console,
    *,
    first_stages: Path | None,
    checkpoint_minutes: float,
    max_minutes: float | None,
    tensorboard: bool,
) -> Report:
    """Run, or go on running, until the end or until a signal or the time limit stops it."""
    for note in resolved.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{resolved.headline} on {describe_device(device)}", soft_wrap=True)
    shared = FirstStages(first_stages) if first_stages else None
    with stoppable(max_minutes) as stop, Display(resolved, console) as display:
        audience = with_tensorboard(tensorboard, directory.path, resolved, display)
        return run(resolved, directory, audience, device, acceleration, shared, stop, checkpoint_minutes)


def show_result(report: Report, path: Path, resolved: Resolved | None, console: Console) -> None:
    """A run's result, and where it is."""
    console.print(metrics_table(report, with_definitions=console.width >= WIDE))  # the report has them too
    console.print(f"Run directory: {path}", soft_wrap=True)
    console.print(report_line(path, resolved), soft_wrap=True)
