import pytest
import torch
from torch import optim

from ccfa.models import BACKBONES, CosineHead, LinearHead, LocalSimilarityHead, Network

HEADS = [LinearHead, CosineHead, LocalSimilarityHead]


def network_with(head: type, num_classes: int = 3) -> Network:
    torch.manual_seed(0)
    network = Network(BACKBONES["small"](3), head(64))
    network.head.grow(num_classes)
    return network


@pytest.mark.parametrize("head", HEADS)
def test_logits_are_the_head_of_the_embedding(head):
    network = network_with(head).eval()
    images = torch.randn(4, 3, 8, 8)
    embedding = network.backbone(images).embedding
    expected = network.head.scale * network.head.similarities(network.head.embed(embedding))
    assert network(images).shape == (4, 3)
    torch.testing.assert_close(network(images), expected)


@pytest.mark.parametrize("head", HEADS)
def test_a_frozen_copy_never_changes(head):
    network = network_with(head).train()
    images = torch.randn(8, 3, 8, 8)
    copy = network.frozen_copy()
    assert network.training
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert not any(module.training for module in copy.modules())
    before, state = copy(images), {key: value.clone() for key, value in copy.state_dict().items()}

    optimiser = optim.SGD(network.parameters(), lr=0.1)
    network(images).square().mean().backward()
    optimiser.step()
    network.head.grow(2)

    assert torch.equal(copy(images), before)
    assert all(torch.equal(state[key], value) for key, value in copy.state_dict().items())
    assert copy.head.num_classes == 3
    assert network.head.num_classes == 5
    assert not torch.equal(network.eval()(images)[:, :3], before)


@pytest.mark.parametrize("head", HEADS)
def test_growing_keeps_the_old_classes_logits(head):
    network = network_with(head).eval()
    images = torch.randn(4, 3, 8, 8)
    before = network(images)
    network.head.grow(2, torch.Generator().manual_seed(0))
    assert (len(network.head.old), len(network.head.new)) == (3, 2)
    torch.testing.assert_close(network(images)[:, :3], before)


@pytest.mark.parametrize("head", HEADS)
def test_everything_is_in_the_state(head):
    network, other = network_with(head), network_with(head)
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            tensor.add_(1)
    other.load_state_dict(network.state_dict())
    images = torch.randn(4, 3, 8, 8)
    assert torch.equal(network.eval()(images), other.eval()(images))
