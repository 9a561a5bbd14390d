import copy

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from ccfa.learning.acceleration import Acceleration
from ccfa.models import BACKBONES, ChainBackbone, CosineHead, Network
from ccfa.models.aggregation import FusedLevel, KernelScaling, scale_kernels, two_branches

FACTORS = {"resnet32-podnet": 51_248, "resnet32-ucir": 53_808}


def trained(name: str = "small") -> ChainBackbone:
    """A backbone whose every tensor differs from its start: zero-initialised residuals would hide the branches."""
    torch.manual_seed(0)
    backbone = BACKBONES[name](3)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    backbone(torch.randn(16, 3, 8, 8))  # moves the running statistics
    return backbone


def factors(backbone: ChainBackbone) -> list[nn.Parameter]:
    return [module.factors for module in backbone.modules() if isinstance(module, KernelScaling)]


@pytest.mark.parametrize("name", ["small", "resnet32-podnet", "resnet32-ucir", "resnet18-podnet"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("blend", [0.5, 0.3])
def test_equal_branches_are_the_plain_backbone_in_every_bit(name, training, blend):
    plain = trained(name).train(training)
    fused = two_branches(plain)
    for level in fused.levels:
        level.blend.fill_(blend)
    images = torch.randn(4, 3, 8, 8)
    expected, features = plain(images), fused(images)
    assert fused.training == training
    assert fused.dim == plain.dim
    assert torch.equal(features.embedding, expected.embedding)
    assert all(map(torch.equal, features.maps, expected.maps))
    for key, value in plain.named_buffers():
        level, rest = key.removeprefix("levels.").split(".", 1)
        for branch in ("stable", "plastic"):
            assert torch.equal(fused.get_buffer(f"levels.{level}.{branch}.{rest}"), value)


@pytest.mark.parametrize("name", FACTORS)
def test_one_factor_for_each_kernel(name):
    fused = two_branches(BACKBONES[name](3))
    assert sum(factor.numel() for factor in factors(fused)) == FACTORS[name]
    assert all(torch.equal(factor, torch.ones_like(factor)) for factor in factors(fused))


@pytest.mark.parametrize("learn_blend", [False, True])
def test_what_trains(learn_blend):
    plain = trained()
    fused = two_branches(plain, learn_blend)
    norms = sum(p.numel() for m in plain.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    plastic = sum(p.numel() for p in plain.parameters())
    scalings = sum(factor.numel() for factor in factors(fused))
    blends = len(fused.levels) if learn_blend else 0
    assert sum(p.numel() for p in fused.parameters()) == plastic + norms + scalings + blends
    assert all(p.requires_grad and p.is_leaf for p in fused.parameters())


def test_training_leaves_the_stable_kernels_alone():
    fused = two_branches(trained())
    before = {key: value.clone() for key, value in fused.state_dict().items()}
    optimiser = torch.optim.SGD(fused.parameters(), lr=0.1, weight_decay=0.1)
    fused(torch.randn(8, 3, 8, 8)).embedding.square().sum().backward()
    optimiser.step()
    kept = {key for key, value in fused.state_dict().items() if torch.equal(value, before[key])}
    kernels = {key for key in before if key.endswith("parametrizations.weight.original")}
    assert len(kernels) == 7
    assert kept == kernels | {key for key in before if key.endswith("blend")}


def test_a_level_is_the_weighted_sum_of_its_branches():
    level = FusedLevel(nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.Buffer(torch.tensor(0.3)))
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(level(x), 0.3 * level.stable(x) + 0.7 * level.plastic(x))


def test_both_branches_of_a_level_read_the_fused_map_below():
    fused = two_branches(trained()).eval()
    with torch.no_grad():
        for factor in factors(fused):
            factor.mul_(1.5)
    images = torch.randn(2, 3, 8, 8)
    maps = fused(images).maps
    for level, x, fused_map in zip(fused.levels, (images, *maps), maps, strict=False):
        torch.testing.assert_close(fused_map, (level.stable(x) + level.plastic(x)) / 2)


def test_scaling_acts_on_each_kernel():
    layer = nn.Conv2d(2, 3, 3, bias=False)
    kernels = layer.weight.detach().clone()
    scale_kernels(layer)
    ((_, factors),) = layer.named_parameters()
    with torch.no_grad():
        factors[1, 0] = -2.0
    kernels[1, 0] *= -2.0
    assert torch.equal(layer.weight, kernels)


def test_the_backbone_given_stays_as_it_was():
    plain = trained()
    untouched = copy.deepcopy(plain.state_dict())
    fused = two_branches(plain)
    with torch.no_grad():
        for tensor in [*fused.parameters(), *fused.buffers()]:
            tensor.add_(1)
    assert plain.state_dict().keys() == untouched.keys()
    assert all(torch.equal(value, untouched[key]) for key, value in plain.state_dict().items())


def test_a_frozen_copy_and_a_stored_state_give_the_same_output():
    network = Network(two_branches(trained()), CosineHead(64))
    network.head.grow(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    images = torch.randn(4, 3, 8, 8)
    copied = network.frozen_copy()
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    stored = load(save({key: value.contiguous() for key, value in network.state_dict().items()}))  # no shared tensors
    other = Network(two_branches(BACKBONES["small"](3)), CosineHead(64))
    other.head.grow(3)
    other.load_state_dict({**stored, "head.old": other.head.old})
    expected = network.eval()(images)
    assert torch.equal(copied(images), expected)
    assert torch.equal(other.eval()(images), expected)


def test_placement_and_memory_layout():
    plain = trained()
    for parameter in plain.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    fused = two_branches(plain)
    network = Acceleration().place(Network(fused, CosineHead(64)), torch.device("cpu"))
    for module in network.backbone.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.is_leaf for parameter in network.backbone.parameters())
