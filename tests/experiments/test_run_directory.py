"""A run directory: begun once, continued only as the same experiment, never written outside of itself."""

import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch

from ccfa.errors import DivergedError, LockedError, ModelError, Notice, ResourceError, UsageError
from ccfa.experiments import Experiment, Run, resolve
from ccfa.experiments.run_directory import LOCK, left_alone, locked
from ccfa.files import read_tensors, write_tensors
from commands import contents
from toy_runs import begun, toy_resolved, toy_run

CONFIG = {"experiment": {"method": "toy"}, "resolved": {"stage_sizes": [1]}}
SURROUNDINGS = {"device": "cpu", "acceleration": {"precision": "float32"}}


@pytest.fixture
def directory(tmp_path):
    return begun(tmp_path / "runs" / "toy", CONFIG, SURROUNDINGS)


def enter(path, config=CONFIG, new=False):
    with Run(path).entered(config, SURROUNDINGS, new):
        pass


def test_a_new_directory_has_configuration_and_environment(directory):
    assert directory.config == CONFIG
    assert directory.environment == SURROUNDINGS
    assert not directory.is_finished()


def test_the_same_experiment_enters_again(directory):
    before = contents(directory.path)
    enter(directory.path)
    assert contents(directory.path) == before


def test_another_experiment_is_refused_with_both_values(directory):
    before = contents(directory.path)
    with pytest.raises(UsageError, match=r"another experiment(.|\n)*resolved.stage_sizes +\[1\] +\[2\]"):
        enter(directory.path, {**CONFIG, "resolved": {"stage_sizes": [2]}})
    assert contents(directory.path) == before


def test_a_new_run_is_refused_in_a_run_directory(directory):
    for refuse in (lambda: enter(directory.path, new=True), directory.require_new):
        with pytest.raises(UsageError, match=rf"ccfa resume {directory.path}"):
            refuse()


THEIRS = {
    "a file": ["thesis.txt"],
    "a checkout": [".git/HEAD", "networks/mine.txt"],
    "a folder": ["photos/"],
}


@pytest.mark.parametrize("names", THEIRS.values(), ids=THEIRS.keys())
def test_a_folder_of_something_else_is_refused(tmp_path, names):
    for name in names:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="mine exists already"):
        Run(tmp_path / "mine").require_new()
    with pytest.raises(UsageError, match="mine exists already"):
        enter(tmp_path / "mine")
    assert contents(tmp_path) == before


def test_a_file_and_a_link_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"{name} exists already"):
            Run(tmp_path / name).require_new()
    with pytest.raises(ResourceError):
        enter(tmp_path / "file" / "run")


@pytest.mark.parametrize("made", [(), ("networks",), ("networks", "environment.json", ".lock", ".config.json.1.tmp")])
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


