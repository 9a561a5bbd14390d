"""A run opened again: its networks predict as they did, and the analyses show what they claim to."""

import shutil

import numpy as np
import pytest
import torch

from ccfa.errors import ModelError, UsageError
from ccfa.evaluation.similarity import linear_cka
from ccfa.experiments import Experiment, Run
from ccfa.experiments import analyses as module
from ccfa.experiments.analyses import feature_plane, learner_after, map_similarities, reopen
from ccfa.experiments.presets import ccfa_preset
from digit_runs import CPU, SHORT, created, digit_run

METHODS = {"aanet": SHORT} | {name: {"epochs": "1"} for name in ("bic", "gdumb", "il2a")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return digit_run(tmp_path_factory.mktemp("runs") / "podnet", ccfa=True)


@pytest.fixture
def copied(directory, tmp_path):
    return Run(shutil.copytree(directory.path, tmp_path / "copy"))


def first_learner(directory):
    resolved = reopen(directory)
    return learner_after(resolved.stages[0], directory, resolved, CPU)


@pytest.mark.parametrize("method", METHODS)
def test_every_network_predicts_as_it_did(tmp_path, method):
    directory = digit_run(tmp_path / "run", method, scenario="8,2", options=METHODS[method])
    resolved = reopen(directory)
    for stage in resolved.stages:
        learner = learner_after(stage, directory, resolved, CPU)
        seen = resolved.test.subset(resolved.test.rows(0, stage.num_seen))
        stored = directory.read_predictions(stage.index)["by_logits"]
        np.testing.assert_array_equal(learner.predict_by_logits(seen.images).numpy(), stored)


def test_weights_of_another_stage_are_named(copied):
    folder = copied.path / "networks"
    shutil.copy(folder / "stage-002.safetensors", folder / "stage-000.safetensors")
    with pytest.raises(ModelError, match="stage-000"):
        first_learner(copied)


@pytest.mark.parametrize(
    "change", [{"num_training_images": 1}, {"fingerprints": {"train": "0" * 64}}, {"class_names": None}]
)
def test_other_data_are_refused(copied, change):
    config = copied.config
    config["resolved"] |= change
    copied.write_json("config.json", config)
    with pytest.raises(ModelError, match=next(iter(change))):
        reopen(copied)


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_cka_is_of_flattened_maps(directory, estimator):
    resolved = reopen(directory)
    images = resolved.test.images[resolved.test.labels < 4]
    with torch.no_grad():
        first, *later = (
            learner_after(stage, directory, resolved, CPU)
            .network.eval()
            .backbone(resolved.method.transforms.test(images))
            .maps
            for stage in resolved.stages
        )
    expected = [
        [linear_cka(before.flatten(1), after.flatten(1), estimator) for before, after in zip(first, maps, strict=True)]
        for maps in later
    ]
    values, num_images = map_similarities(directory, estimator=estimator)
    assert num_images == len(images)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert np.shape(values) == (2, 3)
    assert (np.array(values) < 1).all()


def test_unchanged_backbone_is_aligned(copied):
    resolved, other = reopen(copied), map_similarities(copied)[0][1]
    network = learner_after(resolved.stages[1], copied, resolved, CPU).network
    network.backbone.load_state_dict(first_learner(copied).network.backbone.state_dict())
    copied.write_network(1, network)
    values, _ = map_similarities(copied)
    np.testing.assert_allclose(values[0], 1.0, atol=1e-9)
    assert values[1] == other


def test_seed_draws_the_images(directory):
    first, again, other = (map_similarities(directory, num_images=40, seed=seed) for seed in (0, 0, 1))
    assert first[1] == 40
    assert first == again != other


@pytest.fixture
def seen_features(monkeypatch):
    """The features that t-SNE is given, without t-SNE, which is slow."""
    given = []

    def first_two(features, perplexity, seed):
        given.append(torch.from_numpy(features))
        return features[:, :2].astype(np.float64)

    monkeypatch.setattr(module, "tsne", first_two)
    return given


def of_kind(plane, kind):
    return [point for point in plane.points if point["kind"] == kind]


def test_memory_and_training_features(directory, seen_features):
    plane = feature_plane(directory, num_features=100)
    assert plane.class_names == {0: "0", 1: "1", 2: "2", 3: "3"}
    assert [(point["class"], point["row"]) for point in of_kind(plane, "memory")] == [
        (label, row) for label, rows in enumerate(directory.read_exemplars(0)) for row in rows
    ]
    training, labels = of_kind(plane, "training"), reopen(directory).train.labels
    assert len({point["row"] for point in training}) == len(training) == 100
    assert all(int(labels[point["row"]]) == point["class"] < 4 for point in training)


def test_augmented_features(directory, seen_features):
    plane = feature_plane(directory, num_features=150)
    augmented, learner = of_kind(plane, "augmented"), first_learner(directory)
    rows = {point["row"] for point in augmented}
    new = set(learner.train.rows(4, 7).tolist())
    assert rows <= new | {row for rows in directory.read_exemplars(0) for row in rows}
    assert rows & new
    features = seen_features[0][[point["kind"] == "augmented" for point in plane.points]]
    with torch.no_grad():
        starts = learner.network.head.embed(learner.embeddings(torch.tensor([point["row"] for point in augmented])))
        assert learner.network.head(features).argmax(dim=1).tolist() == [point["class"] for point in augmented]
    furthest = (features - starts).abs().amax(dim=1)
    assert (furthest > 0).all()
    assert (furthest <= plane.ccfa.steps * plane.step_size[1] * 1.001).all()


def test_seed_draws_the_features(directory, seen_features):
    first, again, other = (feature_plane(directory, num_features=60, seed=seed) for seed in (0, 0, 1))
    assert first.points == again.points
    assert [point["row"] for point in first.points] != [point["row"] for point in other.points]


def test_some_of_many_classes_are_drawn(tmp_path, seen_features, monkeypatch):
    monkeypatch.setattr(module, "NUM_CLASSES", 3)
    directory = digit_run(tmp_path / "run", scenario="8,2")
    planes = [feature_plane(directory, num_features=50, seed=seed) for seed in range(3)]
    assert all(len(plane.class_names) == 3 and max(plane.class_names) < 8 for plane in planes)
    assert len({tuple(plane.class_names) for plane in planes}) > 1
    assert {point["class"] for point in planes[0].points} <= set(planes[0].class_names)
    assert {name: getattr(planes[0].ccfa, name) for name in ccfa_preset("digits")} == ccfa_preset("digits")


@pytest.mark.parametrize(
    ("experiment", "reason"),
    [
        (Experiment("podnet", scenario="10"), "single stage"),
        (Experiment("gdumb", scenario="8,2"), "gdumb"),
        (Experiment("finetune", scenario="8,2"), "exemplars"),
        (Experiment("podnet", ccfa=True, scenario="8,2", options={"ccfa.count": "0"}), "count=0"),
    ],
)
def test_nothing_to_show_is_refused(tmp_path, experiment, reason):
    directory = created(tmp_path / "run", experiment)
    with pytest.raises(UsageError, match=reason):
        feature_plane(directory)
    if experiment.scenario == "10":
        with pytest.raises(UsageError, match=reason):
            map_similarities(directory)
