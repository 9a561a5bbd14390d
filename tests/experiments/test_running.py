"""A run leaves the promised files, says how it ended, and goes on as it began; signals stop it between two steps."""

import csv
import json
import os
import signal
import subprocess
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ccfa.errors import DivergedError, ResourceError, UsageError
from ccfa.evaluation import Numbers, accuracy
from ccfa.experiments import Experiment, Run, resolve, run, running
from ccfa.experiments.running import Stop, acceleration_of, environment, running_again, stoppable
from ccfa.experiments.running import finished as reusable
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.settings import Running
from commands import contents
from toy_runs import CPU, Silent, begun, toy_resolved, toy_run

ON_CPU = Running(device="cpu")
EXPERIMENT = Experiment(
    "podnet",
    ccfa=True,
    scenario="4,3,3",
    order="seed-7",
    validation=0.85,
    options={"epochs": "2", "balanced_epochs": "1", "backbone": "small"},
)
STAGES = [4, 7, 10]


class Audience(Silent):
    """Keeps what it is told, and can stop the run at an epoch."""

    def __init__(self, stop=None, at=()):
        super().__init__()
        self.stop = stop
        self.at = at
        self.results = []
        self.num_epochs = 0

    def on_epoch(self, progress, losses, lr, seconds):
        self.num_epochs += 1
        if self.stop and (progress.stage.index, progress.phase, progress.epoch) == self.at:
            raise self.stop

    def on_stage(self, stage, result):
        self.results.append(result)


def started(path, experiment=EXPERIMENT):
    resolved = resolve(experiment)
    return resolved, begun(path, resolved.config, {"device": "cpu"})


def predictions(path, name):
    return [Run(path).read_predictions(stage)[name] for stage in range(len(list((path / "predictions").iterdir())))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    audience = Audience()
    resolved, directory = started(path)
    report = run(resolved, directory, ON_CPU, audience)
    return path, report, audience


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_directory_holds_every_promised_file_and_nothing_else(finished):
    path, _, _ = finished
    stages = [f"stage-{index:03d}" for index in range(3)]
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        ".lock",
        "config.json",
        "checkpoints/000003.safetensors",
        "environment.json",
        "status.json",
        "metrics.jsonl",
        "stages.csv",
        "accuracy_matrix.csv",
        "accuracy_matrix_by_nearest_mean.csv",
        "report.json",
        *(f"exemplars/{stage}.json" for stage in stages),
        *(f"predictions/{stage}.safetensors" for stage in stages),
        *(f"networks/{stage}.safetensors" for stage in stages),
    }
    assert not [file for file in path.rglob("*") if file.is_file() and file.read_bytes()[:1] == b"\x80"], "a pickle"


def test_the_status_is_finished_and_the_stored_report_is_the_one_returned(finished):
    path, report, _ = finished
    directory = Run(path)
    assert directory.status["state"] == "finished"
    assert directory.report() == report
    assert report.finished
    assert report.name == "first"
    assert report.config == directory.config
    assert report.environment == {"device": "cpu"}


def test_an_epoch_is_a_line_of_metrics(finished):
    path, _, audience = finished
    records = Run(path).read_epochs()
    expected = [(0, "main", 0), (0, "main", 1)]
    for stage in (1, 2):
        expected += [(stage, "main", 0), (stage, "main", 1), (stage, "balanced", 0)]
    assert [(record["stage"], record["phase"], record["epoch"]) for record in records] == expected
    assert audience.num_epochs == len(expected)
    for record in records:
        terms = {"pod-flat", "pod-spatial"} if record["stage"] else set()
        assert record.keys() >= {"lr", "images_per_second", "classification", "loss"} | terms
        parts = sum(record[name] for name in {"classification"} | terms)
        assert record["loss"] == pytest.approx(parts, rel=1e-4)
    assert [record["lr"] for record in records if record["phase"] == "balanced"] == [0.05, 0.05]


def test_a_stage_is_a_row_of_stages(finished):
    path, report, audience = finished
    rows = table(path / "stages.csv")
    labels, by_logits = predictions(path, "labels"), predictions(path, "by_logits")
    nearest = predictions(path, "by_nearest_mean")
    assert [int(row["num_seen"]) for row in rows] == STAGES == report.num_seen
    assert [int(row["exemplars"]) for row in rows] == [4 * seen for seen in STAGES]
    assert rows[0]["old_accuracy"] == ""
    for index, row in enumerate(rows):
        assert float(row["accuracy"]) == accuracy(by_logits[index], labels[index])
        assert float(row["nearest_mean_accuracy"]) == accuracy(nearest[index], labels[index])
        if index:
            old = labels[index] < STAGES[index - 1]
            assert float(row["old_accuracy"]) == accuracy(by_logits[index][old], labels[index][old])
            assert float(row["new_accuracy"]) == accuracy(by_logits[index][~old], labels[index][~old])
    assert [result["accuracy"] for result in audience.results] == report.overall


