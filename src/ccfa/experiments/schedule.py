"""Several runs on one device at once: a thread, a stream and graphs of its own for each."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ccfa.errors import CcfaError
from ccfa.evaluation import Report
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.rundir import RunDirectory
from ccfa.experiments.running import Audience, run
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

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return list(pool.map(work, jobs))
