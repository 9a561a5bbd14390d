"""A run leaves the promised files, says how it ended, and goes on as it began; signals stop it between two steps."""

import csv
import os
import signal
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ccfa.errors import DivergedError, ResourceError, Stopped, UsageError
from ccfa.evaluation import Numbers, accuracy
from ccfa.experiments import Experiment, Run, resolve, run, running
from ccfa.experiments.running import Evaluator, Recorder, Stop, acceleration_of, environment, running_again, stoppable
from ccfa.experiments.running import finished as reusable
from ccfa.kernels import kernels_left_out
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.progress import SAVING
from ccfa.settings import Running
from commands import contents
from toy_runs import CPU, Silent, begun, toy_resolved, toy_run
from toys import STAGES as TOY_STAGES
from toys import tiny, toy_images

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
    """Keeps the results that it is told."""

    def __init__(self):
        super().__init__()
        self.results = []

    def on_stage(self, stage, result):
        self.results.append(result)


def predictions(path, name):
    return [Run(path).read_predictions(stage)[name] for stage in range(3)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    audience = Audience()
    return path, run(resolve(EXPERIMENT), Run(path), ON_CPU, audience), audience


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_directory_holds_every_promised_file_and_nothing_else(finished):
    path, report, _ = finished
    expected = {".lock", "config.json", "environment.json", "status.json", "metrics.jsonl", "stages.csv", "report.json"}
    expected |= {"accuracy_matrix.csv", "accuracy_matrix_by_nearest_mean.csv", "checkpoints/000003.safetensors"}
    kinds = {"exemplars": "json", "predictions": "safetensors", "networks": "safetensors"}
    expected |= {f"{folder}/stage-{index:03d}.{kind}" for folder, kind in kinds.items() for index in range(3)}
    assert contents(path).keys() == expected
    assert Run(path).status["state"] == "finished"
    assert Run(path).report() == report
    assert (report.name, report.finished, report.environment) == ("first", True, Run(path).environment)
    assert report.environment["acceleration"]["precision"] == "float32"
    assert "kernels" not in report.environment
    assert {"ccfa", "commit", "python", "torch", "numpy", "device", "threads", "platform"} <= report.environment.keys()
    assert report.config == Run(path).config


def test_a_run_without_kernels_says_so():
    with kernels_left_out():
        assert environment(CPU, Acceleration())["kernels"] == "off"


def test_an_epoch_is_a_line_of_metrics(finished):
    records = Run(finished[0]).read_epochs()
    expected = [(0, "main", 0), (0, "main", 1)]
    for stage in (1, 2):
        expected += [(stage, "main", 0), (stage, "main", 1), (stage, "balanced", 0)]
    assert [(record["stage"], record["phase"], record["epoch"]) for record in records] == expected
    for record in records:
        terms = {"pod-flat", "pod-spatial"} if record["stage"] else set()
        assert record.keys() >= {"lr", "images_per_second", "classification", "loss"} | terms
        parts = sum(record[name] for name in {"classification"} | terms)
        assert record["loss"] == pytest.approx(parts, rel=1e-4)
    assert [record["lr"] for record in records if record["phase"] == "balanced"] == [0.05, 0.05]


def test_sizes_are_those_of_what_is_kept(finished, tmp_path):
    path, report, _ = finished
    network = sum(tensor.nbytes for tensor in Run(path).network_weights(2).values())
    assert (report.parameters_mb, report.remembered_mb, report.exemplars_mb) == (network / 1e6, 0, 40 * 64 / 1e6)
    assert [float(row["exemplars_mb"]) for row in table(path / "stages.csv")] == [
        4 * seen * 64 / 1e6 for seen in STAGES
    ]
    read_out = toy_run(tmp_path / "run", toy_resolved("ranpac"))
    sums = 8 * (40 * 40 + 40 * 6 + 6 + 1) + 4 * 6 * 64  # G, Q, counts and the ridge in doubles, and directions
    assert (read_out.remembered_mb, read_out.exemplars_mb) == (sums / 1e6, 0)


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


def test_the_report_and_the_matrix_can_be_recomputed_from_the_predictions(finished):
    path, report, _ = finished
    labels, test = predictions(path, "labels"), resolve(EXPERIMENT).test.labels.numpy()
    assert report.own == "logits"
    assert report.rules == {
        rule: Numbers.of(predictions(path, f"by_{rule}"), labels, STAGES) for rule in ("logits", "nearest_mean")
    }
    for seen, stored in zip(STAGES, labels, strict=True):
        np.testing.assert_array_equal(stored, test[test < seen])
    rows = table(path / "accuracy_matrix.csv")
    stored = [[float(row[f"classes_of_stage_{j}"] or "nan") for j in range(3)] for row in rows]
    np.testing.assert_array_equal(stored, np.array(report.accuracy_matrix, dtype=float))


def test_each_seed_matters(tmp_path):
    networks = set()
    for name, seeds in {"none": {}, "seed": {"seed": 1, "batch_seed": 0}, "batches": {"batch_seed": 1}}.items():
        resolved = toy_resolved("finetune", epochs=1)._replace(experiment=Experiment("finetune", **seeds))
        toy_run(tmp_path / name, resolved._replace(stages=resolved.stages[:1]))
        networks.add(b"".join(tensor.numpy().tobytes() for tensor in Run(tmp_path / name).network_weights(0).values()))
    assert len(networks) == 3


def test_a_stage_is_judged_by_the_method_s_own_rule(tmp_path):
    report = toy_run(tmp_path / "run", toy_resolved("icarl", epochs=1))
    rows = table(tmp_path / "run" / "stages.csv")
    assert report.own == "nearest_mean"
    assert [float(row["accuracy"]) for row in rows] == report.overall == report.rules["nearest_mean"].overall
    assert [float(row["logits_accuracy"]) for row in rows] == report.rules["logits"].overall


def always_zero(learner, images):
    """A rule that no method of the package has."""
    return torch.zeros(len(images), dtype=torch.int64)


def test_a_rule_of_ones_own_is_evaluated_also_after_a_stop(tmp_path, fail):
    resolved = toy_resolved(epochs=1)
    resolved = resolved._replace(method=replace(resolved.method, predict=always_zero))
    fail("evaluate:2:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run", resolved)
    report = toy_run(tmp_path / "run", resolved)
    share = float((resolved.test.labels == 0).double().mean())
    assert (report.own, report.overall[-1]) == ("always_zero", pytest.approx(share))
    assert list(report.rules) == ["logits", "nearest_mean", "always_zero"]


def test_a_rule_of_ones_own_may_have_the_name_of_a_known_one(tmp_path):
    def by_logits(learner, images):
        return always_zero(learner, images)

    resolved = toy_resolved(epochs=1)
    report = toy_run(tmp_path / "run", resolved._replace(method=replace(resolved.method, predict=by_logits)))
    assert report.overall[-1] == pytest.approx(float((resolved.test.labels == 0).double().mean()))


def test_a_continued_epoch_keeps_its_rate(tmp_path, fail):
    """The checkpoint is of the epoch's last step, and the run ends before the epoch is a line of metrics."""
    fail("append:1:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run", checkpoint_minutes=0)
    fail("")
    audience = Silent()
    toy_run(tmp_path / "run", audience=audience, checkpoint_minutes=0)
    assert SAVING in audience.activities
    assert all(line["images_per_second"] for line in Run(tmp_path / "run").read_epochs())


def test_a_stop_says_whether_anything_is_stored(tmp_path):
    for number, expected in ((0, "nothing is stored yet"), (None, "the last checkpoint is kept")):
        learner, stop = Learner(tiny("podnet"), toy_images()), Stop()
        directory = begun(tmp_path / str(number), resolve(EXPERIMENT).config)
        recorder = Recorder(directory, learner, Silent(), stop, Running(data_dir=Path("my data")))
        if number is None:
            recorder.save()
        stop.code = 130
        with pytest.raises(Stopped, match=expected) as stopped:
            learner.on_pause()
        assert stopped.value.message.endswith(f"ccfa resume {directory.path} --data-dir 'my data'")


def test_only_old_checkpoints_are_due_after_stages_that_train_nothing(tmp_path, fail):
    resolved = toy_resolved("ranpac", epochs=1)
    whole = toy_run(tmp_path / "whole", resolved)
    fail("evaluate:3:raise")
    with pytest.raises(RuntimeError):
        toy_run(tmp_path / "run", resolved)
    directory = Run(tmp_path / "run")
    assert len(directory.load_checkpoint().state["rows"]) == 1
    assert len(table(directory.path / "stages.csv")) == 2
    fail("")
    assert toy_run(directory.path, resolved).overall == whole.overall
    assert contents(directory.path / "networks") == contents(tmp_path / "whole" / "networks")
    assert len(directory.load_checkpoint().state["rows"]) == len(resolved.stages) == 3


def test_a_method_without_exemplars_has_no_nearest_mean(tmp_path):
    report = toy_run(tmp_path / "run", toy_resolved("finetune", epochs=0))
    assert list(report.rules) == ["logits"]
    assert set(Run(tmp_path / "run").read_predictions(1)) == {"labels", "by_logits"}
    assert {row["nearest_mean_accuracy"] for row in table(tmp_path / "run" / "stages.csv")} == {""}


def test_weights_broken_by_the_very_last_step_are_not_kept(tmp_path, monkeypatch):
    def optimise_and_break(learner):
        optimise(learner)
        if learner.stage.index == 1:
            with torch.no_grad():
                next(learner.network.parameters()).view(-1)[0] = float("inf")

    optimise = Learner.optimise
    monkeypatch.setattr(Learner, "optimise", optimise_and_break)
    with pytest.raises(DivergedError, match="stage 2"):
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


@pytest.mark.parametrize("off", [{}, {"compile": False}, {"graph": False}], ids=str)
def test_what_was_switched_off_stays_off(tmp_path, monkeypatch, off):
    for name in ("pick_device", "own_device"):
        monkeypatch.setattr(running, name, torch.device)
    first = Acceleration("bf16", **{"compile": True, "graph": True, **off})
    surroundings = {"torch_device": "cuda", "acceleration": asdict(first)}
    directory = begun(tmp_path / "run", toy_resolved().config, surroundings)
    assert again(directory, device="auto")[1] == first
    assert again(directory, device="auto", compile=False, graph=False)[1] == Acceleration("bf16", False, False)
    directory.write_json("environment.json", {"torch_device": "cpu", "acceleration": asdict(Acceleration())})
    assert again(directory, device="cuda")[1] == Acceleration("bf16", True, True)
    directory.write_json("environment.json", {**surroundings, "processes": 2})  # for which everything is off
    assert again(directory, device="cuda")[1] == Acceleration("bf16", True, True)


def test_the_commit_is_ours_or_given_or_unknown(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    def commit():
        return environment(CPU, Acceleration())["commit"]

    source = tmp_path / "running.py"
    source.write_text("")
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(running, "__file__", str(source))
    assert commit() == "unknown", "a checkout around an installed package"
    git("add", source.name)
    git("commit", "-m", "ours")
    assert len(commit()) == 12
    source.write_text("changed")
    assert commit().endswith("+")
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown", "there is no git"
    monkeypatch.setenv("CCFA_COMMIT", "0123456789ab")
    assert commit() == "0123456789ab"


HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def test_a_signal_sets_a_flag_and_a_second_ctrl_c_aborts():
    before = [signal.getsignal(one) for one in HEEDED]
    with stoppable() as stop:
        assert stop.asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked() == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked() == 143
    assert [signal.getsignal(one) for one in HEEDED] == before
    with pytest.raises(ValueError, match="a bug"), stoppable():
        raise ValueError("a bug")
    assert [signal.getsignal(one) for one in HEEDED] == before


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
        for minutes in (0, 1000, None):
            with stoppable(minutes) as stop:
                found.append(stop.asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [75, None, None]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "num_embedded"), [("simplecil", [24, 24, 72]), ("podnet", [24, 48, 72])])
def test_a_frozen_backbone_sees_each_test_image_once(name, num_embedded, device, monkeypatch):
    """Unless its weights are not what they were: the last stage changes them."""
    test, found = toy_images(seed=1).to(torch.device(device)), []
    learner, evaluator = Learner(tiny(name), toy_images(), device=device), Evaluator(test, TOY_STAGES[:3])
    real = learner.embed
    for stage in TOY_STAGES[:3]:
        learner.learn(stage)
        if stage.index == 2:
            with torch.no_grad():
                next(learner.network.backbone.parameters()).mul_(2)
        seen = test.subset(test.rows(0, stage.num_seen))
        monkeypatch.setattr(learner, "embed", lambda images: found.append(len(images)) or real(images))
        predicted = evaluator.evaluate(learner)
        monkeypatch.setattr(learner, "embed", real)
        assert predicted["labels"].tolist() == seen.labels.tolist()
        assert predicted["by_logits"].tolist() == learner.predict_by_logits(seen.images).tolist()
        if "by_nearest_mean" in predicted:
            assert predicted["by_nearest_mean"].tolist() == learner.predict_by_nearest_mean(seen.images).tolist()
    assert [*found[:2], sum(found[2:])] == num_embedded
