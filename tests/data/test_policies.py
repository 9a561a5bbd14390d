"""AutoAugment, TrivialAugment and Cutout: pixel for pixel what torchvision does with Pillow images."""

import importlib
import math

import numpy as np
import pytest
import torch
from PIL import Image

from ccfa.data import CIFAR100_UCIR, Transforms
from ccfa.data.policies import OPERATIONS, POLICIES, autoaugment, cut_out, draw_operations, operated, trivial
from ccfa.errors import UsageError
from ccfa.experiments import Experiment
from ccfa.experiments.experiment import experiment_method
from ccfa.methods import METHODS
from timm_models import torchvision_or_skip
from toys import TOY, seeded


@pytest.fixture(scope="module")
def torchvision():
    """torchvision's policies."""
    torchvision_or_skip()
    return importlib.import_module("torchvision.transforms.autoaugment")


def named_there(name):
    """An operation's name in torchvision, such as TranslateX."""
    return "".join(word.capitalize() for word in name.split("-"))


SIGNED = [
    name for name in OPERATIONS if name.startswith(("shear", "translate", "rotate", "bright", "col", "con", "sh"))
]


def pictures(channels, height, width):
    """Noise, one value, two values, few values, and a ramp."""
    images = torch.randint(0, 256, (6, channels, height, width), dtype=torch.uint8, generator=seeded(3))
    images[1] = 77
    images[2] = 200 - 150 * (images[2] > 99).to(torch.uint8)
    images[3] = images[3] // 8 + 100
    images[4] = torch.linspace(0, 255, height * width).view(height, width)
    return images


def magnitudes(name, height, width):
    found = {
        one.magnitude
        for policy in POLICIES.values()
        for pair in policy(height, width)
        for one in pair
        if one.name == name
    }
    return sorted(found | {-magnitude for magnitude in found if name in SIGNED})


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 5, 8), (1, 2, 3)], ids=str)
def test_operations_are_torchvisions(torchvision, name, shape):
    strengths = magnitudes(name, *shape[1:])
    images = pictures(*shape).repeat(len(strengths), 1, 1, 1)
    each = torch.tensor(strengths, dtype=torch.float64).repeat_interleave(6)
    results = OPERATIONS[name](images, each).permute(0, 2, 3, 1).numpy()
    for found, image, strength in zip(results, images.permute(0, 2, 3, 1).numpy(), each.tolist(), strict=True):
        picture = Image.fromarray(image.squeeze(2) if shape[0] == 1 else image)
        nearest = torchvision.InterpolationMode.NEAREST
        expected = torchvision._apply_op(picture, named_there(name), strength, nearest, None)
        message = f"magnitude {strength}"
        np.testing.assert_array_equal(found, np.asarray(expected).reshape(found.shape), err_msg=message)


def test_each_image_gets_its_operations_in_turn():
    images = pictures(3, 8, 8)[[0] * 15]
    numbers = torch.stack([torch.arange(15), torch.arange(15).flip(0)], dim=1)
    strengths = torch.linspace(0.2, 3, 30, dtype=torch.float64).view(15, 2)
    operations = list(OPERATIONS.values())
    for place, found in enumerate(operated(images, numbers, strengths)):
        one = slice(place, place + 1)
        expected = operations[place](images[one], strengths[one, 0])
        assert torch.equal(found, operations[14 - place](expected, strengths[one, 1])[0])


def test_autoaugment_is_torchvisions(torchvision):
    policy = torchvision.AutoAugment(torchvision.AutoAugmentPolicy.CIFAR10)
    levels = policy._augmentation_space(10, (24, 32))
    pairs = list(autoaugment(24, 32))
    assert len(pairs) == len(policy.policies) == 25
    for ours, theirs in zip(pairs, policy.policies, strict=True):
        for one, (name, probability, level) in zip(ours, theirs, strict=True):
            magnitudes, is_signed = levels[name]
            magnitude = 0.0 if level is None else float(magnitudes[level])
            assert (named_there(one.name), one.probability) == (name, probability)
            assert (one.magnitude, one.name in SIGNED) == (pytest.approx(magnitude), is_signed)


def test_trivial_augment_is_torchvisions(torchvision):
    levels = torchvision.TrivialAugmentWide()._augmentation_space(31)
    ours = {}
    for ((name, probability, magnitude),) in trivial(32, 32):
        assert probability == 1
        ours.setdefault(name, []).append(magnitude)
    assert {named_there(name) for name in ours} == levels.keys()
    for name, found in ours.items():
        magnitudes, is_signed = levels[named_there(name)]
        assert found == pytest.approx(magnitudes.expand(31).tolist())
        assert is_signed == (name in SIGNED)


def test_draws_have_the_policys_frequencies():
    num = 20000
    numbers, strengths = draw_operations("autoaugment", num, 32, 32, seeded())
    names = list(OPERATIONS)
    pairs = list(autoaugment(32, 32))
    for place in (0, 1):
        for number, name in enumerate(names[1:], start=1):
            expected = sum(pair[place].probability for pair in pairs if pair[place].name == name) / len(pairs)
            share = (numbers[:, place] == number).double().mean().item()
            assert abs(share - expected) < 5 * math.sqrt(0.25 / num)
    turned = strengths[:, 0][numbers[:, 0] == names.index("rotate")]
    assert turned.abs().unique().tolist() == pytest.approx([20 / 3])
    assert 0.4 < (turned > 0).double().mean() < 0.6
    solarized = strengths[numbers == names.index("solarize")]
    assert (solarized > 0).all()
    numbers, _ = draw_operations("trivial", num, 32, 32, seeded())
    assert (numbers[:, 0].bincount(minlength=15)[:14] / num - 1 / 14).abs().max() < 5 * math.sqrt(0.07 / num)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (4, 3), (5, 6), (2, 0)])
def test_a_square_is_cut_out(row, column):
    images = torch.ones(1, 3, 6, 7)
    expected = np.ones((3, 6, 7))
    expected[:, max(0, row - 2) : row + 2, max(0, column - 2) : column + 2] = 0
    np.testing.assert_array_equal(cut_out(images, torch.tensor([[row, column]]), 4)[0].numpy(), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_act_in_training_alone_and_after_the_crop(policy):
    images = pictures(3, 8, 8)
    transforms = Transforms(TOY.mean, TOY.std, padding=1, flip=True, policy=policy, cutout=2)
    assert torch.equal(transforms.test(images), TOY.test(images))
    one, same, other = (transforms.train(images, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    draws = transforms.draw(len(images), seeded(), 8, 8)
    plain = Transforms((0, 0, 0), (1, 1, 1), padding=1, flip=True)
    cropped = (255 * plain.drawn(images, draws._replace(operations=None, centres=None))).round().to(torch.uint8)
    expected = transforms.test(operated(cropped, draws.operations, draws.magnitudes))
    assert torch.equal(one, cut_out(expected, draws.centres, 2))


def test_options_reach_the_transforms():
    method = experiment_method(Experiment("ucir", data="cifar100", options={"policy": "trivial", "cutout": "8"}))
    assert (method.transforms.policy, method.transforms.cutout) == ("trivial", 8)
    assert method.transforms.std == CIFAR100_UCIR.std
    assert METHODS["podnet"](transforms=Transforms((0.5,), (0.5,), cutout=3)).transforms.cutout == 3
    with pytest.raises(UsageError, match="autoaugment"):
        experiment_method(Experiment("ucir", options={"policy": "auto"}))
    with pytest.raises(UsageError, match="trivial"):
        METHODS["podnet"](policy="trivia")
