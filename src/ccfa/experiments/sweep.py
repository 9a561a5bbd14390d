"""A sweep: methods x {alone, with CCFA} x class orders x seeds, each a run of its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ccfa.augmentation import CCFA
from ccfa.errors import CcfaError, ResourceError, Stopped, UsageError, unknown
from ccfa.evaluation import Report
from ccfa.experiments.environment import environment
from ccfa.experiments.experiment import Experiment, Resolved, build_method, experiment_method, factory, resolve
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.lock import left_alone, locked
from ccfa.experiments.options import schema
from ccfa.experiments.recording import Audience
from ccfa.experiments.rundir import RunDirectory
from ccfa.experiments.running import CHECKPOINT_MINUTES
from ccfa.experiments.schedule import Job, Outcome, run_all
from ccfa.experiments.stopping import Stop
from ccfa.learning.acceleration import Acceleration, suit_threads
from ccfa.methods import METHODS

Key = tuple[str, bool]
"""A method, and whether CCFA is plugged in."""


@dataclass(frozen=True)
class Cell:
    """A method with or without CCFA: its reports by (order, seed), or the reason why there are none.

    Errors are those of runs that failed, by their name.
    """

    reports: dict[tuple[str, int], Report]
    reason: str = ""
    errors: dict[str, CcfaError] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to sweep over; no orders means the data's own."""

    methods: tuple[str, ...]
    ccfa: tuple[bool, ...] = (False, True)
    data: str = "digits"
    scenario: str | None = None
    orders: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    memory: int | None = None
    validation: float = 0.0
    skip_bad: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def experiments(self) -> Iterator[tuple[Key, Experiment]]:
        """Every run of the sweep; a method takes those of the options that it has."""
        names = tuple(METHODS) if self.methods == ("all",) else self.methods
        if not names or not self.seeds:
            raise UsageError("A sweep needs at least one method (or `all`) and one seed.")
        known = {option for name in names for option in schema(factory(name))}
        known |= {f"ccfa.{option}" for option in schema(CCFA)} if any(self.ccfa) else set()
        for option in self.options:
            if option not in known:
                raise unknown("option of these methods", option, known)
        for method in names:
            for ccfa in self.ccfa:
                own = {
                    option: text
                    for option, text in self.options.items()
                    if option in schema(factory(method)) or (ccfa and option.startswith("ccfa."))
                }
                for order in dict.fromkeys(self.orders or (None,)):
                    for seed in dict.fromkeys(self.seeds):
                        yield (
                            (method, ccfa),
                            Experiment(
                                method=method,
                                ccfa=ccfa,
                                data=self.data,
                                scenario=self.scenario,
                                order=order,
                                memory=self.memory,
                                validation=self.validation,
                                skip_bad=self.skip_bad,
                                seed=seed,
                                options=own,
                            ),
                        )


def sweep(
    plan: Plan,
    out: Path,
    data_dir: Path | None,
    device: torch.device,
    acceleration: Acceleration,
    at_once: int,
    first_stages: FirstStages,
    audience: Callable[[Resolved, RunDirectory], Audience],
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    stop: Stop | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
) -> dict[Key, Cell]:
    """Run what is not finished yet, and tell all of it; a second sweep in the same folder is refused."""
    with left_alone(out):
        pass  # refused at once, before any data is read
    cells: dict[Key, Cell] = {}
    left: list[Resolved] = []
    for key, experiment in plan.experiments():
        try:
            experiment_method(experiment)
        except UsageError as error:
            if not (experiment.ccfa and build_method(experiment.method, experiment.data).no_old_head):
                raise
            cells[key] = Cell({}, str(error))  # CCFA has no meaning for this method
            continue
        resolved = resolve(experiment, data_dir)
        cells.setdefault(key, Cell({}))
        if report := RunDirectory.finished(out / experiment.name, resolved.config, acceleration):
            cells[key].reports[_of(resolved)] = report
        else:
            left.append(resolved)
    if not left:
        return cells
    suit_threads(left[0].train.images[0].numel())
    with _held(out):
        surroundings = environment(device, acceleration)
        jobs = [_job(resolved, out, surroundings, audience) for resolved in left]
        try:
            outcomes = run_all(jobs, device, acceleration, at_once, first_stages, on_end, stop, checkpoint_minutes)
        except Stopped as stopped:
            told = "Stopped; the runs at work are saved. Repeat the command to continue."
            raise Stopped(told, stopped.exit_code) from stopped
    for job, report, ended in outcomes:
        cell = cells[job.resolved.experiment.method, job.resolved.experiment.ccfa]
        if report:
            cell.reports[_of(job.resolved)] = report
        if isinstance(ended, CcfaError):
            cell.errors[job.directory.path.name] = ended
    return cells


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The sweep's folder, for itself alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"Could not create {out}: {error.strerror}. Choose another with --out.") from error
    with locked(out):
        yield


def _job(
    resolved: Resolved,
    out: Path,
    surroundings: dict[str, Any],
    audience: Callable[[Resolved, RunDirectory], Audience],
) -> Job:
    directory = RunDirectory.create_or_continue(out / resolved.experiment.name, resolved.config, surroundings)
    return Job(resolved, directory, audience(resolved, directory))


def _of(resolved: Resolved) -> tuple[str, int]:
    return ",".join(map(str, resolved.order)), resolved.experiment.seed