def test_the_report_can_be_recomputed_from_the_predictions(finished):
    path, report, _ = finished
    labels, test = predictions(path, "labels"), resolve(EXPERIMENT).test.labels.numpy()
    assert report.own == "logits"
    assert report.rules == {
        rule: Numbers.of(predictions(path, f"by_{rule}"), labels, STAGES) for rule in ("logits", "nearest_mean")
    }
    for seen, stored in zip(STAGES, labels, strict=True):
        np.testing.assert_array_equal(stored, test[test < seen])


def test_the_matrix_is_a_table_with_headings(finished):
    path, report, _ = finished
    rows = table(path / "accuracy_matrix.csv")
    assert list(rows[0]) == ["after_stage", *(f"classes_of_stage_{index}" for index in range(3))]
    stored = [[float(row[f"classes_of_stage_{j}"] or "nan") for j in range(3)] for row in rows]
    np.testing.assert_array_equal(stored, np.array(report.accuracy_matrix, dtype=float))


def test_every_stage_leaves_its_weights(finished):
    path, _, _ = finished
    sizes = []
    for file in sorted((path / "networks").iterdir()):
        weights = load_file(file)
        assert all(np.isfinite(array).all() for array in weights.values())
        sizes.append(sum(array.size for array in weights.values()))
    assert sizes == sorted(set(sizes)), "the head grows with every stage"


def test_the_stored_configuration_repeats_the_run(finished, tmp_path):
    path, report, _ = finished
    again = run(*started(tmp_path / "again", Run(path).experiment), ON_CPU)
    assert again.config == report.config
    assert again.rules == report.rules
    for name in ("predictions/stage-002.safetensors", "networks/stage-002.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


def test_each_seed_matters(tmp_path):
    networks = {}
    for name, seeds in {"none": {}, "seed": {"seed": 1, "batch_seed": 0}, "batches": {"batch_seed": 1}}.items():
        resolved = toy_resolved("finetune", epochs=1)._replace(experiment=Experiment("finetune", **seeds))
        toy_run(tmp_path / name, resolved._replace(stages=resolved.stages[:1]))
        weights = Run(tmp_path / name).network_weights(0)
        networks[name] = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
    assert len(set(networks.values())) == 3


def test_a_stage_is_judged_by_the_method_s_own_rule(tmp_path):
    report = toy_run(tmp_path / "run", toy_resolved("icarl", epochs=1))
    rows = table(tmp_path / "run" / "stages.csv")
    assert report.own == "nearest_mean"
    assert [float(row["accuracy"]) for row in rows] == report.overall == report.rules["nearest_mean"].overall
    assert [float(row["logits_accuracy"]) for row in rows] == report.rules["logits"].overall


def always_zero(learner, images):
    """A rule that no method of the package has."""
    return torch.zeros(len(images), dtype=torch.int64)


def test_a_rule_of_ones_own_is_evaluated_also_after_a_stop(tmp_path):
    resolved = toy_resolved(epochs=1)
    resolved = resolved._replace(method=replace(resolved.method, predict=always_zero))
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path / "run", resolved, Audience(KeyboardInterrupt(), at=(1, "main", 0)))
    report = toy_run(tmp_path / "run", resolved)
    share = float((resolved.test.labels == 0).double().mean())
    assert (report.own, report.overall[-1]) == ("always_zero", pytest.approx(share))
    assert list(report.rules) == ["logits", "nearest_mean", "always_zero"]
    assert report.rules["logits"].overall != report.overall


def test_a_method_without_exemplars_has_no_nearest_mean(tmp_path):
    report = toy_run(tmp_path / "run", toy_resolved("finetune", epochs=1))
    assert list(report.rules) == ["logits"]
    assert set(Run(tmp_path / "run").read_predictions(1)) == {"labels", "by_logits"}
    assert {row["nearest_mean_accuracy"] for row in table(tmp_path / "run" / "stages.csv")} == {""}


