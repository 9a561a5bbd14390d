"""Calibration against plain formulas, and the classifier against the learner's own predictions."""

import numpy as np
import pytest
import torch

from ccfa import split
from ccfa.deployment.scoring import (
    Classifier,
    best_temperature,
    calibrate,
    calibration_error,
    class_weights,
    probabilities,
    score,
)
from ccfa.evaluation import rule_name
from toys import learned, tiny, toy_images


@pytest.mark.parametrize("name", ["finetune", "podnet", "ucir", "icarl", "bic", "aanet", "der", "foster", "il2a"])
def test_classifier_agrees_with_the_learner(name):
    learner = learned(tiny(name))
    nearest = rule_name(learner.method.predict) == "nearest_mean"
    directions = learner.class_means() if len(learner.memory) else None
    classifier = Classifier(learner.network, learner.method.transforms, 1.0, directions, nearest)
    images = toy_images(seed=3).images
    assert score(classifier, images)[0].argmax(axis=1).tolist() == learner.predict(images).tolist()
    assert split(6, 2, 2)[-1] == learner.stage


def test_probabilities_are_a_softmax():
    scores = np.array([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]])
    wanted = np.exp(scores / 2) / np.exp(scores / 2).sum(axis=1, keepdims=True)
    assert probabilities(scores, 2.0) == pytest.approx(wanted)
    classifier = torch.tensor(scores) / 2
    assert classifier.softmax(dim=1).numpy() == pytest.approx(wanted)


def drawn(temperature, num=4000, classes=5):
    """Scores whose softmax at a temperature is the truth."""
    random = np.random.default_rng(0)
    scores = random.normal(0, 3, (num, classes))
    shares = probabilities(scores, temperature).cumsum(axis=1)
    labels = (random.random((num, 1)) > shares).sum(axis=1).clip(max=classes - 1)
    return scores, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_is_found(temperature):
    scores, labels = drawn(temperature)
    assert best_temperature(scores, labels) == pytest.approx(temperature, rel=0.08)
    found = calibrate(scores, scores.max(axis=1), labels)
    assert found.error < 0.03
    assert found.images == len(labels)


def test_each_half_is_measured_with_the_temperature_of_the_other():
    (sure, labels), (unsure, other_labels) = drawn(0.3, 200), drawn(3.0, 200)
    scores, truth = np.empty((400, 5)), np.empty(400, dtype=np.int64)
    scores[::2], scores[1::2], truth[::2], truth[1::2] = sure, unsure, labels, other_labels
    temperatures = best_temperature(unsure, other_labels), best_temperature(sure, labels)
    confidences = np.empty(400)
    confidences[::2] = probabilities(sure, temperatures[0]).max(axis=1)
    confidences[1::2] = probabilities(unsure, temperatures[1]).max(axis=1)
    expected = calibration_error(confidences, scores.argmax(axis=1) == truth, class_weights(truth))
    assert calibrate(scores, scores.max(axis=1), truth).error == pytest.approx(expected)
    assert expected > 0.1


def test_temperature_follows_the_unit_of_the_scores():
    scores, labels = drawn(1.0)
    assert best_temperature(1e4 * scores, labels) == pytest.approx(1e4 * best_temperature(scores, labels))


def test_few_right_answers_do_not_make_certain():
    """Five images, all recognised: at most (n + 1) / (n + 2), not 1."""
    scores = 10.0 * np.eye(5)
    temperature = best_temperature(scores, np.arange(5))
    assert 0.8 < probabilities(scores, temperature).max() < 0.9


def test_calibration_error_by_hand():
    confidences = np.array([0.95, 0.95, 0.55, 0.55])
    is_right = np.array([True, True, True, False])
    assert calibration_error(confidences, is_right, np.ones(4)) == pytest.approx(0.5 * 0.05 + 0.5 * 0.05)
    assert calibration_error(confidences, is_right, np.array([1, 1, 3, 1])) == pytest.approx(2 / 6 * 0.05 + 4 / 6 * 0.2)


def test_classes_count_the_same_in_a_calibration():
    scores, labels = drawn(1.0)
    rows = np.concatenate([np.arange(len(labels)), *[np.flatnonzero(labels == 0)] * 9])
    once = calibrate(scores, scores.max(axis=1), labels)
    skewed = calibrate(scores[rows], scores[rows].max(axis=1), labels[rows])
    assert skewed.temperature == pytest.approx(once.temperature, rel=0.06)  # one place in the list of temperatures
    assert skewed.unfamiliar_below == pytest.approx(once.unfamiliar_below)
    assert skewed.error == pytest.approx(once.error, abs=0.01)


def test_threshold_flags_a_twentieth_of_known_images():
    scores, labels = drawn(1.0)
    limit = calibrate(scores, scores.max(axis=1), labels).unfamiliar_below
    assert np.mean(scores.max(axis=1) < limit) == pytest.approx(0.05, abs=0.002)


def test_without_images_nothing_is_calibrated():
    found = calibrate(np.empty((0, 3)), np.empty(0), np.empty(0, np.int64))
    assert (found.temperature, found.images, found.unfamiliar_below) == (1.0, 0, None)


def test_one_class_has_no_temperature():
    assert best_temperature(np.ones((3, 1)), np.zeros(3, np.int64)) == 1.0
