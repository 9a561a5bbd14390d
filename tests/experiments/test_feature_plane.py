"""The features of figure 3 are what they are said to be: whose, from where, with which label."""

import numpy as np
import pytest
import torch

from ccfa.errors import UsageError
from ccfa.experiments import Experiment
from ccfa.experiments import feature_plane as module
from ccfa.experiments.analyses import learner_after, reopen
from ccfa.experiments.feature_plane import feature_plane
from ccfa.experiments.presets import ccfa_preset
from digit_runs import CPU, created, digit_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return digit_run(tmp_path_factory.mktemp("runs") / "podnet", ccfa=True)


@pytest.fixture
def seen_features(monkeypatch):
    """The features that t-SNE is given, and no t-SNE: it takes the time."""
    given = []

    def first_two(features, perplexity, seed):
        given.append(features)
        return features[:, :2].astype(np.float64)

    monkeypatch.setattr(module, "tsne", first_two)
    return given


def of_kind(plane, kind):
    return [point for point in plane.points if point["kind"] == kind]


def test_memory_is_the_exemplars_and_training_are_images_of_the_classes(directory, seen_features):
    plane = feature_plane(directory, num_features=100)
    assert plane.class_names == {0: "0", 1: "1", 2: "2", 3: "3"}
    exemplars = directory.read_exemplars(0)
    assert [(point["class"], point["row"]) for point in of_kind(plane, "memory")] == [
        (label, row) for label, rows in enumerate(exemplars) for row in rows
    ]
    training = of_kind(plane, "training")
    labels = reopen(directory).train.labels
    assert len({point["row"] for point in training}) == len(training) == 100
    assert all(int(labels[point["row"]]) == point["class"] < 4 for point in training)


def test_augmented_features_start_from_the_next_stages_images_and_bear_the_old_heads_label(directory, seen_features):
    plane = feature_plane(directory, num_features=150)
    resolved = reopen(directory)
    allowed = set(resolved.train.rows(4, 7).tolist()) | {row for rows in directory.read_exemplars(0) for row in rows}
    augmented = of_kind(plane, "augmented")
    assert {point["row"] for point in augmented} <= allowed
    assert any(point["row"] in set(resolved.train.rows(4, 7).tolist()) for point in augmented)

    (features,) = seen_features
    kinds = np.array([point["kind"] for point in plane.points])
    head = learner_after(resolved.stages[0], directory, resolved, CPU).network.head
    with torch.no_grad():
        predicted = head(torch.from_numpy(features[kinds == "augmented"])).argmax(dim=1).tolist()
    assert predicted == [point["class"] for point in augmented]


def test_augmented_features_are_pushed_away_from_where_they_start(directory, seen_features):
    plane = feature_plane(directory, num_features=150)
    resolved = reopen(directory)
    learner = learner_after(resolved.stages[0], directory, resolved, CPU)
    rows = torch.tensor([point["row"] for point in of_kind(plane, "augmented")])
    with torch.no_grad():
        starts = learner.network.head.embed(learner.embeddings(rows))
    kinds = np.array([point["kind"] for point in plane.points])
    moved = torch.from_numpy(seen_features[0][kinds == "augmented"]) - starts
    steps, (low, high) = plane.ccfa.steps, plane.step_size
    furthest = moved.abs().amax(dim=1)
    assert (furthest > 0).all()
    assert (furthest <= steps * high * 1.001).all()
    assert low < high


def test_repeats_itself_and_another_seed_draws_others(directory, seen_features):
    first, again, other = (feature_plane(directory, num_features=60, seed=seed) for seed in (0, 0, 1))
    assert first.points == again.points
    assert [point["row"] for point in first.points] != [point["row"] for point in other.points]


def test_ten_classes_are_drawn_of_more(tmp_path, seen_features, monkeypatch):
    monkeypatch.setattr(module, "NUM_CLASSES", 3)
    directory = digit_run(tmp_path / "run", scenario="8,2")
    drawn = [tuple(feature_plane(directory, num_features=50, seed=seed).class_names) for seed in range(4)]
    assert all(len(classes) == 3 and max(classes) < 8 for classes in drawn)
    assert len(set(drawn)) > 1
    plane = feature_plane(directory, num_features=50)
    assert {point["class"] for point in plane.points} <= set(plane.class_names)
    assert {name: getattr(plane.ccfa, name) for name in ccfa_preset("digits")} == ccfa_preset("digits")


@pytest.mark.parametrize(
    ("experiment", "reason"),
    [
        (Experiment("podnet", scenario="10"), "single stage"),
        (Experiment("gdumb", scenario="8,2"), "no meaning for gdumb"),
        (Experiment("finetune", scenario="8,2"), "keeps no exemplars"),
        (Experiment("podnet", ccfa=True, scenario="8,2", options={"ccfa.count": "0"}), "makes no features"),
    ],
)
def test_says_why_there_is_nothing_to_show_before_it_reads_a_network(tmp_path, experiment, reason):
    with pytest.raises(UsageError, match=reason):
        feature_plane(created(tmp_path / "run", experiment))
