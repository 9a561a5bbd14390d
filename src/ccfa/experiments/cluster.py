"""Submit `ccfa` commands as jobs of a Slurm cluster, through submitit. A stopped job is queued again and continues."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ccfa.errors import CcfaError, UsageError, installing
from ccfa.experiments.running import HEEDED, TIME_LIMIT_CODE

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

WARNING_SECONDS = 90  # between the signal and the end of a job's time, for saving the run
MAX_TIMEOUTS = 1000  # after which submitit gives a job up; a long run on short jobs needs dozens
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
CONTINUABLE = {TIME_LIMIT_CODE, *(128 + number for number in PREEMPTION)}


@dataclass(frozen=True)
class Continued:
    """A `ccfa` command as the function of a submitit job.

    The command is a child process, because its exit code says what to do next even after a crash of the interpreter.
    """

    command: tuple[str, ...]

    def __call__(self) -> None:
        """Run the command. Queue the job again if the command was stopped, and raise an error if it failed."""
        # submitit's handler calls `checkpoint`, queues the job again and exits. Users can choose its signal.
        queue_again = next(filter(callable, map(signal.getsignal, (signal.SIGUSR2, signal.SIGUSR1))))
        code = exit_code([sys.executable, "-m", "ccfa.cli", *self.command[1:]])
        if code in CONTINUABLE:
            if _is_left_to_us():
                queue_again(signal.SIGUSR2, None)
            sys.exit(code)  # the job did not fail: it was cancelled, or Slurm has queued it again itself
        if code != 0:
            raise CcfaError(f"Exit code {code}: {shlex.join(self.command)}")

    def checkpoint(self) -> "DelayedSubmission":
        """Return what the job does next time: the same command, which continues from the run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def exit_code(command: Sequence[str]) -> int:
    """Run a command and return its exit code; signals are passed on to it, so that it can save itself."""
    child: subprocess.Popen[bytes] | None = None
    arrived: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if child is not None:
            child.send_signal(number)

    for number in HEEDED:
        signal.signal(number, pass_on)
    child = subprocess.Popen(command)
    for early in arrived:  # while the command was being started
        child.send_signal(early)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _is_left_to_us() -> bool:
    """Whether Slurm still calls the job running: nobody has cancelled it or queued it again."""
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return True
    job = os.environ["SLURM_JOB_ID"]  # for the last task of an array this is the whole array
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    words = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.strip() == "RUNNING"


def submit(
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    partition: str | None = None,
    minutes: int = 240,
    gpus: int = 1,
    cpus: int = 4,
    memory_gb: int | None = None,
    at_once: int = 8,
    options: Mapping[str, str] | None = None,
    local: bool = False,
) -> "list[Job[None]]":
    """Submit `ccfa` commands as one array of Slurm jobs.

    Each command must continue its run when it is repeated, as `ccfa run ... --out DIR --reuse` does. A job that is
    preempted or runs out of time saves, is queued again and continues. Any other exit code than 0 fails the job.

    Args:
        commands: One list of words per job, the first of them `ccfa`.
        folder: The folder for scripts and logs of the jobs, which all nodes must see.
        partition: The Slurm partition; the cluster's default if None.
        minutes: Time limit of a job. A run may take several jobs.
        gpus: GPUs per job.
        cpus: CPU cores per job.
        memory_gb: Memory per job; the cluster's default if None.
        at_once: How many of the jobs may run at the same time.
        options: Further options of `sbatch`, such as `{"account": "vision"}`.
        local: Start all jobs at once on this machine, without Slurm, for a trial.

    Returns:
        The jobs, in the order of the commands.

    Example:
        >>> submit([], Path("runs/slurm"))
        []
    """
    for name, value, least in (("minutes", minutes, 1), ("gpus", gpus, 0), ("cpus", cpus, 1), ("at_once", at_once, 1)):
        if value < least:
            raise UsageError(f"A job needs {name} of {least} or more, got {value}.")
    if not commands:
        return []
    try:
        import cloudpickle
        import submitit
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Submitting jobs needs the package submitit. Install it with: {installing('cluster')}, "
            "or print the commands with --plan."
        ) from error
    if not local and shutil.which("sbatch") is None:
        raise UsageError("sbatch was not found. Submit jobs where Slurm is, or print the commands with --plan.")
    limits = {"local_max_num_timeout": MAX_TIMEOUTS, "slurm_max_num_timeout": MAX_TIMEOUTS}
    executor = submitit.AutoExecutor(folder, cluster="local" if local else "slurm", **limits)
    executor.update_parameters(
        name="ccfa",
        timeout_min=minutes,
        gpus_per_node=gpus or None,
        cpus_per_task=cpus,
        mem_gb=memory_gb,
        stderr_to_stdout=True,
        slurm_partition=partition,
        slurm_array_parallelism=at_once,
        slurm_signal_delay_s=min(WARNING_SECONDS, 30 * minutes),
        slurm_srun_args=[f"--cpus-per-task={cpus}"],  # since Slurm 22.05 a step does not inherit it
        slurm_additional_parameters={"requeue": True, **(options or {})},
    )
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that the waiting process does not import torch
    try:
        jobs: list[Job[None]] = executor.submit_array([Continued(tuple(command)) for command in commands])
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise UsageError(f"Slurm refused the jobs: {' '.join(str(error).split())}") from error
    return jobs
