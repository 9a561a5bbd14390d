import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ccfa.models import BACKBONES
from ccfa.models.resnet import Block, PadShortcut, RectifiedBlock, ResNet


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet32-podnet", 463_504),
        ("resnet32-ucir", 466_256),
        ("resnet32-gdumb", 466_256),
        ("resnet18-podnet", 11_168_832),
        ("resnet18-il2a", 11_168_832),
        ("resnet18-ucir", 11_176_512),  # the usual ResNet-18's 11,689,512 less its classifier's 513,000
    ],
)
def test_published_numbers_of_parameters(name, expected):
    assert num_parameters(BACKBONES[name](3)) == expected


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("resnet32-podnet", 32, [(16, 32), (32, 16), (64, 8), (64, 8)]),
        ("resnet32-ucir", 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet32-gdumb", 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet18-podnet", 64, [(64, 32), (128, 16), (256, 8), (512, 4)]),  # half the side after the stem
        ("resnet18-ucir", 64, [(64, 16), (128, 8), (256, 4), (512, 2)]),
        ("resnet18-il2a", 32, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("small", 8, [(16, 8), (32, 4), (64, 2)]),
    ],
)
def test_maps_and_embedding(name, size, expected):
    backbone = BACKBONES[name](3)
    features = backbone(torch.randn(2, 3, size, size))
    assert [tuple(maps.shape) for maps in features.maps] == [(2, channels, side, side) for channels, side in expected]
    assert features.embedding.shape == (2, backbone.dim) == (2, expected[-1][0])
    np.testing.assert_allclose(
        features.embedding.detach(), features.maps[-1].detach().numpy().mean(axis=(2, 3)), atol=1e-6
    )


def test_one_channel():
    assert BACKBONES["small"](1)(torch.zeros(3, 1, 8, 8)).embedding.shape == (3, 64)


def trained_once(name: str) -> nn.Module:
    """A backbone whose residual branches no longer start at 0."""
    torch.manual_seed(0)
    backbone = BACKBONES[name](3)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
    return backbone


def test_podnet_s_trunk_has_no_relu():
    features = trained_once("resnet32-podnet")(torch.randn(4, 3, 32, 32))
    assert all((maps < 0).float().mean() > 0.05 for maps in features.maps)
    assert (features.embedding < 0).any()


def test_ucir_s_trunk_has_relu_everywhere_but_at_the_end():
    features = trained_once("resnet32-ucir")(torch.randn(4, 3, 32, 32))
    assert [bool((maps < 0).any()) for maps in features.maps] == [False, False, True]


def test_gdumb_s_branches_end_in_relu_and_its_sums_do_not():
    backbone = trained_once("resnet32-gdumb")
    blocks = [module for module in backbone.modules() if isinstance(module, Block)]
    assert all(isinstance(block, RectifiedBlock) and not block.relu for block in blocks)
    assert {module.eps for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)} == {1e-6}
    features = backbone(torch.randn(4, 3, 32, 32))
    assert all(maps.min() >= 0 for maps in features.maps)
    assert features.embedding.min() > 0


def test_il2a_s_resnet18_has_relu_after_every_sum():
    backbone = trained_once("resnet18-il2a")
    assert all(module.relu for module in backbone.modules() if isinstance(module, Block))
    assert backbone(torch.randn(2, 3, 16, 16)).embedding.min() >= 0


def test_podnet_s_resnet18_has_relu_in_the_first_block_of_a_level():
    blocks = [module for module in BACKBONES["resnet18-podnet"](3).modules() if isinstance(module, Block)]
    assert [block.relu for block in blocks] == [True, False] * 4
    blocks = [module for module in BACKBONES["resnet18-ucir"](3).modules() if isinstance(module, Block)]
    assert [block.relu for block in blocks] == [True] * 7 + [False]


@pytest.mark.parametrize(("name", "starts_at_zero"), [("resnet32-podnet", True), ("resnet32-ucir", False)])
def test_residual_branches_start_at_zero(name, starts_at_zero):
    blocks = [module for module in BACKBONES[name](3).modules() if isinstance(module, Block)]
    assert len(blocks) == 15
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


def test_pad_shortcut():
    x = torch.arange(2.0 * 4 * 4).reshape(1, 2, 4, 4)
    expected = np.concatenate([x.numpy()[:, :, ::2, ::2], np.zeros((1, 3, 2, 2))], axis=1)
    np.testing.assert_array_equal(PadShortcut(3, 2)(x), expected)


@pytest.mark.parametrize("kind", [Block, RectifiedBlock])
@pytest.mark.parametrize("relu", [True, False])
def test_block_is_the_sum_of_shortcut_and_branch(relu, kind):
    torch.manual_seed(0)
    block = kind(4, 6, 2, "project", relu).eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        branch = block.norm2(block.conv2(block.norm1(block.conv1(x)).clamp(min=0)))
        shortcut = block.shortcut[1](F.conv2d(x[:, :, ::2, ::2], block.shortcut[0].weight))
        total = branch + shortcut if kind is Block else branch.clamp(min=0) + shortcut.clamp(min=0)
        torch.testing.assert_close(block(x), total.clamp(min=0) if relu else total)


def test_convolutions_start_kaiming_normal_by_fan_out():
    torch.manual_seed(0)
    weight = ResNet((64,), (2,), (1,))(3).levels[0][-1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)
