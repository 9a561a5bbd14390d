"""A run directory: begun once, continued only as the same experiment, never written outside of itself."""

import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch

from ccfa.errors import LockedError, ModelError, Notice, ResourceError, UsageError
from ccfa.experiments import Run
from ccfa.experiments.run_directory import differences, left_alone, two_columns
from ccfa.files import LOCK, locked, read_tensors, write_tensors
from commands import contents
from toy_runs import begun

CONFIG = {"experiment": {"method": "toy"}, "resolved": {"stage_sizes": [1]}}
ENVIRONMENT = {"device": "cpu", "acceleration": {"precision": "float32"}}


@pytest.fixture
def run(tmp_path):
    return begun(tmp_path / "runs" / "toy", CONFIG, ENVIRONMENT)


def enter(path, config=CONFIG, new=False):
    with Run(path).entered(config, ENVIRONMENT, new):
        pass


def test_the_same_experiment_enters_again(run):
    assert run.config == CONFIG
    assert run.environment == ENVIRONMENT
    assert not run.is_finished()
    before = contents(run.path)
    enter(run.path)
    assert contents(run.path) == before


def test_another_experiment_is_refused_with_both_values(run):
    before = contents(run.path)
    with pytest.raises(UsageError, match=r"resolved.stage_sizes +\[1\] +\[2\]"):
        enter(run.path, {**CONFIG, "resolved": {"stage_sizes": [2]}})
    assert contents(run.path) == before


def test_a_new_run_is_refused_in_a_run_directory(run):
    for refuse in (lambda: enter(run.path, new=True), run.require_new):
        with pytest.raises(UsageError, match="--reuse"):
            refuse()


def test_what_is_of_somebody_else_is_refused(tmp_path):
    for name in ("folder/thesis.txt", "project/.git/HEAD", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name in ("folder", "project", "file", "link"):
        with pytest.raises(UsageError, match=f"{name} exists already"):
            Run(tmp_path / name).require_new()
    for name in ("folder", "project", "file", "file/run"):
        with pytest.raises((UsageError, ResourceError), match=name):
            enter(tmp_path / name)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("made", [(), ("networks", "environment.json", ".lock", ".config.json.1.tmp")])
def test_what_a_killed_process_left_half_made_is_used(tmp_path, made):
    path = tmp_path / "run"
    path.mkdir()
    for name in made:
        (path / name).write_text("{}") if "." in name else (path / name).mkdir()
    Run(path).require_new()
    enter(path, new=True)
    assert Run(path).config == CONFIG
    assert not list(path.glob(".*.tmp"))


def test_of_many_at_once_one_begins_the_run(tmp_path):
    path, errors, done = tmp_path / "run", [], []
    together = threading.Barrier(8)

    def make():
        together.wait(timeout=20)
        try:
            enter(path, new=True)
            done.append(1)
        except (LockedError, UsageError) as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(errors)) == (1, 7)
    assert Run(path).config == CONFIG


@pytest.mark.parametrize("name", [LOCK, "metrics.jsonl", "errors.txt", "checkpoints", "exemplars"])
def test_nothing_is_written_through_a_link(run, tmp_path, name):
    path, victim = run.path / name, tmp_path / "victim"
    victim.mkdir()
    (victim / "20240101").write_text("precious")
    (victim / ".x.tmp").write_text("precious")
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(victim / "20240101" if "." in name else victim)
    before = contents(victim)
    with pytest.raises(ModelError, match=name):
        enter(run.path)
    assert contents(victim) == before


def test_a_pipe_is_refused_instead_of_waited_for(run):
    os.mkfifo(run.path / "metrics.jsonl")
    with pytest.raises(ModelError, match="metrics"):
        enter(run.path)


def test_a_second_process_is_refused_until_the_first_dies(run):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with locked(run.path):
            run.set_status("running")
            os.write(writing, b"!")
            time.sleep(60)
        os._exit(0)
    assert os.read(reading, 1) == b"!"
    try:
        with pytest.raises(LockedError, match=rf"{run.path} .*\({process} on ") as error:
            enter(run.path)
        assert error.value.exit_code == 7
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    enter(run.path)


def test_a_lock_leaves_no_trace_and_its_file_decides_nothing(tmp_path):
    with left_alone(tmp_path):
        assert list(tmp_path.iterdir()) == []
    (tmp_path / LOCK).write_bytes(b"\xff" * 1000)
    with locked(tmp_path):
        for hold in (locked, left_alone):
            with pytest.raises(LockedError), hold(tmp_path):
                pass


