"""A sweep: experiments, each a run of its own, on images that all of them share."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ccfa.data import load_parts
from ccfa.errors import CcfaError, Stopped, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.building import build_method, experiment_method
from ccfa.experiments.experiment import Experiment, Resolved, resolve
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.run_directory import Run, left_alone, locked
from ccfa.experiments.running import CHECKPOINT_MINUTES, Audience, finished
from ccfa.experiments.schedule import Job, Outcome, run_all
from ccfa.experiments.stopping import Stop
from ccfa.files import make_folder
from ccfa.learning.acceleration import Acceleration


@dataclass(frozen=True)
class Swept:
    """What came of a sweep: reports by the run's name, why methods were not run with CCFA, errors by the run's name."""

    reports: dict[str, Report]
    refused: dict[str, str]
    errors: dict[str, CcfaError]


def sweep(
    experiments: Iterable[Experiment],
    out: Path,
    data_dir: Path | None,
    device: torch.device,
    acceleration: Acceleration,
    at_once: int,
    first_stages: FirstStages,
    audience: Callable[[Resolved, Run], Audience],
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    stop: Stop | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
) -> Swept:
    """Run what is not finished yet, and tell all of it; a second sweep in the same folder is refused.

    Data are loaded once and shared by the runs; files that change while the sweep is at work are not read again.
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
        resolved = resolve(experiment, data_dir, load)
        report = finished(Run(out / experiment.name), resolved, acceleration)
        reports[experiment.name] = report
        if not report:
            left.append(resolved)
    errors: dict[str, CcfaError] = {}
    if left:
        make_folder(out)
        with locked(out):
            jobs = [_job(resolved, out, {"at_once": at_once}, audience) for resolved in left]
            try:
                outcomes = run_all(jobs, device, acceleration, at_once, first_stages, on_end, stop, checkpoint_minutes)
            except Stopped as stopped:
                told = "Stopped; the runs at work are saved. Repeat the command to continue."
                raise Stopped(told, stopped.exit_code) from stopped
        reports |= {job.directory.path.name: report for job, report, _ in outcomes}
        errors = {job.directory.path.name: ended for job, _, ended in outcomes if isinstance(ended, CcfaError)}
    return Swept({name: report for name, report in reports.items() if report}, refused, errors)


def _job(
    resolved: Resolved,
    out: Path,
    surroundings: dict[str, Any],
    audience: Callable[[Resolved, Run], Audience],
) -> Job:
    directory = Run(out / resolved.experiment.name)
    return Job(resolved, directory, audience(resolved, directory), surroundings)
