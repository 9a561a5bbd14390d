from dataclasses import replace

import pytest
import torch

from ccfa.learning.loop import optimise
from ccfa.methods import METHODS
from toys import STAGES, TOY, Shortened, begun, learned, tiny, toy_images

TEST = toy_images(seed=1, per_class=10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("finetune", [0, 0, 0, 0, 12, 12]),
        ("replay", [3, 3, 3, 3, 12, 12]),
        ("joint", [12, 12, 12, 12, 12, 12]),
    ],
)
def test_what_the_last_stage_trains_on(name, expected):
    learner = begun(tiny(name), STAGES[2])
    rows = learner.training_rows()
    assert torch.bincount(learner.train.labels[rows], minlength=6).tolist() == expected
    assert len(rows.unique()) == len(rows)


def test_only_joint_training_starts_afresh():
    for name in ("finetune", "replay", "joint"):
        learner = begun(tiny(name), STAGES[1])
        before = learner.previous.backbone.state_dict()
        kept = [torch.equal(value, before[key]) for key, value in learner.network.backbone.state_dict().items()]
        assert all(kept) == (name != "joint")
        assert learner.network.head.num_classes == 4


def test_every_weight_trains():
    learner = begun(tiny("replay"), STAGES[1])
    before = {key: value.clone() for key, value in learner.network.named_parameters()}
    optimise(learner, learner.method.phases(STAGES[1])[0], 0)
    assert not [key for key, value in learner.network.named_parameters() if torch.equal(value, before[key])]


def accuracies(name: str) -> tuple[float, float]:
    """The accuracy on the first classes and on the last, after three stages of ten epochs."""
    method = METHODS[name](backbone="small", transforms=replace(TOY, padding=0, flip=False), lr=0.05)
    predicted = learned(replace(method, phases=Shortened(method.phases, epochs=10))).predict(TEST.images)
    right = predicted == TEST.labels
    return right[TEST.labels < 2].float().mean().item(), right[TEST.labels >= 4].float().mean().item()


def test_fine_tuning_forgets_and_the_others_do_not():
    forgotten, recent = accuracies("finetune")
    assert recent > 0.9
    assert forgotten < 0.1
    assert min(accuracies("joint")) > 0.9
    assert min(accuracies("replay")) > 0.9
