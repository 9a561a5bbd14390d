"""Disks that are full, read-only, failing or gone: said with names and numbers; what is stored stays."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import time

import pytest

from ccfa.errors import Notice, ResourceError
from ccfa.experiments import run_directory
from ccfa.files import write_atomically
from children import in_child, started, wait
from digests import run_digest
from dying import checkpoints, die, left_over, start, stoppable_run
from toy_runs import Silent, begun, toy_resolved, toy_run


@pytest.fixture
def mounted(place):
    """A folder on a small disk of its own, or the reason why there is none."""
    folder = place / "mount"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    made = subprocess.run(options, capture_output=True, text=True) if shutil.which("mount") else None
    if made is None or made.returncode:
        pytest.skip(f"no file system may be mounted here ({made.stderr.strip() if made else 'no mount command'})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, left):
    """Use up the space of a disk but for so many bytes."""
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(b"\0" * max(free - left, 0))


def test_a_disk_that_is_full_from_some_stage_on(mounted, undisturbed):
    path = mounted / "run"

    class Filler(Silent):
        def on_stage(self, stage, result):
            fill(mounted, left=0)

    with pytest.raises(ResourceError, match=r"No space left on device"), pytest.warns(Notice):
        stoppable_run(path, audience=Filler())
    assert left_over(path) == []
    (mounted / "filler").unlink()
    stoppable_run(path)
    assert run_digest(path) == undisturbed


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS], ids=errno.errorcode.get
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(place, monkeypatch, step, code):
    resolved = toy_resolved()
    weights = resolved.method.backbone(3).state_dict()
    store = begun(place / "run", resolved.config)
    store.save_checkpoint(weights, {"value": 1})

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(ResourceError, match=rf"{os.strerror(code)}.*needs [\d,]+ bytes, and [\d,]+ are free") as error:
        store.save_checkpoint(weights, {"value": 2})
    assert error.value.exit_code == 5
    monkeypatch.undo()
    assert os.listdir(place / "run" / "checkpoints") == ["000001.safetensors"]
    assert store.load_checkpoint().state["value"] == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_log_that_cannot_be_flushed_is_told_and_tried_again(place, monkeypatch, code, undisturbed):
    failed, real = [], run_directory.sync

    def fail_once(path):
        if path.name == "metrics.jsonl" and not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code))
        real(path)

    monkeypatch.setattr(run_directory, "sync", fail_once)
    with pytest.warns(Notice, match=os.strerror(code)):
        stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_failed_flush_is_never_taken_for_a_success(place, monkeypatch):
    path, failed = place / "file", []
    write_atomically(path, "old")
    fsync = os.fsync

    def fail_once(file):
        if not failed:
            failed.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(ResourceError, match="Input/output error"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_quota_of_bytes_a_file_ends_a_run_that_can_be_continued(place, undisturbed):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        stoppable_run(place / "run")

    assert wait(started(limited)) == 5
    assert left_over(place / "run") == []
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_place_that_cannot_be_written_is_refused_before_the_data_is_read(call, mounted, monkeypatch):
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    read = []
    monkeypatch.setattr("ccfa.data.load", lambda *arguments, **options: read.append(arguments))
    code, _, err = call("run", "podnet", "--out", mounted / "run")
    assert code == 5
    assert "Read-only file system" in err
    assert str(mounted / "run") in err
    assert read == []


def test_an_out_that_is_a_file_is_refused_before_the_data_is_read(call, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    read = []
    monkeypatch.setattr("ccfa.data.load", lambda *arguments, **options: read.append(arguments))
    for out, code in (("file", 2), ("file/run", 5)):
        assert call("run", "podnet", "--out", out)[0] == code
    assert read == []
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_becomes_read_only(mounted, undisturbed):
    path = mounted / "run"
    process = start(path, "step:7:sleep")
    while not (path / "networks" / "stage-000.safetensors").exists():
        time.sleep(0.01)
    done = subprocess.run(["mount", "-o", "remount,ro", str(mounted)], capture_output=True, text=True)
    if done.returncode:
        wait(process)
        pytest.skip(f"this disk cannot be made read-only while it is in use ({done.stderr.strip()})")
    assert wait(process) == 5
    subprocess.run(["mount", "-o", "remount,rw", str(mounted)], check=True)
    stoppable_run(path)
    assert run_digest(path) == undisturbed


def test_too_little_space_for_the_whole_run_is_said_at_its_start(place, monkeypatch):
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.warns(Notice, match=r"needs about [\d,]+ bytes.*[\d,]+ are free"):
        toy_run(place / "run")
    monkeypatch.undo()


def test_no_file_is_left_open(place):
    resolved = toy_resolved()
    store = begun(place / "store", resolved.config)
    weights = resolved.method.backbone(3).state_dict()
    store.save_checkpoint(weights, {})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        store.save_checkpoint(weights, {})
    store.load_checkpoint()
    assert len(os.listdir("/proc/self/fd")) == before
    toy_run(place / "run")
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_few_file_descriptors_are_a_named_error(place, undisturbed):
    def limited():
        unused = os.open(os.devnull, os.O_RDONLY)
        os.close(unused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, unused))
        stoppable_run(place / "run")

    assert wait(started(limited)) == 5
    shutil.rmtree(place / "run", ignore_errors=True)
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed


def test_a_run_folder_that_is_removed_is_not_made_again(place):
    class Remover(Silent):
        def on_stage(self, stage, result):
            shutil.rmtree(place / "run")

    def removed():
        toy_run(place / "run", audience=Remover())

    with pytest.raises(ResourceError, match=str(place / "run")):
        in_child(removed)
    assert not (place / "run").exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_told_of_and_used(place, undisturbed, monkeypatch, code):
    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(Notice, match="no locks"):
        toy_run(place / "run")
    assert run_digest(place / "run") == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1, 60))
def test_a_full_disk_at_every_write(place, undisturbed, number):
    code = die(place / "run", f"write:{number}:enospc")
    assert code in (0, 5)
    assert left_over(place / "run") == []
    stoppable_run(place / "run")
    assert run_digest(place / "run") == undisturbed
    assert checkpoints(place / "run")
