from dataclasses import replace

import pytest
import torch

from ccfa.data import Stage
from ccfa.learning.optimisation import optimise
from ccfa.losses.classification import cross_entropy
from ccfa.methods import METHODS
from ccfa.methods.baselines import finetune, joint, replay
from toys import STAGES, TOY, Shortened, begun, learned, tiny, toy_images

TEST = toy_images(seed=1, per_class=10)


@pytest.mark.parametrize("factory", [finetune, replay, joint])
def test_one_phase_of_cross_entropy_on_everything(factory):
    method = factory()
    for stage in (Stage(0, 0, 50), Stage(1, 50, 60)):
        (main,) = method.phases(stage)
        assert (main.epochs, main.lr, main.batch_size, main.weight_decay) == (160, 0.1, 128, 5e-4)
    assert method.criterion is cross_entropy
    assert method.terms == ()


def test_options_reach_every_baseline():
    for factory in (finetune, replay, joint):
        (main,) = factory(epochs=7, lr=0.5, batch_size=9, weight_decay=0.25).phases(Stage(0, 0, 1))
        assert (main.epochs, main.lr, main.batch_size, main.weight_decay) == (7, 0.5, 9, 0.25)
    assert replay(memory=7).memory.per_class == 7


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


def test_joint_training_has_no_old_block():
    learner = begun(tiny("joint"), STAGES[2])
    assert (len(learner.network.head.old), len(learner.network.head.new)) == (0, 6)


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
