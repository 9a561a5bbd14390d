"""Disks that are full, read-only, failing or gone: exit code 5, and what is stored stays."""

import errno
import os
import resource
import shutil
import signal
import subprocess

import pytest

from ccfa.errors import Notice, ResourceError
from ccfa.experiments import run_directory
from children import started, wait
from digests import run_digest
from dying import checkpoints, die, left_over, stoppable_run
from toy_runs import Silent, toy_run


@pytest.fixture
def mounted(place):
    """A folder on a small disk of its own; the test is skipped where nothing can be mounted."""
    folder = place / "mount"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    made = subprocess.run(options, capture_output=True, text=True) if shutil.which("mount") else None
    if made is None or made.returncode:
        pytest.skip(f"no file system may be mounted here ({made.stderr.strip() if made else 'no mount command'})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class AfterFirst(Silent):
    """Calls a function when the first stage has ended."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_stage(self, stage, result):
        if stage.index == 0:
            self.function()


def error(code):
    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_disk_that_becomes_full(mounted, undisturbed):
    path, filler = mounted / "run", mounted / "filler"

    def fill():
        filler.write_bytes(b"\0" * shutil.disk_usage(mounted).free)

    with pytest.raises(ResourceError, match=r"No space left on device"), pytest.warns(Notice):
        stoppable_run(path, audience=AfterFirst(fill))
    assert left_over(path) == []
    filler.unlink()
    stoppable_run(path)
    assert run_digest(path) == undisturbed


@pytest.mark.parametrize(("step", "code"), [("fsync", errno.EIO), ("replace", errno.EROFS)])
def test_a_disk_that_fails_in_the_middle(place, monkeypatch, undisturbed, step, code):
    path = place / "run"
    with pytest.raises(ResourceError, match=os.strerror(code)):
        toy_run(path, audience=AfterFirst(lambda: monkeypatch.setattr(os, step, error(code))))
    monkeypatch.undo()
    assert left_over(path) == []
    toy_run(path)
    assert run_digest(path) == undisturbed


def test_a_checkpoint_that_cannot_be_stored_is_tried_again(place, monkeypatch, undisturbed):
    failed, real = [], run_directory.sync

    def fail_once(path):
        if path.name == "metrics.jsonl" and not failed:
            failed.append(path)
            error(errno.EIO)()
        real(path)

    monkeypatch.setattr(run_directory, "sync", fail_once)
    with pytest.warns(Notice, match=os.strerror(errno.EIO)):
        stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_quota_or_too_few_descriptors_end_a_run_that_can_be_continued(place, undisturbed):
    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        stoppable_run(place / "run")

    def few_files():
        unused = os.open(os.devnull, os.O_RDONLY)
        os.close(unused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, unused))
        stoppable_run(place / "run")

    for limited in (small_files, few_files):
        assert wait(started(limited)) == 5
        assert left_over(place / "run") == []
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_place_that_cannot_be_written_is_refused_before_data_is_read(call, mounted, monkeypatch):
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    monkeypatch.setattr("ccfa.data.registry.load", lambda *arguments, **options: pytest.fail("read data"))
    code, _, err = call("run", "podnet", "--out", mounted / "run")
    assert code == 5
    assert "Read-only" in err


def test_too_little_space_for_the_whole_run_is_noted_at_its_start(place, monkeypatch):
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.warns(Notice, match=r"needs about [\d,]+ bytes"), pytest.raises(KeyboardInterrupt):
        toy_run(place / "run", audience=AfterFirst(lambda: signal.raise_signal(signal.SIGINT)))


def test_a_run_folder_that_is_removed_is_not_made_again(place):
    with pytest.raises(ResourceError, match=str(place / "run")):
        toy_run(place / "run", audience=AfterFirst(lambda: shutil.rmtree(place / "run")))
    assert not (place / "run").exists()


def test_a_file_system_without_locks_is_noted_and_used(place, monkeypatch):
    monkeypatch.setattr("fcntl.flock", error(errno.ENOLCK))
    with pytest.warns(Notice, match="no locks"):
        assert toy_run(place / "run").finished


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1, 60))
def test_a_full_disk_at_every_write(place, undisturbed, number):
    code = die(place / "run", f"write:{number}:enospc")
    assert code in (0, 5)
    assert left_over(place / "run") == []
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed
    assert checkpoints(place / "run")
