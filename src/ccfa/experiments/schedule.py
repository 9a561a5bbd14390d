"""Several runs on one device at once: a thread, a stream and graphs of its own for each."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ccfa.errors import CcfaError, Stopped, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.first_stage import FirstStages
from ccfa.experiments.run_directory import ERRORS, Run
from ccfa.experiments.running import CHECKPOINT_MINUTES, Audience, run
from ccfa.experiments.stopping import Stop
from ccfa.kernels.graphs import own_stream
from ccfa.learning.acceleration import Acceleration


class Job(NamedTuple):
    """A run to be done, and who watches it; its directory is made, or continued, when it begins."""

    resolved: Resolved
    directory: Run
    audience: Audience
    surroundings: dict[str, Any]


class Outcome(NamedTuple):
    """What became of a job: its report, or what ended it before."""

    job: Job
    report: Report | None
    error: CcfaError | Stopped | None


def run_all(
    jobs: Sequence[Job],
    device: torch.device,
    acceleration: Acceleration,
    at_once: int,
    first_stages: FirstStages | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    stop: Stop | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
) -> list[Outcome]:
    """Run all jobs, so many at a time; one that fails does not stop the others, and `stop` stops them all.

    Runs differ from runs alone by nothing but the order in which the device works: each draws from its own generators.
    """
    stopping = stop or Stop()

    def work(job: Job) -> Outcome:
        try:
            if code := stopping.asked():
                raise Stopped("Stopped before this run began.", code)
            with own_stream(device):
                settings = device, acceleration, first_stages, stopping, checkpoint_minutes, job.surroundings
                report = run(job.resolved, job.directory, job.audience, *settings)
            outcome = Outcome(job, report, None)
        except Stopped as stopped:
            on_end(Outcome(job, None, stopped))
            raise
        except CcfaError as error:
            outcome = Outcome(job, None, error)
        except Exception as error:  # of one's own method, say, whose other runs may be well
            outcome = Outcome(job, None, _told(error, job))
        on_end(outcome)
        return outcome

    if at_once < 1:
        raise UsageError(f"At least one run must be at work at a time, got {at_once}.")
    if at_once == 1:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:  # tell the others
            stopping.code = stopping.asked() or 130
            pool.shutdown(cancel_futures=True)
            raise


def _told(error: Exception, job: Job) -> CcfaError:
    """An unexpected error in one line; the rest is written down."""
    told = CcfaError(f"{type(error).__name__}: {error}. The traceback is in {job.directory.path / ERRORS}.")
    told.__cause__ = error
    return told
