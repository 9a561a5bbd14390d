import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ccfa.models import BACKBONES
from ccfa.models.resnet import Block, ResNet


@pytest.mark.parametrize(
    ("name", "num_parameters", "size", "maps"),
    [
        ("resnet32-podnet", 463_504, 32, [(16, 32), (32, 16), (64, 8), (64, 8)]),
        ("resnet32-ucir", 466_256, 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet32-pycil", 463_504, 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet32-gdumb", 466_256, 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet18-podnet", 11_168_832, 64, [(64, 32), (128, 16), (256, 8), (512, 4)]),  # half the side after the stem
        # The usual ResNet-18's 11,689,512 parameters without its classifier's 513,000.
        ("resnet18-ucir", 11_176_512, 64, [(64, 16), (128, 8), (256, 4), (512, 2)]),
        ("resnet18-il2a", 11_168_832, 32, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet18-cifar", 11_168_832, 32, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("small", 74_640, 8, [(16, 8), (32, 4), (64, 2)]),
    ],
)
def test_published_sizes(name, num_parameters, size, maps):
    backbone = BACKBONES[name](3)
    assert sum(parameter.numel() for parameter in backbone.parameters()) == num_parameters
    features = backbone(torch.randn(2, 3, size, size))
    assert [tuple(level.shape) for level in features.maps] == [(2, channels, side, side) for channels, side in maps]
    assert features.embedding.shape == (2, backbone.dim) == (2, maps[-1][0])
    np.testing.assert_allclose(
        features.embedding.detach(), features.maps[-1].detach().numpy().mean(axis=(2, 3)), atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "relu", "rectified", "eps"),
    [
        ("resnet32-podnet", [False] * 15, False, 1e-5),
        ("resnet32-ucir", [True] * 14 + [False], False, 1e-5),
        ("resnet32-pycil", [True] * 15, False, 1e-5),
        ("resnet32-gdumb", [False] * 15, True, 1e-6),
        ("resnet18-podnet", [True, False] * 4, False, 1e-5),
        ("resnet18-ucir", [True] * 7 + [False], False, 1e-5),
        ("resnet18-il2a", [True] * 8, False, 1e-5),
        ("resnet18-cifar", [True] * 8, False, 1e-5),
    ],
)
def test_where_relu_follows(name, relu, rectified, eps):
    modules = list(BACKBONES[name](3).modules())
    blocks = [module for module in modules if isinstance(module, Block)]
    assert [block.relu for block in blocks] == relu
    assert {block.rectified for block in blocks} == {rectified}
    assert {module.eps for module in modules if isinstance(module, nn.BatchNorm2d)} == {eps}
    starts_at_zero = name.endswith(("podnet", "cifar"))
    assert all(bool((block.norm2.weight == 0).all()) == starts_at_zero for block in blocks)
    assert all(bool((block.norm1.weight == 1).all()) for block in blocks)


def test_zero_branches_leave_the_stem_subsampled_and_padded():
    backbone = BACKBONES["small"](3).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        stem = F.relu(F.conv2d(images, backbone.levels[0][0].weight, padding=1) / (1 + 1e-5) ** 0.5).numpy()
        features = backbone(images)
    expected = np.zeros((2, 64, 2, 2))
    expected[:, :16] = stem[:, :, ::4, ::4]
    np.testing.assert_allclose(features.maps[2], expected, atol=1e-5)


@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_block_is_the_sum_of_shortcut_and_branch(relu, rectified):
    torch.manual_seed(0)
    block = Block(4, 6, 2, "project", relu, rectified).eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        branch = block.norm2(block.conv2(block.norm1(block.conv1(x)).clamp(min=0)))
        shortcut = block.shortcut[1](F.conv2d(x[:, :, ::2, ::2], block.shortcut[0].weight))
        total = branch.clamp(min=0) + shortcut.clamp(min=0) if rectified else branch + shortcut
        torch.testing.assert_close(block(x), total.clamp(min=0) if relu else total)


def test_convolutions_start_kaiming_normal_by_fan_out():
    torch.manual_seed(0)
    weight = ResNet((64,), (2,), (1,))(3).levels[0][-1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)
