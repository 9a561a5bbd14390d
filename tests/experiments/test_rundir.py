import csv
import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ccfa.experiments.files as files
from ccfa.errors import ModelError, ResourceError, UsageError
from ccfa.evaluation import Numbers, Report
from ccfa.experiments import RunDirectory
from ccfa.experiments.files import write_atomically
from ccfa.learning.acceleration import Acceleration

FLOAT32 = Acceleration()
SURROUNDINGS = {"device": "cpu", "acceleration": {"precision": "float32"}}

CONFIG = {"experiment": {"method": "toy"}, "resolved": {"stage_sizes": [1]}}
REPORT = Report(
    name="toy",
    config=CONFIG,
    num_seen=[1],
    own="logits",
    rules={"logits": Numbers([1.0], {"last_accuracy": 1.0}, [[1.0]])},
    environment={},
    seconds=1.0,
    finished=True,
)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "runs" / "toy", CONFIG, SURROUNDINGS)


def finish(directory):
    write_atomically(directory.path / "report.json", REPORT.to_json())
    directory.set_status("finished")


def test_a_new_directory_holds_configuration_environment_and_status(directory):
    assert directory.read_json("config.json") == CONFIG
    assert directory.read_json("environment.json") == SURROUNDINGS
    assert directory.read_json("status.json") == {"state": "running", "pid": os.getpid()}
    assert {path.name for path in directory.path.iterdir() if path.is_dir()} == {
        "predictions",
        "networks",
        "exemplars",
    }


def test_an_existing_directory_is_left_as_it_is(directory):
    before = contents(directory.path)
    with pytest.raises(UsageError, match=r"exists already and is left as it is.*--out.*--reuse"):
        RunDirectory.create(directory.path, {"other": 1}, {})
    assert contents(directory.path) == before


def test_an_empty_directory_and_a_file_are_left_as_they_are(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(UsageError, match="exists already"):
            RunDirectory.create(tmp_path / name, CONFIG, {})
    assert not list((tmp_path / "empty").iterdir())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResourceError, match="Could not create"):
        RunDirectory.create(tmp_path / "file" / "run", CONFIG, {})


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first, and longer")
    write_atomically(path, "söcond")
    assert path.read_bytes() == "söcond".encode()
    write_atomically(path, b"\x00\xff")
    assert contents(tmp_path) == {"a.json": b"\x00\xff"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_no_temporary_one(tmp_path, monkeypatch, step):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(ResourceError, match=r"No space left on device\. What was written before is kept"):
        write_atomically(path, "new")
    assert contents(tmp_path) == {"a.json": b"old"}


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "a", "x")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder that has the name


def test_only_a_finished_run_of_this_experiment_is_reused(directory):
    missing = directory.path.with_name("nothing")
    assert RunDirectory.finished(missing, CONFIG, FLOAT32) is None
    assert RunDirectory.finished(directory.path, CONFIG, FLOAT32) is None
    finish(directory)
    assert RunDirectory.finished(directory.path, CONFIG, FLOAT32) == REPORT
    other = {**CONFIG, "resolved": {"stage_sizes": [2]}}
    with pytest.raises(UsageError, match=r"another experiment(.|\n)*resolved.stage_sizes +\[1\] +\[2\]"):
        RunDirectory.finished(directory.path, other, FLOAT32)


def test_an_unfinished_run_is_continued_where_it_is(directory):
    directory.set_status("interrupted")
    before = contents(directory.path)
    again = RunDirectory.create_or_continue(directory.path, CONFIG, SURROUNDINGS)
    assert again.path == directory.path
    assert contents(directory.path) == before
    with pytest.raises(UsageError, match=rf"unfinished run, which `ccfa resume {directory.path}` continues"):
        RunDirectory.create(directory.path, CONFIG, SURROUNDINGS)


def test_a_directory_with_other_things_in_it_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"exists already and is left as it is\. Choose"):
        RunDirectory.create_or_continue(tmp_path / "mine", CONFIG, SURROUNDINGS)
    assert contents(tmp_path) == {"mine/thesis.txt": b"years of work"}


THEIRS = {
    "a checkout": [".git/HEAD", "networks/mine.txt"],
    "hidden": [".git/HEAD"],
    "beside ours": ["networks/", "predictions/", "mine.txt"],
    "inside ours": ["networks/stage-000.safetensors"],
    "records of another": ["environment.json"],
    "a folder called like a file": ["networks", "predictions/"],
}


@pytest.mark.parametrize("files", THEIRS.values(), ids=THEIRS.keys())
def test_what_is_not_ours_is_never_removed(tmp_path, files):
    for name in files:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("years of work")
    before = {*tmp_path.rglob("*")}, contents(tmp_path)
    with pytest.raises(UsageError, match="exists already and is left as it is"):
        RunDirectory.create_or_continue(tmp_path / "run", CONFIG, SURROUNDINGS)
    with pytest.raises(ModelError, match="not a complete run directory"):
        RunDirectory.finished(tmp_path / "run", CONFIG, FLOAT32)
    assert ({*tmp_path.rglob("*")}, contents(tmp_path)) == before


