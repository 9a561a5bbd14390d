"""The order any comparison must find: fine-tuning forgets, distillation keeps, joint training bounds."""

import numpy as np
import pytest
import torch

from ccfa.evaluation import mean_and_spread, overall_accuracies
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Learner

pytestmark = pytest.mark.slow

SEEDS = (0, 1)
EPOCHS = {"finetune": 8, "joint": 8, "ucir": 10, "podnet": 8}


def average_accuracy(method, seed, ccfa=False):
    options = ({"epochs": str(EPOCHS[method])} if method in EPOCHS else {}) | (
        {"balanced_epochs": "8"} if method == "podnet" else {}
    )
    resolved = resolve(Experiment(method, ccfa=ccfa, scenario="4,3,3", seed=seed, options=options))
    learner = Learner(resolved.method, resolved.train, seed=seed)
    predictions, labels = [], []
    for stage in resolved.stages:
        learner.learn(stage)
        seen = resolved.test.subset(resolved.test.rows(0, stage.num_seen))
        predictions.append(learner.predict(seen.images).numpy())
        labels.append(seen.labels.numpy())
    return float(overall_accuracies(predictions, labels).mean())


@pytest.fixture(scope="module")
def accuracies():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # images this small are not worth a second thread
    yield {method: np.array([average_accuracy(method, seed) for seed in SEEDS]) for method in EPOCHS}
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["podnet", "ucir"])
def test_distillation_beats_fine_tuning(accuracies, method):
    gain = accuracies[method] - accuracies["finetune"]
    assert gain.mean() > 2 * mean_and_spread(gain)[1] / len(gain) ** 0.5
    assert gain.mean() > 0.1


@pytest.mark.parametrize("method", ["il2a", "pass"])
def test_methods_without_exemplars_forget_less_than_fine_tuning(accuracies, method):
    assert average_accuracy(method, SEEDS[0]) > accuracies["finetune"].max() + 0.1


@pytest.mark.parametrize("method", ["finetune", "podnet", "ucir"])
def test_nothing_beats_joint_training(accuracies, method):
    gain = accuracies[method] - accuracies["joint"]
    assert gain.mean() <= 2 * mean_and_spread(gain)[1] / len(gain) ** 0.5


@pytest.mark.parametrize("method", ["podnet", "ucir"])
def test_the_augmentation_runs_and_still_beats_fine_tuning(accuracies, method):
    plugged = average_accuracy(method, SEEDS[0], ccfa=True)
    assert plugged != accuracies[method][0], "the augmentation changes training"
    assert plugged > accuracies["finetune"].max()
