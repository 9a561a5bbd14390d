import csv
import json
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ccfa.errors import DivergedError, UsageError
from ccfa.evaluation import Numbers, accuracy
from ccfa.experiments import Experiment, Run, resolve, run
from ccfa.experiments.running import finished as reusable
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.settings import Running
from toy_runs import begun, toy_resolved, toy_run

ON_CPU = Running(device="cpu")
EXPERIMENT = Experiment(
    "podnet", ccfa=True, scenario="4,3,3", order="seed-7", options={"epochs": "2", "balanced_epochs": "1"}
)
STAGES = [4, 7, 10]


class Audience:
    """Keeps what it is told, and can stop the run at an epoch."""

    def __init__(self, stop=None, at=()):
        self.stop = stop
        self.at = at
        self.stages = []
        self.num_batches = 0
        self.num_epochs = 0

    def on_batch(self, progress, losses):
        self.num_batches += 1

    def on_epoch(self, progress, losses, lr, seconds):
        self.num_epochs += 1
        if self.stop and (progress.stage.index, progress.phase, progress.epoch) == self.at:
            raise self.stop

    def on_stage(self, stage, result):
        self.stages.append((stage, result))


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
        "log.txt",
        "metrics.jsonl",
        "stages.csv",
        "accuracy_matrix.csv",
        "accuracy_matrix_by_nearest_mean.csv",
        "report.json",
        *(f"exemplars/{stage}.json" for stage in stages),
        *(f"predictions/{stage}.safetensors" for stage in stages),
        *(f"networks/{stage}.safetensors" for stage in stages),
    }


def test_the_status_is_finished_and_the_stored_report_is_the_one_returned(finished):
    path, report, _ = finished
    directory = Run(path)
    assert directory.read_json("status.json")["state"] == "finished"
    assert directory.report() == report
    assert report.finished
    assert report.name == "first"
    assert report.config == directory.read_json("config.json")
    assert report.environment == {"device": "cpu"}


def test_an_epoch_is_a_line_of_metrics(finished):
    path, _, audience = finished
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
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
    assert [result["accuracy"] for _, result in audience.stages] == report.overall


def test_the_report_can_be_recomputed_from_the_predictions(finished):
    path, report, _ = finished
    labels = predictions(path, "labels")
    assert report.own == "logits"
    assert report.rules == {
        rule: Numbers.of(predictions(path, f"by_{rule}"), labels, STAGES) for rule in ("logits", "nearest_mean")
    }


def test_the_labels_are_those_of_all_seen_test_images(finished):
    path, _, _ = finished
    test = resolve(EXPERIMENT).test.labels.numpy()
    for seen, labels in zip(STAGES, predictions(path, "labels"), strict=True):
        np.testing.assert_array_equal(labels, test[test < seen])


def test_the_matrix_is_a_table_with_headings(finished):
    path, report, _ = finished
    rows = table(path / "accuracy_matrix.csv")
    assert list(rows[0]) == ["after_stage", *(f"classes_of_stage_{index}" for index in range(3))]
    stored = [[float(row[f"classes_of_stage_{j}"] or "nan") for j in range(3)] for row in rows]
    np.testing.assert_array_equal(stored, np.array(report.accuracy_matrix, dtype=float))


def test_the_log_has_a_line_a_stage(finished):
    path, _, audience = finished
    lines = [json.loads(line) for line in (path / "log.txt").read_text().splitlines()]
    assert lines == [result for _, result in audience.stages]


def test_every_stage_leaves_its_weights(finished):
    path, _, _ = finished
    sizes = []
    for file in sorted((path / "networks").iterdir()):
        weights = load_file(file)
        assert all(np.isfinite(array).all() for array in weights.values())
        sizes.append(sum(array.size for array in weights.values()))
    assert sizes == sorted(set(sizes)), "the head grows with every stage"


def test_nothing_is_a_pickle(finished):
    path, _, _ = finished
    for file in path.rglob("*"):
        if file.is_file():
            assert file.name == ".lock" or file.suffix in (".json", ".jsonl", ".csv", ".txt", ".npz", ".safetensors")
            assert file.read_bytes()[:1] != b"\x80", f"{file} starts like a pickle"


