import os

import pytest
import torch

from ccfa.data import ImageSet, Stage, class_order, load_cifar100, parse_scenario, split
from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.loop import num_batches, optimise
from ccfa.learning.step import step_losses
from ccfa.losses.classification import nca_exclusive
from ccfa.losses.distillation import cosine_distance, pod_spatial, pod_spatial_paper, squared_distance
from ccfa.methods import Budget
from ccfa.methods.parts import seen_to_new
from ccfa.methods.podnet import podnet
from toys import STAGES, begun, learned, tiny

FIRST, SECOND = split(100, 50, 10)[:2]


def test_published_phases_and_terms():
    main, balanced = podnet().phases(STAGES[1])
    assert (balanced.epochs, balanced.lr, balanced.batch_size, balanced.weight_decay) == (20, 0.05, 128, 5e-4)
    assert main.clip_value == balanced.clip_value == 5
    assert balanced.train_batch_norm
    found = [(term.name, term.weight, term.factor) for term in (term() for term in podnet().terms)]
    assert found == [("pod-flat", 1.0, seen_to_new), ("pod-spatial", 3.0, seen_to_new)]


def test_code_and_paper_are_both_there():
    code, paper = podnet(), podnet(nca="paper", pod="paper")
    assert (code.head(4).margin, paper.head(4).margin) == (0.0, 0.6)
    assert paper.criterion is nca_exclusive
    assert [term().loss for term in code.terms] == [cosine_distance, pod_spatial]
    assert [term().loss for term in paper.terms] == [squared_distance, pod_spatial_paper]


def moved_by(learner: Learner, phase_index: int, stage: Stage) -> set[str]:
    """What of the network's state a phase changes."""
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    optimise(learner, learner.method.phases(stage)[phase_index], phase_index)
    return {key for key, value in learner.network.state_dict().items() if not torch.equal(value, before[key])}


def test_main_phase_trains_all_but_the_old_proxies():
    learner = begun(tiny("podnet"), STAGES[1])
    everything = set(learner.network.state_dict())
    assert moved_by(learner, 0, STAGES[1]) == everything - {"head.old"}


def test_balanced_phase_trains_all_proxies():
    learner = begun(tiny("podnet"), STAGES[1])
    backbone = {f"backbone.{key}" for key, _ in learner.network.backbone.named_buffers()}
    assert moved_by(learner, 1, STAGES[1]) == {"head.old", "head.new"} | backbone


def test_eta_is_carried_over_the_stages():
    learner = learned(tiny("podnet"), 1)
    eta = learner.network.head.scale.item()
    assert eta != 1
    learner = begun(tiny("podnet"), STAGES[1])
    assert learner.network.head.scale.item() == eta == learner.previous.head.scale.item()
    optimise(learner, learner.method.phases(STAGES[1])[0], 0)
    assert learner.network.head.scale.item() != eta == learner.previous.head.scale.item()


def test_distillation_starts_at_zero():
    learner = begun(tiny("podnet"), STAGES[1])
    learner.network.eval()  # as the previous network runs
    main = learner.method.phases(STAGES[1])[0]
    losses = step_losses(learner, learner.training_rows(), main, learner.generator("step"))
    assert losses["pod-flat"].item() == pytest.approx(0, abs=1e-5)
    assert losses["pod-spatial"].item() == pytest.approx(0, abs=1e-5)


def test_too_small_shared_memory_is_refused():
    learner = learned(tiny("podnet", Budget(total=3)), 1)
    with pytest.raises(UsageError, match="exemplars"):
        learner.learn(STAGES[1])


@pytest.fixture(scope="module")
def cifar100() -> ImageSet:
    """The training set in PODNet's first order."""
    if "CCFA_DATA" not in os.environ:
        pytest.skip("$CCFA_DATA does not say where CIFAR-100 is")
    train, _ = load_cifar100(download=False)
    return train.reorder(class_order("podnet-0", 100, "cifar100"))


@pytest.mark.slow
def test_sizes_on_cifar100(cifar100):
    method, (first, second, *_) = podnet(), parse_scenario("B50-inc10", 100)
    learner = Learner(method, cifar100)
    assert sum(parameter.numel() for parameter in learner.network.backbone.parameters()) == 463_504
    learner.stage = first
    assert num_batches(len(learner.training_rows()), method.phases(first)[0].batch_size) == 196
    learner.memory.update([rows[:20] for rows in learner.new_classes()])
    learner.stage = second
    rows = learner.training_rows()
    assert torch.bincount(cifar100.labels[rows]).tolist() == [20] * 50 + [500] * 10
    assert num_batches(len(rows), method.phases(second)[0].batch_size) == 47


def test_classification_weight_of_later_stages():
    weighed = podnet(lambda_classification=0.25).classification_weight
    assert [weighed(stage) for stage in STAGES] == [1.0, 0.25, 0.25]