@pytest.mark.parametrize("content", [None, "{", '{"rows": [3]}'])
def test_damaged_files_are_named(run, content):
    readers = {"report.json": run.report, "exemplars/stage-000.json": lambda: run.read_exemplars(0)}
    for name, read in readers.items():
        if content is not None:
            (run.path / name).write_text(content)
        with pytest.raises(ModelError, match=name):
            read()


def test_lines_are_appended_or_missed_with_a_notice(run):
    run.append("errors.txt", "one ü \udcff")
    run.append("errors.txt", "two")
    assert (run.path / "errors.txt").read_bytes() == "one ü ?\ntwo\n".encode()
    run.append("metrics.jsonl", '{"epoch": 0}')
    run.append("metrics.jsonl", '{"epoch": 1, "pha')
    assert run.read_epochs() == [{"epoch": 0}], "without the line that is cut off"
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").mkdir()
    with pytest.warns(Notice, match=r"metrics\.jsonl"):
        run.append("metrics.jsonl", "x")
    with pytest.raises(ResourceError, match="gone"):
        Run(run.path / "gone").append("errors.txt", "x")


def test_predictions_and_networks_belong_to_run_and_stage(run, tmp_path):
    arrays = {"labels": np.arange(5), "by_logits": np.array([0, 1, 1, 3, 4])}
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    run.write_predictions(7, arrays)
    run.write_network(7, network)
    run.write_exemplars(7, [torch.tensor([7, 2, 9]), torch.tensor([], dtype=torch.int64)])
    assert run.read_exemplars(7) == [[7, 2, 9], []]
    found, weights = run.read_predictions(7), run.network_weights(7)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    assert all(torch.equal(weights[name], tensor) for name, tensor in network.state_dict().items())
    other = begun(tmp_path / "other", {**CONFIG, "resolved": {}})
    for folder, read in (("predictions", "read_predictions"), ("networks", "network_weights")):
        stored = run.path / folder / "stage-007.safetensors"
        shutil.copy(stored, stored.with_name("stage-008.safetensors"))
        shutil.copy(stored, other.path / folder)
        for reader, stage in ((run, 8), (other, 7)):
            with pytest.raises(ModelError, match="another run or stage"):
                getattr(reader, read)(stage)


def value(number):
    return {"weights": torch.full((3, 5), float(number)), "rows": torch.arange(4), "empty": torch.empty(0, 7)}


@pytest.fixture
def stored(run):
    """A run with the checkpoints 1 and 2."""
    for number in (1, 2):
        run.save_checkpoint(value(number), {"number": number})
    return run


def test_the_newest_of_two_checkpoints_comes_back(stored):
    for name in ("000009x", "0000012.safetensors", "latest", "999999999.safetensors"):
        (stored.path / "checkpoints" / name).write_text("")
    checkpoint = stored.load_checkpoint()
    assert (checkpoint.number, checkpoint.state) == (2, {"number": 2})
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in value(2).items())
    stored.save_checkpoint(value(3), {})
    assert stored.checkpoint_numbers() == [2, 3]
    stored.prune_checkpoints(1)
    assert stored.checkpoint_numbers() == [3]


def test_a_checkpoint_of_another_experiment_or_version_is_refused_and_stays(stored, tmp_path):
    tensors, facts = read_tensors(stored.checkpoint_path(2))
    write_tensors(stored.checkpoint_path(2), tensors, {**facts, "format": 9, "ccfa": "9.1"})
    other = begun(tmp_path / "other", {**CONFIG, "resolved": {}})
    shutil.copy(stored.checkpoint_path(1), other.checkpoint_path(1))
    for run, message in ((stored, r"9\.1"), (other, "another experiment")):
        before = contents(run.path)
        with pytest.raises(ModelError, match=message):
            run.load_checkpoint()
        assert contents(run.path) == before


def test_only_what_differs_is_named():
    stored = {"experiment": {"seed": 0, "lr": "0.1"}, "order": [0, 1], "gone": 3, "parts": [{"count": 1}]}
    now = {"experiment": {"seed": 1, "lr": "0.1"}, "order": [1, 0], "new": None, "parts": [{"count": 2}]}
    found = differences(stored, now)
    assert found.pop("order") == ([0, 1], [1, 0])
    assert found == {"experiment.seed": (0, 1), "gone": (3, None), "parts.0.count": (1, 2)}
    assert max(map(len, two_columns({"x": (list(range(100)), "y" * 100)}).splitlines())) < 100


@pytest.mark.parametrize("more", [{}, {"a": {}}, [], {"a": 1}])
def test_nothing_that_was_added_is_overlooked(more):
    assert differences({"parts": [{"a": {}}]}, {"parts": [{"a": {}}, more]})