LINKS = (LOCK, "metrics.jsonl", "log.txt", "errors.txt", "checkpoints", "networks", "predictions", "exemplars")


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link(directory, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir() if "." not in name else victim.write_text("precious")
    if victim.is_dir():
        (victim / "20240101").write_text("precious")
        (victim / ".x.tmp").write_text("precious")
    path = directory.path / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    before = contents(victim) if victim.is_dir() else victim.read_bytes()
    with pytest.raises(ModelError, match="symbolic link"):
        enter(directory.path)
    assert (contents(victim) if victim.is_dir() else victim.read_bytes()) == before


def held_by_a_child(folder):
    """A child that holds the folder until it is killed; its process number, once it does."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with locked(folder):
            Run(folder).set_status("running")
            os.write(writing, b"!")
            time.sleep(60)
        os._exit(0)
    assert os.read(reading, 1) == b"!"
    os.close(reading)
    os.close(writing)
    return process


def test_a_second_process_is_refused_until_the_first_dies(directory):
    process = held_by_a_child(directory.path)
    try:
        with pytest.raises(LockedError, match=rf"{directory.path} .*\({process} on ") as error:
            enter(directory.path)
        assert error.value.exit_code == 7
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    enter(directory.path)


def test_what_the_lock_file_says_decides_nothing(tmp_path):
    (tmp_path / LOCK).write_bytes(b"\xff" * 1000)
    with locked(tmp_path), pytest.raises(LockedError), locked(tmp_path):
        pass


def test_a_folder_that_is_left_alone_is_not_touched(tmp_path):
    with left_alone(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with locked(tmp_path), pytest.raises(LockedError), left_alone(tmp_path):
        pass


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "report.json"])
def test_damaged_files_are_named(tmp_path, name, content):
    toy_run(tmp_path / "run")
    directory = Run(tmp_path / "run")
    path = directory.path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ModelError, match=name):
        directory.config if name == "config.json" else directory.report()


@pytest.mark.parametrize("config", [{}, {"experiment": 3}, {"experiment": {"method": "podnet", "seed": "x"}}])
def test_a_configuration_without_an_experiment_is_refused(tmp_path, config):
    with pytest.raises(ModelError, match="config"):
        _ = begun(tmp_path / "run", config).experiment


def test_lines_are_appended(directory):
    directory.append("log.txt", "one ü \udcff")
    directory.append("log.txt", "two")
    assert (directory.path / "log.txt").read_bytes() == "one ü ?\ntwo\n".encode()


def test_a_log_that_cannot_be_written_is_a_warning(directory):
    (directory.path / "log.txt").mkdir()
    with pytest.warns(Notice, match=r"log\.txt"):
        directory.append("log.txt", "x")
    with pytest.raises(ResourceError, match="directory is gone"):
        Run(directory.path / "gone").append("log.txt", "x")


def test_predictions_and_networks_belong_to_run_and_stage(directory, tmp_path):
    arrays = {"labels": np.arange(5), "by_logits": np.array([0, 1, 1, 3, 4])}
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    directory.write_predictions(7, arrays)
    directory.write_network(7, network)
    found, weights = directory.read_predictions(7), directory.network_weights(7)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    assert all(torch.equal(weights[name], tensor) for name, tensor in network.state_dict().items())
    other = begun(tmp_path / "other", {**CONFIG, "resolved": {}})
    for folder, read in (("predictions", "read_predictions"), ("networks", "network_weights")):
        stored = directory.path / folder / "stage-007.safetensors"
        shutil.copy(stored, stored.with_name("stage-008.safetensors"))
        shutil.copy(stored, other.path / folder)
        for run, stage in ((directory, 8), (other, 7)):
            with pytest.raises(ModelError, match="another run or stage"):
                getattr(run, read)(stage)


def test_exemplars_come_back_in_their_order(directory):
    directory.write_exemplars(3, [torch.tensor([7, 2, 9]), torch.tensor([], dtype=torch.int64)])
    assert directory.read_exemplars(3) == [[7, 2, 9], []]


@pytest.mark.parametrize("content", ['{"rows": 3}', '{"rows": [3]}', '{"rows": [["3"]]}', "{}", "[]", "{", None])
def test_exemplars_that_are_no_rows_are_refused(directory, content):
    if content is not None:
        (directory.path / "exemplars" / "stage-000.json").write_text(content)
    with pytest.raises(ModelError, match="stage-000"):
        directory.read_exemplars(0)


def value(number):
    return {"weights": torch.full((3, 5), float(number)), "rows": torch.arange(4), "empty": torch.empty(0, 7)}


@pytest.fixture
def stored(directory):
    """A run with the checkpoints 1 and 2."""
    for number in (1, 2):
        directory.save_checkpoint(value(number), {"number": number})
    return directory


def test_the_newest_checkpoint_comes_back(stored):
    checkpoint = stored.load_checkpoint()
    assert (checkpoint.number, checkpoint.state) == (2, {"number": 2})
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in value(2).items())


def test_two_checkpoints_are_kept(stored):
    stored.save_checkpoint(value(3), {})
    assert stored.checkpoint_numbers() == [2, 3]
    stored.prune_checkpoints(1)
    assert stored.checkpoint_numbers() == [3]


@pytest.mark.parametrize("damage", ["empty", "half", "missing bytes", "a link", "a folder", "a pipe"])
def test_a_damaged_checkpoint_costs_one(stored, tmp_path, damage):
    path = stored.checkpoint_path(2)
    data = path.read_bytes()
    path.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "missing bytes": data[:-1]}[damage])
    with pytest.warns(Notice, match="damaged-000002"):
        assert stored.load_checkpoint().number == 1
    stored.save_checkpoint(value(3), {})
    assert stored.load_checkpoint().number == 2


def test_without_a_whole_checkpoint_there_is_none(stored):
    for number in (1, 2):
        stored.checkpoint_path(number).write_bytes(b"")
    with pytest.warns(Notice, match="from the beginning"):
        assert stored.load_checkpoint() is None


def test_only_numbered_files_are_checkpoints(stored):
    for name in ("000009x", "0000012.safetensors", "latest", "999999999.safetensors"):
        (stored.path / "checkpoints" / name).write_text("")
    assert stored.load_checkpoint().number == 2


def test_a_checkpoint_of_another_experiment_is_refused(stored, tmp_path):
    other = begun(tmp_path / "other", {**CONFIG, "resolved": {}})
    shutil.copy(stored.checkpoint_path(2), other.checkpoint_path(1))
    with pytest.raises(ModelError, match="another experiment"):
        other.load_checkpoint()
    assert other.checkpoint_numbers() == [1], "it is left where it is"


def test_a_checkpoint_of_another_format_names_the_version(stored):
    path = stored.checkpoint_path(2)
    tensors, facts = read_tensors(path)
    write_tensors(path, tensors, {**facts, "format": 9, "ccfa": "9.1"})
    with pytest.raises(ModelError, match=r"format 9, written by ccfa 9\.1"):
        stored.load_checkpoint()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_neither_stored_nor_loaded(stored, bad):
    tensors = {**value(3), "weights": torch.tensor([1.0, bad])}
    with pytest.raises(DivergedError, match="values of weights"):
        stored.save_checkpoint(tensors, {})
    assert stored.checkpoint_numbers() == [1, 2]
    _, facts = read_tensors(stored.checkpoint_path(2))
    write_tensors(stored.checkpoint_path(2), tensors, facts)
    with pytest.raises(DivergedError, match="values of weights"):
        stored.load_checkpoint()


CHANGES = [
    {"method": "ucir"},
    {"ccfa": True},
    {"mix": "mixup"},
    {"scenario": "4,6"},
    {"order": "seed-1"},
    {"memory": 3},
    {"validation": 0.2},
    {"seed": 1},
    {"batch_seed": 1},
    {"options": {"lr": "0.2"}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_change_of_an_experiment_is_another_experiment(tmp_path, changes):
    enter(tmp_path / "run", resolve(Experiment("podnet", data="digits")).config)
    other = resolve(Experiment(**{"method": "podnet", "data": "digits", **changes})).config
    with pytest.raises(UsageError, match=f"experiment.{next(iter(changes))}"):
        enter(tmp_path / "run", other)


def test_a_long_class_order_keeps_runs_apart():
    order = ",".join(map(str, range(100)))
    names = {
        Experiment(method, ccfa=ccfa, data="cifar100", order=order, seed=seed).name
        for method in ("podnet", "finetune")
        for ccfa in (False, True)
        for seed in range(2)
    }
    assert len(names) == 8
    assert all(len(name.encode()) <= 150 for name in names)
    assert len(Experiment("podnet", data="ü" * 200).name.encode()) <= 150


def test_a_finished_run_is_not_run_again(tmp_path):
    first = toy_run(tmp_path / "run")
    before = (tmp_path / "run" / "networks" / "stage-002.safetensors").stat().st_mtime_ns
    assert toy_run(tmp_path / "run") == first
    assert (tmp_path / "run" / "networks" / "stage-002.safetensors").stat().st_mtime_ns == before


def test_an_unfinished_run_that_claims_to_be_finished_is_not_believed(tmp_path, fail):
    fail("evaluate:2:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run")
    Run(tmp_path / "run").set_status("finished")
    fail("")
    assert not Run(tmp_path / "run").is_finished()
    assert toy_run(tmp_path / "run").finished


def test_the_seed_of_a_begun_run_cannot_be_edited(tmp_path, fail):
    fail("step:1:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run")
    fail("")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["experiment"]["seed"] = 5
    Run(tmp_path / "run").write_json("config.json", config)
    with pytest.raises(UsageError, match=r"experiment\.seed"):
        toy_run(tmp_path / "run", toy_resolved())
