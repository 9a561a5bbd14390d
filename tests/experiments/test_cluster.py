"""Commands as Slurm jobs: what an exit code means, what is refused, and jobs that are stopped and continue."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ccfa.errors import CcfaError, UsageError
from ccfa.experiments import Run, cluster
from ccfa.experiments.cluster import Continued, submit
from commands import COMMAND, environment
from digests import run_digest
from digit_runs import digit_run
from slurm_cluster import MISSING, NotStartedError, slurm

RUN = ["run", "finetune", "--scenario", "5,5", "--set", "epochs=2", "--device", "cpu"]  # 28 steps, 7 an epoch
SLOWLY = ",".join(f"step:{step}:sleep" for step in range(9, 13))  # seconds after the first epoch, for a signal
TESTS = Path(__file__).parents[1]
ONE_JOB = {"minutes": 20, "gpus": 0, "cpus": 1}


def words(out, run=RUN):
    return ["ccfa", *run, "--out", out, "--reuse"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_digest(digit_run(path, "finetune", scenario="5,5", options={"epochs": "2"}).path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where jobs are submitted, with the variables that they will see."""
    wanted = environment(CCFA_FAIL=SLOWLY)
    wanted["PYTHONPATH"] = os.pathsep.join([str(TESTS / "processes"), str(TESTS), wanted["PYTHONPATH"]])
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wait_for(condition, seconds=150):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def has_begun(run):
    """Whether the first epoch is done."""
    return (run / "metrics.jsonl").exists() and "\n" in (run / "metrics.jsonl").read_text()


def starts(job):
    return (job.stdout() or "").count("Loading pickle")


def succeeds(job):
    wait_for(job.done)
    return job.result() is None


def continued(job, run, undisturbed):
    """Whether a job was stopped once, saved its run, and ended as one that was not stopped."""
    return succeeds(job) and starts(job) == 2 and "; saved" in job.stdout() and run_digest(run) == undisturbed


@pytest.mark.parametrize(
    ("code", "cancelled", "ending"),
    [
        (0, False, None),
        *((code, False, "queued again") for code in (75, 138, 140, 143)),
        (143, True, 143),
        *((code, False, f"Exit code {code}: ccfa run 'a b'") for code in (2, 130, 137)),
    ],
)
def test_what_exit_codes_mean(monkeypatch, code, cancelled, ending):
    def queue_again(number, frame):
        raise SystemExit("queued again")

    monkeypatch.setattr(signal, "getsignal", lambda number: queue_again)
    monkeypatch.setattr(cluster, "_is_left_to_us", lambda: not cancelled)
    monkeypatch.setattr(cluster, "exit_code", lambda words: code)
    try:
        ended = Continued(("ccfa", "run", "a b"))()
    except SystemExit as stopped:
        ended = stopped.code
    except CcfaError as error:
        ended = str(error)
    assert ended == ending


def test_what_is_missing_or_impossible_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="minutes"):
        submit([words("run")], tmp_path, minutes=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch"):
        submit([words("run")], tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"\[cluster\]"):
        submit([words("run")], tmp_path)


def test_a_failing_job_gives_the_reason(place):
    (job,) = submit([["ccfa", "rum"]], place / "jobs", **ONE_JOB, local=True)
    assert "Exit code 2: ccfa rum" in str(job.exception())
    assert "sweep" in job.stdout()  # the verbs that there are
    assert starts(job) == 1


@pytest.fixture(scope="module")
def real_slurm():
    if MISSING:
        pytest.skip(f"Slurm is not installed: no {MISSING[0]}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with slurm(Path(folder)):
                yield
        except NotStartedError as error:
            pytest.skip(f"Slurm does not start here: {error}")


def state(job):
    """The state of a job; empty if Slurm has forgotten it."""
    words = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job.job_id}"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


@pytest.mark.soak
def test_refused_and_stopped_slurm_jobs(place, undisturbed, real_slurm):
    with pytest.raises(UsageError, match="partition"):
        submit([words("run")], place / "jobs", partition="nowhere", **ONE_JOB)
    # The last task of an array has the array's own job number.
    stops = {"requeued": ["scontrol", "requeue"], "signalled": ["scancel", "--signal=USR2"]}
    jobs = submit([words(out) for out in stops], place / "jobs", partition="low", **ONE_JOB)
    left = dict(zip(stops, jobs, strict=True))
    while left:
        wait_for(lambda: any(has_begun(place / out) for out in left))
        for out in [out for out in left if has_begun(place / out)]:
            subprocess.run([*stops[out], left.pop(out).job_id], check=True)
    for out, job in zip(stops, jobs, strict=True):
        assert continued(job, place / out, undisturbed)


@pytest.mark.soak
def test_a_preempted_job_continues(place, undisturbed, real_slurm):
    (job,) = submit([words("run")], place / "jobs", partition="low", **ONE_JOB)
    wait_for(lambda: has_begun(place / "run"))
    subprocess.run(["sbatch", "--partition=high", "--exclusive", "--wrap=true"], check=True, capture_output=True)
    assert continued(job, place / "run", undisturbed)


@pytest.mark.soak
def test_a_cancelled_job_saves_and_stays_cancelled(place, real_slurm):
    failing, job = submit([["ccfa", "run", "podnext"], words("run")], place / "jobs", partition="low", **ONE_JOB)
    wait_for(lambda: has_begun(place / "run"))
    job.cancel()
    wait_for(lambda: state(job) == "CANCELLED")
    assert Run(place / "run").status["state"] == "interrupted"
    wait_for(lambda: state(failing) == "FAILED")
    assert "Exit code 2" in str(failing.exception())


@pytest.mark.soak
def test_a_job_out_of_time_is_queued_again(place, real_slurm, monkeypatch):
    monkeypatch.setenv("CCFA_FAIL", ",".join(f"step:{number}:sleep" for number in range(1, 600)))
    longer = [*RUN[:4], "--set", "epochs=40", "--device", "cpu"]
    (job,) = submit([words("run", longer)], place / "jobs", partition="low", **{**ONE_JOB, "minutes": 1})
    wait_for(lambda: starts(job) >= 2 and "saved" in job.stdout(), seconds=300)
    job.cancel()


@pytest.mark.soak
def test_the_script_of_the_docs_queues_itself_again(place, undisturbed, real_slurm):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    script = page.partition("```bash\n")[2].partition("```")[0].replace("#SBATCH --gpus-per-node=1\n", "")
    (place / "job.sh").write_text(script)
    (place / "plan.txt").write_text(shlex.join([*COMMAND, *words("run")[1:]]) + "\n")
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--array=1-1%8", "--output=log", "job.sh"], check=True, capture_output=True, text=True
    )
    wait_for(lambda: has_begun(place / "run"))
    subprocess.run(["scancel", "--signal=USR2", f"{submitted.stdout.strip()}_1"], check=True)
    wait_for(lambda: Run(place / "run").status["state"] == "finished")
    assert (place / "log").read_text().count("saved") == 1
    assert run_digest(place / "run") == undisturbed
