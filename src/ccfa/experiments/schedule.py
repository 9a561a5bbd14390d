"""Several runs on one device at once: a thread, a stream and graphs of its own for each."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import CcfaError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.rundir import RunDirectory
from ccfa.experiments.running import Audience, run
from ccfa.learning import Progress
from ccfa.learning.acceleration import Acceleration, own_stream


class Job(NamedTuple):
    """A run to be done, and who watches it."""

    resolved: Resolved
    directory: RunDirectory
    audience: Audience


class Outcome(NamedTuple):
    """What became of a job: its report, or the error that ended it."""

    job: Job
    report: Report | None
    error: CcfaError | None


def run_all(
    jobs: Sequence[Job],
    device: torch.device,
    acceleration: Acceleration,
    at_once: int,
    first_stages: FirstStages | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run all jobs, so many at a time; one that fails does not stop the others.

    Runs differ from runs alone by nothing but the order in which the device works: each draws from its own generators.
    """

    def work(job: Job) -> Outcome:
        try:
            with own_stream(device):
                report = run(job.resolved, job.directory, job.audience, device, acceleration, first_stages)
            outcome = Outcome(job, report, None)
        except CcfaError as error:
            outcome = Outcome(job, None, error)
        on_end(outcome)
        return outcome

    if at_once < 1:
        raise UsageError(f"At least one run must be at work at a time, got {at_once}.")
    if at_once == 1:
        return [work(job) for job in jobs]
    stop = threading.Event()
    jobs = [job._replace(audience=Stoppable(job.audience, stop)) for job in jobs]
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C reaches this thread only: tell the others
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class Stoppable:
    """Passes everything on, and ends a run between two steps once it is asked to stop."""

    def __init__(self, audience: Audience, stop: threading.Event) -> None:
        self.audience = audience
        self.stop = stop

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Stop here, or go on."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.audience.on_batch(progress, losses)

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Pass it on."""
        self.audience.on_epoch(progress, losses, lr, seconds)

    def on_stage(self, stage: Stage, result: dict[str, Any]) -> None:
        """Pass it on."""
        self.audience.on_stage(stage, result)
