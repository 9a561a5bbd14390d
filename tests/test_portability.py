"""Runs and models where Python lacks what only Unix has, as on Windows: some flags, signals, and flushing folders."""

import os
import subprocess
import sys

import pytest

from commands import environment

WITHOUT = """
import os, signal, sys
import PIL.Image, filelock, sklearn.datasets, torch.optim  # they know their own ways
filelock.FileLock = filelock.SoftFileLock
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "pwrite", "preadv", "pread", "sched_getaffinity"):
    delattr(os, name)
signal.Signals = {name: signal.Signals[name] for name in ("SIGINT", "SIGTERM")}
signal.Signals = type("Signals", (), {"__members__": signal.Signals, "__class_getitem__": signal.Signals.__getitem__})
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGQUIT"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
real = os.open
def on_files_only(path, *given, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, *given, **named)
os.open = on_files_only
from ccfa.cli import main
sys.argv = ["ccfa", *sys.argv[1:]]
main()
"""


def call(*words, cwd):
    command = [sys.executable, "-c", WITHOUT, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="nothing has to be taken away here")
def test_runs_and_models_without_what_only_unix_has(tmp_path):
    tiny = ["--data", "digits", "--scenario", "B5-inc5", "--set", "epochs=1"]
    first = call("run", "simplecil", *tiny, "--out", "runs/first", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    made = call("model", "runs/first", "model", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert call("history", "model", cwd=tmp_path).returncode == 0
    (tmp_path / "runs/first/report.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "runs/first/report.json").symlink_to(tmp_path / "elsewhere.json")
    assert "is a link" in call("compare", "runs/first", cwd=tmp_path).stderr