def test_a_link_to_an_empty_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="exists already"):
        RunDirectory.create_or_continue(tmp_path / "run", CONFIG, SURROUNDINGS)
    assert (tmp_path / "theirs").is_dir()


@pytest.mark.parametrize("num_made", range(6))
def test_what_an_older_version_left_half_made_is_made_again(tmp_path, num_made):
    path = tmp_path / "run"
    path.mkdir()
    for name in ("predictions", "networks", "exemplars", "environment.json", "status.json")[:num_made]:
        (path / name).write_text("{}") if name.endswith(".json") else (path / name).mkdir()
    assert RunDirectory.finished(path, CONFIG, FLOAT32) is None
    assert RunDirectory.create_or_continue(path, CONFIG, SURROUNDINGS).read_json("config.json") == CONFIG
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("step", ["mkdir", "fsync", "rename"])
def test_a_directory_is_made_as_a_whole_or_not_at_all(tmp_path, monkeypatch, step):
    function, left = getattr(os, step), [{"mkdir": 3, "fsync": 4, "rename": 0}[step]]

    def fail(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(ResourceError, match="No space left on device"):
        RunDirectory.create(tmp_path / "run", CONFIG, SURROUNDINGS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("half_made", "locks"), [(False, True), (True, True), (False, False)])
def test_of_many_at_once_one_makes_the_directory_and_all_have_it(tmp_path, monkeypatch, half_made, locks):
    path, made, errors = tmp_path / "run", [], []
    if not locks:
        monkeypatch.setattr("ccfa.experiments.lock.fcntl.flock", lambda *arguments: os.stat(tmp_path / "nothing"))
    if half_made:
        (path / "networks").mkdir(parents=True)
    together = threading.Barrier(8)

    def make(number):
        together.wait(timeout=20)
        try:
            made.append(RunDirectory.create_or_continue(path, CONFIG, {**SURROUNDINGS, "number": number}))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [directory.read_json("config.json") for directory in made] == [CONFIG] * 8
    assert {entry.name for entry in path.iterdir()} == {
        *("predictions", "networks", "exemplars", "environment.json", "status.json", "config.json")
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_in_another_precision_is_not_reused(directory):
    with pytest.raises(UsageError, match="was run in float32, not in bf16"):
        RunDirectory.finished(directory.path, CONFIG, Acceleration("bf16"))


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "status.json", "report.json"])
def test_damaged_files_are_named(directory, name, content):
    finish(directory)
    path = directory.path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ModelError):
        RunDirectory.finished(directory.path, CONFIG, FLOAT32)
    if name != "report.json":
        with pytest.raises(ModelError, match=name):
            directory.read_json(name)


def test_lines_are_appended(directory):
    directory.append("log.txt", "one ü")
    directory.append("log.txt", "two")
    assert (directory.path / "log.txt").read_bytes() == "one ü\ntwo\n".encode()


def test_appending_where_the_directory_is_gone_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match=r"Could not add to .*log\.txt: its directory is gone"):
        RunDirectory(tmp_path / "gone").append("log.txt", "x")


def test_rows_read_back_as_a_table(directory):
    directory.write_rows("t.csv", [{"a": 1, "b": None}, {"a": 0.25, "b": 'x,"y'}])
    with open(directory.path / "t.csv", newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "0.25", "b": 'x,"y'}]


def test_predictions_read_back_without_pickle(directory):
    arrays = {"labels": np.arange(5), "by_logits": np.array([0, 1, 1, 3, 4])}
    directory.write_predictions(7, arrays)
    with np.load(directory.path / "predictions" / "stage-007.npz", allow_pickle=False) as stored:
        assert set(stored) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(stored[name], array)


def test_a_network_reads_back_bit_for_bit(directory):
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    directory.write_network(2, network)
    stored = load_file(directory.path / "networks" / "stage-002.safetensors")
    assert stored.keys() == network.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in network.state_dict().items())


def test_exemplars_come_back_in_their_order(directory):
    directory.write_exemplars(3, [torch.tensor([7, 2, 9]), torch.tensor([], dtype=torch.int64)])
    assert directory.read_exemplars(3) == [[7, 2, 9], []]


@pytest.mark.parametrize("content", ['{"rows": 3}', '{"rows": [3]}', '{"rows": [["3"]]}', "{}", "[]", "{"])
def test_exemplars_that_are_no_rows_are_refused(directory, content):
    (directory.path / "exemplars" / "stage-000.json").write_text(content)
    with pytest.raises(ModelError, match="stage"):
        directory.read_exemplars(0)


def test_exemplars_of_a_stage_that_was_not_learned_are_refused(directory):
    with pytest.raises(ModelError, match="stage-004"):
        directory.read_exemplars(4)
