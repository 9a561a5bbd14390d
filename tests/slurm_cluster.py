"""A Slurm cluster of one node on this machine, started from a folder; of its two partitions one preempts the other."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from getpass import getuser
from pathlib import Path
from unittest import mock

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]

# A requeued job waits for `cred_expire`; the least that Slurm takes is 5 seconds.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class NotStartedError(Exception):
    """Slurm is installed, and does not work here."""


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """A cluster that Slurm's commands, called from this process, talk to; the folder's path must be short."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, user=getuser(), folder=folder, ports=(_free_port(), _free_port()))
    (folder / "slurm.conf").write_text(text)
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if int(version.partition(".")[0]) >= 23 else "")
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o600)
    files = {"key": "key", "socket": "munge.socket", "pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}
    munged = ["munged", "--foreground", "--force", f"--socket={folder / files.pop('socket')}"]
    munged += [f"--{kind}-file={folder / name}" for kind, name in files.items()]
    with (
        ExitStack() as started,
        open(folder / "daemons.log", "wb") as log,
        mock.patch.dict(os.environ, SLURM_CONF=str(folder / "slurm.conf")),
    ):
        for words in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            daemon = subprocess.Popen(words, stdout=log, stderr=log)
            started.callback(_end, daemon)
            if words is munged:
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: b"idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True).stdout, folder)
        try:
            yield
        finally:
            subprocess.run(["scancel", "--user", getuser()], capture_output=True)
            with suppress(NotStartedError):
                _wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout, folder)


def _wait_for(condition, folder: Path, seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise NotStartedError((folder / "daemons.log").read_text(errors="replace")[-1000:])
        time.sleep(0.1)


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
