"""A run opened again: its networks predict as they did, and the analyses show what they claim to."""

import numpy as np
import pytest
import torch

from ccfa.data import data_set
from ccfa.errors import UsageError
from ccfa.evaluation.features import linear_cka
from ccfa.experiments import Experiment
from ccfa.experiments import analyses as module
from ccfa.experiments.analyses import feature_plane, learner_after, map_similarities
from ccfa.experiments.running import resolve_again
from digit_runs import CPU, created, digit_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """PODNet without CCFA, on 4, 3 and 3 digits."""
    return digit_run(tmp_path_factory.mktemp("runs") / "podnet")


@pytest.fixture
def seen_features(monkeypatch):
    """The features that t-SNE is given, without t-SNE, which is slow."""
    given = []

    def first_two(features, perplexity, seed):
        given.append(torch.from_numpy(features))
        return features[:, :2].astype(np.float64)

    monkeypatch.setattr(module, "tsne", first_two)
    return given


def learners(run):
    resolved = resolve_again(run, same_method=False)
    return [learner_after(stage, run, resolved, CPU) for stage in resolved.stages]


def of_kind(plane, kind):
    return [point for point in plane.points if point["kind"] == kind]


def test_every_network_predicts_as_it_did(run):
    test = resolve_again(run, same_method=False).test
    for learner in learners(run):
        seen = test.subset(test.rows(0, learner.stage.num_seen))
        stored = run.read_predictions(learner.stage.index)["by_logits"]
        np.testing.assert_array_equal(learner.predict_by_logits(seen.images).numpy(), stored)


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_cka_is_of_flattened_maps(run, estimator):
    resolved = resolve_again(run, same_method=False)
    images = resolved.method.transforms.test(resolved.test.images[resolved.test.labels < 4])
    with torch.no_grad():
        first, *later = (learner.network.eval().backbone(images).maps for learner in learners(run))
    expected = [
        [linear_cka(before.flatten(1), after.flatten(1), estimator) for before, after in zip(first, maps, strict=True)]
        for maps in later
    ]
    values, num_images = map_similarities(run, estimator=estimator)
    assert num_images == len(images)
    assert np.shape(values) == (2, 3)
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_memory_and_training_features(run, seen_features):
    plane = feature_plane(run, num_features=100)
    assert plane.class_names == {0: "0", 1: "1", 2: "2", 3: "3"}
    assert [(point["class"], point["row"]) for point in of_kind(plane, "memory")] == [
        (label, row) for label, rows in enumerate(run.read_exemplars(0)) for row in rows
    ]
    training, labels = of_kind(plane, "training"), resolve_again(run, same_method=False).train.labels
    assert len({point["row"] for point in training}) == len(training) == 100
    assert all(int(labels[point["row"]]) == point["class"] < 4 for point in training)


def test_augmented_features(run, seen_features):
    plane, learner = feature_plane(run, num_features=150), learners(run)[0]
    augmented = of_kind(plane, "augmented")
    rows, new = {point["row"] for point in augmented}, set(learner.train.rows(4, 7).tolist())
    assert rows <= new | {row for rows in run.read_exemplars(0) for row in rows}
    assert rows & new
    features = seen_features[0][[point["kind"] == "augmented" for point in plane.points]]
    with torch.no_grad():
        starts = learner.network.head.embed(learner.embeddings(torch.tensor([point["row"] for point in augmented])))
        assert learner.network.head(features).argmax(dim=1).tolist() == [point["class"] for point in augmented]
    furthest = (features - starts).abs().amax(dim=1)
    assert (furthest > 0).all()
    assert (furthest <= plane.ccfa.steps * plane.step_size[1] * 1.001).all()
    preset = data_set("digits").method_options["ccfa"]
    assert {name: getattr(plane.ccfa, name) for name in preset} == preset, "the run itself has no CCFA"


def test_seed_draws_images_classes_and_features(run, seen_features, monkeypatch):
    first, again, other = (map_similarities(run, num_images=40, seed=seed) for seed in (0, 0, 1))
    assert first[1] == 40
    assert first == again != other
    monkeypatch.setattr(module, "NUM_CLASSES", 2)
    first, again, other = (feature_plane(run, num_features=30, seed=seed) for seed in (0, 0, 4))
    assert first.points == again.points
    assert {point["class"] for point in first.points} <= first.class_names.keys() != other.class_names.keys()


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
    run = created(tmp_path / "run", experiment)
    with pytest.raises(UsageError, match=reason):
        feature_plane(run)
    if experiment.scenario == "10":
        with pytest.raises(UsageError, match=reason):
            map_similarities(run)
