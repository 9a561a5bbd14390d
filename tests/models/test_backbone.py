"""Any torch network as a backbone."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from ccfa.augmentation import CCFA
from ccfa.augmentation.mixing import ManifoldMixup
from ccfa.errors import UsageError
from ccfa.experiments.experiment import describe
from ccfa.learning import Learner
from ccfa.methods import METHODS, with_augmentation
from ccfa.methods.podnet import podnet
from ccfa.models import ChainBackbone, backbone_builder, register_backbone, wrap
from toys import STAGES, TOY, Shortened, toy_images


class ToyNet(nn.Module):
    """Somebody's CNN: two stages of convolutions and a pooled output."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 10, 3, stride=2, padding=1), nn.BatchNorm2d(10))

    def forward(self, x):
        return self.body(self.stem(x)).mean(dim=(2, 3))


def wrapped_toy(channels):
    return wrap(ToyNet(channels), ["stem", "body"])


@pytest.mark.parametrize("name", ["podnet", "ucir", "afc"])
def test_methods_train_on_a_wrapped_network(name):
    method = METHODS[name](backbone=wrapped_toy, transforms=TOY, memory=3, lr=0.05)
    method = replace(method, phases=Shortened(method.phases, epochs=1))
    method = with_augmentation(method, CCFA(count=2, steps=2))
    learner = Learner(method, toy_images())
    for stage in STAGES[:2]:
        learner.learn(stage)
    assert learner.network.backbone.dim == 10
    test = toy_images(seed=1)
    assert set(learner.predict(test.images).tolist()) <= {0, 1, 2, 3}
    assert json.dumps(describe(method))
    assert describe(method.backbone) == "wrapped_toy"


def test_features_of_a_wrapped_network():
    net, images = ToyNet().eval(), torch.randn(2, 3, 8, 8)
    features = wrap(net, ["stem", "body"])(images)
    assert torch.equal(features.maps[0], net.stem(images))
    assert torch.equal(features.maps[1], net.body(net.stem(images)))
    assert torch.equal(features.embedding, net(images))
    without_pooling = wrap(nn.Sequential(net.stem, net.body), ["0"], dim=10)
    assert torch.equal(without_pooling(images).embedding, net(images))
    assert not net.stem._forward_hooks


def test_a_module_is_copied_with_its_weights():
    module = wrapped_toy(3)
    method = podnet(backbone=module)
    first, second = method.backbone(3), method.backbone(3)
    assert first is not second is not module
    assert torch.equal(first.module.stem[0].weight, module.module.stem[0].weight)
    assert describe(method.backbone) == "ToyNet[stem, body]"


def test_manifold_mixup_in_a_wrapped_network():
    chain = ChainBackbone([ToyNet().stem, ToyNet().body, nn.Identity()], 10).eval()
    wrapped = wrap(nn.Sequential(*chain.levels), ["0", "1", "2"]).eval()
    images, generator = torch.randn(4, 3, 8, 8), torch.Generator().manual_seed(0)
    for _ in range(6):
        mixing = ManifoldMixup()(images, torch.arange(4), STAGES[0], generator).mixing
        torch.testing.assert_close(wrapped(images, mixing).embedding, chain(images, mixing).embedding)
    with pytest.raises(UsageError, match="2"):
        wrap(chain.levels[0], ["0"])(images, mixing)


@pytest.mark.parametrize(
    ("module", "levels", "told"),
    [
        (ToyNet(), ["stm"], "stem"),
        (ToyNet(), [], "levels"),
        (ToyNet(), "stem", "levels"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)), ["1"], r"\(1, 4, 900\)"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)), ["0"], "output"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 2)), ["0"], "`dim`"),
    ],
    ids=str,
)
def test_what_cannot_be_wrapped(module, levels, told):
    with pytest.raises(UsageError, match=told):
        wrap(module, levels)


@pytest.mark.parametrize("backbone", [5, None, ToyNet(), ToyNet], ids=["number", "none", "module", "builder"])
def test_wrong_backbones_are_refused(backbone):
    with pytest.raises(UsageError, match="backbone"):
        Learner(podnet(backbone=backbone), toy_images())


def test_a_replaced_backbone_may_be_a_wrapped_module():
    with pytest.raises(UsageError, match=r"ccfa\.wrap"):
        Learner(replace(podnet(), backbone=nn.Sequential(nn.Conv2d(3, 4, 3))), toy_images())
    learner = Learner(replace(podnet(), backbone=wrapped_toy(3)), toy_images())
    assert learner.network.backbone.dim == wrapped_toy(3).dim


def test_aanet_needs_a_chain_of_levels():
    learner = Learner(METHODS["aanet"](backbone=wrapped_toy, transforms=TOY), toy_images())
    with pytest.raises(UsageError, match="ChainBackbone"):
        learner.learn(STAGES[0])


def test_backbones_by_name():
    assert register_backbone("toy")(wrapped_toy) is wrapped_toy is backbone_builder("toy")
    with pytest.raises(UsageError, match="'toy'"):
        register_backbone("toy")(print)
    with pytest.raises(UsageError, match="'resnet32-podnet'"):
        backbone_builder("resnet32-podnett")
