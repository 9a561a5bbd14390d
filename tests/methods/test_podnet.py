import pytest

from ccfa.errors import UsageError
from ccfa.losses import cosine_distance, nca_exclusive, pod_spatial, pod_spatial_paper, squared_distance
from ccfa.methods import Budget
from ccfa.methods.podnet import podnet
from toys import STAGES, begun, learned, moved_by, tiny


def test_classification_is_weighed_from_the_second_stage_on():
    weighed = podnet(lambda_classification=0.25).classification_weight
    assert [weighed(stage) for stage in STAGES] == [1.0, 0.25, 0.25]


def test_code_and_paper_are_both_there():
    code, paper = podnet(), podnet(nca="paper", pod="paper")
    assert (code.head(4).margin, paper.head(4).margin) == (0.0, 0.6)
    assert paper.criterion is nca_exclusive
    assert [term().loss for term in code.terms] == [cosine_distance, pod_spatial]
    assert [term().loss for term in paper.terms] == [squared_distance, pod_spatial_paper]


def test_each_phase_trains_its_parameters():
    learner = begun(tiny("podnet", epochs=1), STAGES[1])
    eta = learner.previous.head.scale.item()
    assert learner.network.head.scale.item() == eta != 1  # carried over
    assert moved_by(learner, 0) == set(learner.network.state_dict()) - {"head.old"}
    assert learner.previous.head.scale.item() == eta
    statistics = {f"backbone.{key}" for key, _ in learner.network.backbone.named_buffers()}
    assert moved_by(learner, 1) == {"head.old", "head.new"} | statistics


def test_too_small_shared_memory_is_refused():
    learner = learned(tiny("podnet", Budget(total=3), epochs=1), 1)
    with pytest.raises(UsageError, match="exemplars"):
        learner.learn(STAGES[1])