@pytest.mark.parametrize(
    ("stop", "state"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted"), (ValueError("a bug"), "failed")],
)
def test_a_stopped_run_says_so_and_keeps_the_stages_done(tmp_path, stop, state):
    path, directory = tmp_path / "run", Run(tmp_path / "run")
    with pytest.raises(type(stop)):
        toy_run(path, audience=Audience(stop, at=(1, "main", 1)))
    assert directory.status["state"] == state
    assert not directory.report().finished
    assert directory.report().num_seen == [2]
    assert len(table(path / "stages.csv")) == 1
    assert [file.name for file in (path / "predictions").iterdir()] == ["stage-000.safetensors"]
    assert (path / "errors.txt").exists() == (state == "failed")


def test_weights_broken_by_the_very_last_step_are_not_kept(tmp_path, monkeypatch):
    def optimise_and_break(learner):
        optimise(learner)
        if learner.stage.index == 1:
            with torch.no_grad():
                next(learner.network.parameters()).view(-1)[0] = float("inf")

    optimise = Learner.optimise
    monkeypatch.setattr(Learner, "optimise", optimise_and_break)
    with pytest.raises(DivergedError, match="After stage 2 the weights backbone"):
        toy_run(tmp_path / "run", toy_resolved("finetune", epochs=0))
    assert Run(tmp_path / "run").status["state"] == "failed"
    assert [file.name for file in (tmp_path / "run" / "networks").iterdir()] == ["stage-000.safetensors"]


def test_only_a_finished_run_in_the_same_precision_is_reused(tmp_path, monkeypatch):
    resolved, directory = toy_resolved("finetune", epochs=0), Run(tmp_path / "run")
    assert reusable(directory, resolved, ON_CPU) is None
    report = toy_run(tmp_path / "run", resolved)
    assert reusable(directory, resolved, ON_CPU) == report
    before = contents(tmp_path / "run" / "networks")
    assert toy_run(tmp_path / "run", resolved, audience := Audience()) == report, "it is not run again"
    assert (contents(tmp_path / "run" / "networks"), audience.num_batches, audience.results) == (before, 0, [])
    with pytest.raises(UsageError, match=r"experiment\.seed"):
        reusable(directory, toy_resolved("finetune", seed=1, epochs=0), ON_CPU)
    monkeypatch.setattr(running, "acceleration_of", lambda running: (None, Acceleration("bf16")))
    with pytest.raises(UsageError, match=r"float32.*bf16"):
        reusable(directory, resolved, ON_CPU)


def again(directory, **how):
    return acceleration_of(running_again(directory, Running(**how)))


def test_a_run_goes_on_with_the_device_and_precision_it_began_with(tmp_path):
    surroundings = {"torch_device": "cpu", "acceleration": {"precision": "float32"}}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert again(directory, device="auto")[0] == CPU
    directory.write_json("environment.json", {"torch_device": "cuda:7", "acceleration": {"precision": "bf16"}})
    with pytest.raises(ResourceError, match="cuda:7"):
        again(directory, device="auto")
    assert again(directory, device="cpu")[1].precision == "float32"


@pytest.mark.parametrize("off", [{}, {"compile": False}, {"graph": False}, {"compile": False, "graph": False}], ids=str)
def test_what_was_switched_off_stays_off(tmp_path, monkeypatch, off):
    monkeypatch.setattr(running, "pick_device", lambda name: torch.device(name))
    first = Acceleration("bf16", **{"compile": True, "graph": True, **off})
    surroundings = {"torch_device": "cuda", "acceleration": asdict(first)}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert again(directory, device="auto")[1] == first
    assert again(directory, device="auto", compile=False, graph=False)[1] == Acceleration("bf16", False, False)
    directory.write_json("environment.json", {"torch_device": "cpu", "acceleration": asdict(Acceleration())})
    assert again(directory, device="cuda")[1] == Acceleration("bf16", True, True)


def test_the_environment_is_json_and_names_the_device():
    found = environment(CPU, Acceleration())
    assert json.loads(json.dumps(found)) == found
    assert found["device"].startswith("cpu")
    assert found["acceleration"]["precision"] == "float32"
    names = ("ccfa", "commit", "python", "torch", "numpy", "threads", "platform")
    assert all(found[name] for name in names)


def test_the_commit_of_a_checkout_around_an_installed_package_is_not_ours(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    source = tmp_path / "running.py"
    source.write_text("")
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(running, "__file__", str(source))
    assert environment(CPU, Acceleration())["commit"] == "unknown"
    git("add", source.name)
    git("commit", "-m", "ours")
    assert len(environment(CPU, Acceleration())["commit"]) == 12
    source.write_text("changed")
    assert environment(CPU, Acceleration())["commit"].endswith("+")


def test_a_given_commit_comes_first_and_without_git_it_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment(CPU, Acceleration())["commit"] == "unknown"
    monkeypatch.setenv("CCFA_COMMIT", "0123456789ab")
    assert environment(CPU, Acceleration())["commit"] == "0123456789ab"


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 138, signal.SIGUSR2: 140}


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_a_signal_sets_a_flag_and_a_second_ctrl_c_aborts(number, code):
    before = [signal.getsignal(one) for one in CODES]
    with stoppable() as stop:
        assert stop.asked() is None
        os.kill(os.getpid(), number)
        assert stop.asked() == code
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked() == code
    assert [signal.getsignal(one) for one in CODES] == before
    with pytest.raises(ValueError, match="a bug"), stoppable():
        raise ValueError("a bug")
    assert [signal.getsignal(one) for one in CODES] == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_only_the_time_limit_counts():
    found = []

    def work():
        with stoppable(max_minutes=0) as stop:
            found.append(stop.asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [75]


def test_the_time_limit():
    assert Stop(max_minutes=0).asked() == 75
    assert Stop(max_minutes=1000).asked() is None
    assert Stop().asked() is None
