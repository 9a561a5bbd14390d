from dataclasses import replace

import pytest
import torch

from ccfa.methods import METHODS
from toys import STAGES, TOY, Shortened, begun, learned, moved_by, tiny, toy_images

TEST = toy_images(seed=1, per_class=10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("finetune", [0, 0, 12, 12]),
        ("replay", [3, 3, 12, 12]),
        ("joint", [12, 12, 12, 12]),
    ],
)
def test_what_a_later_stage_trains(name, expected):
    learner = begun(tiny(name, epochs=1), STAGES[1])
    rows = learner.training_rows()
    assert torch.bincount(learner.train.labels[rows], minlength=4).tolist() == expected
    assert len(rows.unique()) == len(rows)
    before = learner.previous.backbone.state_dict()
    kept = [torch.equal(value, before[key]) for key, value in learner.network.backbone.state_dict().items()]
    assert all(kept) == (name != "joint")
    assert learner.network.head.num_classes == 4
    assert moved_by(learner, 0) >= {key for key, value in learner.network.named_parameters() if len(value)}


def accuracies(name: str) -> tuple[float, float]:
    """The accuracy on the first classes and on the next, after two stages of six epochs."""
    method = METHODS[name](backbone="small", transforms=replace(TOY, padding=0, flip=False), lr=0.05)
    predicted = learned(replace(method, phases=Shortened(method.phases, epochs=6)), 2).predict(TEST.images)
    right = (predicted == TEST.labels).float()
    return right[TEST.rows(0, 2)].mean().item(), right[TEST.rows(2, 4)].mean().item()


def test_only_fine_tuning_forgets():
    forgotten, recent = accuracies("finetune")
    assert recent > 0.9
    assert forgotten < 0.1
    assert min(accuracies("joint")) > 0.9
    assert min(accuracies("replay")) > 0.9
