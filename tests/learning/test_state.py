"""What a stored learner is made of; that it continues exactly is tests/contracts/test_resume.py."""

import pytest
import torch

from ccfa.errors import ModelError, UsageError
from ccfa.learning import Learner
from ccfa.learning.state import network_of, restore, state_of, take_over
from ccfa.methods import METHODS
from toys import STAGES, learned, tiny, toy_images


@pytest.mark.parametrize(("num_stages", "expected"), [(1, {"network"}), (2, {"network", "initial"})])
def test_equal_networks_are_stored_once(num_stages, expected):
    tensors, _ = state_of(learned(tiny("podnet", epochs=1), num_stages))
    assert {name.split(".")[0] for name in tensors if name.endswith("head.old")} == expected


@pytest.mark.parametrize("name", METHODS)
def test_stored_tensors_are_all_and_make_the_network_again(name):
    learner = learned(tiny(name, epochs=1), 3)
    addresses = {tensor.data_ptr() for tensor in state_of(learner)[0].values()}
    for module in (learner.network, learner.initial, *learner.terms):
        for tensor in [*module.parameters(), *module.buffers()]:
            assert tensor.data_ptr() in addresses
        for part in module.modules():  # nothing remembered outside of parameters and buffers
            assert not [key for key, value in vars(part).items() if isinstance(value, torch.Tensor)]
    images = toy_images(seed=2).images.float()
    for index, network in ((0, learner.initial), (2, learner.network)):
        again = network_of(learner.method, 3, index, network.state_dict()).eval()
        assert {key for key, _ in again.named_parameters()} == {key for key, _ in network.named_parameters()}
        assert torch.equal(again(images), network.eval()(images))


def test_weights_of_another_network_are_refused():
    afc, icarl = Learner(tiny("afc"), toy_images()), Learner(tiny("icarl"), toy_images())
    for weights in (icarl.network.state_dict(), {}):
        with pytest.raises(ModelError):
            take_over(afc.network, weights)


def test_a_restored_learner_takes_the_next_stage_only():
    again = Learner(tiny("finetune"), toy_images())
    restore(again, *state_of(learned(tiny("finetune"), 1)))
    for stage in (STAGES[0], STAGES[2]):
        with pytest.raises(UsageError, match="does not follow"):
            again.learn(stage)
    again.learn(STAGES[1])
