import json
import os
import signal
import threading
import time

import pytest

from ccfa.errors import LockedError, ResourceError
from ccfa.experiments.lock import NAME, left_alone, locked


def held_by_a_child(folder):
    """A child that holds the folder until it is killed; its process number, once it does."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with locked(folder):
            os.write(writing, b"!")
            time.sleep(60)
        os._exit(0)
    assert os.read(reading, 1) == b"!"
    os.close(reading)
    os.close(writing)
    return process


def test_a_second_process_is_told_who_holds_the_directory_and_a_dead_one_lets_go(tmp_path):
    process = held_by_a_child(tmp_path)
    try:
        with (
            pytest.raises(LockedError, match=rf"{tmp_path} .*\({process} on \S+, since \d+-\d+-\d+ ") as error,
            locked(tmp_path),
        ):
            pass
        assert error.value.exit_code == 7
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with locked(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_two_threads_do_not_share_a_directory(tmp_path):
    errors = []

    def second():
        try:
            with locked(tmp_path):
                pass
        except LockedError as error:
            errors.append(error)

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "x" * 10_000])
def test_what_the_file_says_decides_nothing(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with locked(tmp_path), pytest.raises(LockedError), locked(tmp_path):
        pass


def test_a_directory_that_is_not_there_cannot_be_locked(tmp_path):
    with pytest.raises(ResourceError, match="No such file"), locked(tmp_path / "none"):
        pass


@pytest.mark.parametrize("step", ["truncate", "pwrite"])
def test_a_full_disk_costs_the_information_and_not_the_lock(tmp_path, monkeypatch, step):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with locked(tmp_path), pytest.raises(LockedError), locked(tmp_path):
        pass


def test_what_is_left_alone_is_not_touched_and_not_entered_while_somebody_is_at_work(tmp_path):
    with left_alone(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with locked(tmp_path), pytest.raises(LockedError, match=str(os.getpid())), left_alone(tmp_path):
        pass
    before = (tmp_path / NAME).stat().st_mtime_ns
    with left_alone(tmp_path), pytest.raises(LockedError), locked(tmp_path):
        pass
    assert (tmp_path / NAME).stat().st_mtime_ns == before
