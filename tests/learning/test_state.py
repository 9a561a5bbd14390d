"""What a stored learner is made of; that it continues exactly is tests/contracts/test_resume.py."""

import pytest
import torch

from ccfa.errors import ModelError, UsageError
from ccfa.learning import Learner
from ccfa.learning.networks import network_of, take_over
from ccfa.learning.state import restore, state_of
from ccfa.methods import METHODS
from toys import STAGES, learned, tiny, toy_images


def test_networks_that_are_the_same_are_stored_once():
    for num_stages, expected in ((1, {"network"}), (2, {"network", "initial"}), (3, {"network", "initial"})):
        tensors, facts = state_of(learned(tiny("podnet"), num_stages))
        assert set(facts["networks"]) == expected
        assert {name.split(".")[0] for name in tensors if name.endswith("head.old")} == expected


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_a_learner_holds_is_stored(name):
    learner = learned(tiny(name), 3)
    addresses = {tensor.data_ptr() for tensor in state_of(learner)[0].values()}
    held = [learner.network, learner.initial, *learner.terms]
    for module in held:
        for tensor in [*module.parameters(), *module.buffers()]:
            assert tensor.data_ptr() in addresses
        for part in module.modules():  # nothing remembered outside of parameters and buffers
            assert not [key for key, value in vars(part).items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", METHODS)
def test_a_network_is_made_again_from_its_weights(name):
    learner = learned(tiny(name), 3)
    images = toy_images(seed=2).images.float()
    for index, network in ((0, learner.initial), (2, learner.network)):
        again = network_of(learner.method, 3, index, network.state_dict()).eval()
        assert [*again.state_dict()] == [*network.state_dict()]
        assert {key for key, _ in again.named_parameters()} == {key for key, _ in network.named_parameters()}
        assert torch.equal(again(images), network.eval()(images))


def test_weights_of_another_network_are_refused():
    afc, icarl = learned(tiny("afc"), 1), learned(tiny("icarl"), 1)
    with pytest.raises(ModelError, match="of another network"):
        network_of(afc.method, 3, 0, icarl.network.state_dict())
    with pytest.raises(ModelError, match="of another network"):
        take_over(afc.network, {})


def test_a_restored_learner_goes_on_with_its_stage_or_the_next_and_no_other():
    learner = learned(tiny("finetune"), 1)
    again = Learner(tiny("finetune"), toy_images())
    restore(again, *state_of(learner))
    for stage in (STAGES[0], STAGES[2]):
        with pytest.raises(UsageError, match="does not follow"):
            again.learn(stage)
    again.learn(STAGES[1])