def test_the_stored_configuration_repeats_the_run(finished, tmp_path):
    path, report, _ = finished
    stored = json.loads((path / "config.json").read_text())
    again = run(*started(tmp_path / "again", Experiment(**stored["experiment"])), ON_CPU)
    assert again.config == report.config
    assert again.metrics == report.metrics
    assert again.accuracy_matrix == report.accuracy_matrix
    assert again.rules == report.rules
    for name in ("predictions/stage-002.safetensors", "networks/stage-002.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


@pytest.mark.parametrize("changes", [{"seed": 1}, {"batch_seed": 1}])
def test_each_seed_matters(finished, tmp_path, changes):
    path, _, _ = finished
    experiment = Experiment(**{**vars(EXPERIMENT), "scenario": "4,6", **changes})
    run(*started(tmp_path / "other", experiment), ON_CPU)
    name = "networks/stage-000.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (path / name).read_bytes()


def test_a_stage_is_judged_by_the_method_s_own_rule(tmp_path):
    experiment = Experiment("icarl", scenario="5,5", options={"epochs": "1"})
    report = run(*started(tmp_path / "run", experiment), ON_CPU)
    rows = table(tmp_path / "run" / "stages.csv")
    assert report.own == "nearest_mean"
    assert [float(row["accuracy"]) for row in rows] == report.overall == report.rules["nearest_mean"].overall
    assert [float(row["logits_accuracy"]) for row in rows] == report.rules["logits"].overall


def test_a_method_without_exemplars_has_no_nearest_mean(tmp_path):
    experiment = Experiment("finetune", scenario="5,5", options={"epochs": "1"})
    report = run(*started(tmp_path / "run", experiment), ON_CPU)
    assert list(report.rules) == ["logits"]
    assert set(Run(tmp_path / "run").read_predictions(1)) == {"labels", "by_logits"}
    assert [row["nearest_mean_accuracy"] for row in table(tmp_path / "run" / "stages.csv")] == ["", ""]


@pytest.mark.parametrize(
    ("stop", "state"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted"), (ValueError("a bug"), "failed")],
)
def test_a_stopped_run_says_so_and_keeps_the_stages_done(tmp_path, stop, state):
    path = tmp_path / "run"
    resolved, directory = started(path)
    with pytest.raises(type(stop)):
        run(resolved, directory, ON_CPU, Audience(stop, at=(1, "main", 1)))
    assert directory.read_json("status.json")["state"] == state
    assert not directory.report().finished
    assert directory.report().num_seen == [4]
    assert len(table(path / "stages.csv")) == 1
    assert [file.name for file in (path / "predictions").iterdir()] == ["stage-000.safetensors"]
    assert (path / "errors.txt").exists() == (state == "failed")


def test_a_diverging_run_fails_and_names_the_place(tmp_path):
    path = tmp_path / "run"
    experiment = Experiment("podnet", scenario="5,5", options={"epochs": "1", "balanced_lr": "1e30"})
    resolved, directory = started(path, experiment)
    with pytest.raises(DivergedError, match="stage 2, phase balanced, epoch"):
        run(resolved, directory, ON_CPU)
    status = directory.read_json("status.json")
    assert status["state"] == "failed"
    assert "phase balanced" in status["error"]
    (told,) = (path / "errors.txt").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d error: The loss became", told)
    assert (path / "networks" / "stage-000.safetensors").exists()
    assert not (path / "networks" / "stage-001.safetensors").exists()


def test_weights_broken_by_the_very_last_step_are_not_kept(tmp_path, monkeypatch):
    def optimise_and_break(learner):
        optimise(learner)
        if learner.stage.index == 1:
            with torch.no_grad():
                next(learner.network.parameters()).view(-1)[0] = float("inf")

    optimise = Learner.optimise
    monkeypatch.setattr(Learner, "optimise", optimise_and_break)
    resolved, directory = started(tmp_path / "run", Experiment("finetune", scenario="5,5", options={"epochs": "0"}))
    with pytest.raises(DivergedError, match="After stage 2 the weights backbone"):
        run(resolved, directory, ON_CPU)
    assert directory.read_json("status.json")["state"] == "failed"
    assert [file.name for file in (directory.path / "networks").iterdir()] == ["stage-000.safetensors"]


def test_only_a_finished_run_in_the_same_precision_is_reused(tmp_path, monkeypatch):
    resolved, directory = toy_resolved(), Run(tmp_path / "run")
    assert reusable(directory, resolved, ON_CPU) is None
    report = toy_run(tmp_path / "run", resolved)
    assert reusable(directory, resolved, ON_CPU) == report
    with pytest.raises(UsageError, match=r"experiment\.seed"):
        reusable(directory, toy_resolved(seed=1), ON_CPU)
    monkeypatch.setattr("ccfa.experiments.running.acceleration_of", lambda running: (None, Acceleration("bf16")))
    with pytest.raises(UsageError, match=r"float32.*bf16"):
        reusable(directory, resolved, ON_CPU)
