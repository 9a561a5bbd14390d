"""The kernels of a narrow ResNet against float64, each from what the one before it stored."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from ccfa.kernels import resnet
from ccfa.kernels.resnet import Run, branch_features, chain_features
from ccfa.models import BACKBONES
from ccfa.models.aggregation import KernelScaling, blended, two_branches
from ccfa.models.backbone import ChainBackbone
from ccfa.models.resnet import Block, PadShortcut, ResNet, as_branches, as_chain
from cuda_on_cpu import in_reverse

ROUNDING = 2**-8  # of a number stored in bfloat16
KNOWN = ["resnet32-podnet", "resnet32-pycil", "resnet32-ucir", "small"]
PROJECTED = {"resnet32-ucir": 2, "pads, then projects": 1}  # shortcuts
BRANCHED = [
    "branches of small",
    "branches of pads, then projects",
    *(pytest.param(f"branches of {name}", marks=pytest.mark.gpu) for name in ("resnet32-podnet", "resnet32-ucir")),
]


def backbone(name):
    """With batch norms that do something, and branches that differ."""
    torch.manual_seed(0)
    if name.startswith("branches of "):
        made = two_branches(backbone(name.removeprefix("branches of ")))
        for level in made.levels:
            level.blend.fill_(0.3)
    elif name in BACKBONES:
        made = BACKBONES[name](3)
    else:
        made = ResNet((16, 32, 64), (1, 1, 1), (1, 2, 2), shortcut="project", relu_after_sum="not-last")(3)
        made.levels[1][0].shortcut = PadShortcut(16, 2)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.3)
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            module.eps = 0.1
        if isinstance(module, KernelScaling):
            module.factors.data.uniform_(0.5, 1.5)
    return made


def features_of(made, batch):
    """By the kernels."""
    if levels := as_branches(made):
        return branch_features(levels, batch, blended)
    return chain_features(as_chain(made), batch)


@pytest.fixture
def device(device, monkeypatch):
    """Without a GPU batches are small: a block adds up the gradients of several images all the same."""
    for limit in ("MAX_SPLITS", "STEM_SPLITS") if device.type == "cpu" else ():
        monkeypatch.setattr(resnet, limit, 2)
    return device


def images(device, num, channels_last=True):
    """So many, or fewer where kernels are slow."""
    num = num if device.type == "cuda" else min(num, 5)
    made = torch.randn(num, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    return made.contiguous(memory_format=torch.channels_last) if channels_last else made


@pytest.mark.parametrize("name", BACKBONES)
def test_which_backbones_are_chains(name):
    chain = as_chain(BACKBONES[name](3))
    assert (chain is not None and chain.is_known) == (name in KNOWN)
    if chain:
        backbone = BACKBONES[name](3)
        ends = [sum(isinstance(part, Block) for part in level) for level in backbone.levels]
        assert [end + 1 for end in chain.ends] == [sum(ends[: i + 1]) for i in range(len(ends))]


@pytest.mark.parametrize("levels", [[nn.Conv2d(3, 8, 1)], [nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())]])
def test_backbones_of_other_parts_are_no_chains(levels):
    assert as_chain(ChainBackbone(levels, 8)) is None


class Other(nn.Sequential):
    """May do anything."""


def parametrised(made):
    weight_norm(made.levels[1][0].conv1)


def pruned(made):
    prune.random_unstructured(made.levels[1][0].shortcut[0], "weight", 0.5)


def observed(made):
    made.levels[1][0].shortcut.register_forward_hook(lambda module, given, output: 2 * output)


def wider(made):
    made.levels[1][1].conv2.dilation = made.levels[1][1].conv2.padding = (2, 2)


def of_another_class(made):
    made.levels[1] = Other(*made.levels[1])


@pytest.mark.parametrize("change", [parametrised, pruned, observed, wider, of_another_class])
def test_what_somebody_has_changed_is_left_to_torch(change):
    made = BACKBONES["resnet32-ucir"](3)
    assert as_chain(made) is not None
    change(made)
    assert as_chain(made) is None


@pytest.mark.parametrize("first", [[], [nn.ReLU()], [Block(16, 16, 1, "pad", relu=False)]])
def test_levels_without_a_stem_are_no_chains(first):
    levels = [nn.Sequential(*first), nn.Sequential(Block(16, 16, 1, "pad", relu=False))]
    assert as_chain(ChainBackbone(levels, 16)) is None


def trains_its_kernels(made):
    made.levels[1].stable[0].conv1.parametrizations.weight.original.requires_grad_()


def scales_twice(made):
    conv = made.levels[1].stable[0].conv1
    parametrize.register_parametrization(conv, "weight", KernelScaling(conv.weight.detach()))


@pytest.mark.parametrize("change", [trains_its_kernels, scales_twice])
def test_branches_whose_kernels_are_not_just_scaled_are_left_to_torch(change):
    made = backbone("branches of small")
    assert as_branches(made) is not None
    change(made)
    assert as_branches(made) is None


def blends_each_channel(made):
    made.levels[1].blend = torch.full((32, 1, 1), 0.5)


def lacks_a_level(made):
    del made.levels[1]


def learns_its_blend(made):
    made.levels[1].blend = nn.Parameter(made.levels[1].blend)


@pytest.mark.parametrize("change", [blends_each_channel, lacks_a_level, learns_its_blend])
def test_branches_that_the_kernels_cannot_compute_are_left_to_torch(device, change):
    made = backbone("branches of small").to(device).eval().requires_grad_(False)
    assert features_of(made, images(device, 2)) is not None
    change(made)
    assert features_of(made, images(device, 2)) is None


def test_scaled_kernels_may_lie_in_memory_in_any_order(device):
    made, batch = backbone("branches of small").to(device).eval().requires_grad_(False), images(device, 2)
    before = features_of(made, batch)[1]
    for module in made.modules():
        if isinstance(module, KernelScaling):
            module.factors.data = module.factors.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(features_of(made, batch)[1], before)


@pytest.mark.parametrize("blocks", [(0, 1, 1, 2), (1, 0, 1, 2)])
def test_empty_levels_are_left_to_torch(blocks):
    made = ResNet((16, 16, 32, 64), blocks, (1, 1, 2, 2))(3)
    assert not as_chain(made).is_known


def test_a_batch_norm_without_parameters_is_left_to_torch(device):
    made = BACKBONES["resnet32-ucir"](3).to(device).eval().requires_grad_(False)
    made.levels[1][0].shortcut[1] = nn.BatchNorm2d(32, affine=False).to(device).eval()
    assert chain_features(as_chain(made), images(device, 2)) is None


def test_images_of_other_channels_are_left_to_torch(device):
    assert chain_features(as_chain(BACKBONES["small"](3).to(device)), images(device, 2)[:, :1]) is None


def test_without_a_gpu_no_kernel_is_used():
    chain = as_chain(BACKBONES["resnet32-podnet"](3))
    assert chain_features(chain, torch.zeros(2, 3, 32, 32)) is None


def near(found, expected, tolerance=ROUNDING):
    """Within the rounding of the largest numbers, and on average far below."""
    difference = (found.double() - expected).abs()
    assert (difference.max() / expected.abs().max()).item() <= tolerance
    assert (difference.mean() / expected.abs().mean()).item() <= 0.5 * tolerance


def wide(values):
    return values.double()[:, None, None]


def conv(unit, x, weight):
    return F.conv2d(x, weight, stride=unit.conv.stride, padding=unit.conv.padding)


def rounded_weight(unit):
    return unit.conv.weight.detach().bfloat16().double()


def check_result(run, index, before, x):
    """What one convolution and its batch norm make of what the convolution read; the batch norm's result."""
    unit, old = run.chain.all_units[index], before.all_units[index].norm
    y = conv(unit, x, rounded_weight(unit))
    near(run.results[index], y)
    mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
    near(run.moments[index][0], mean, 1e-4)
    near(run.moments[index][1], (variance + unit.norm.eps).rsqrt(), 1e-4)
    count = y.numel() / y.shape[1]
    near(unit.norm.running_mean, 0.9 * old.running_mean.double() + 0.1 * mean, 1e-5)
    near(unit.norm.running_var, 0.9 * old.running_var.double() + 0.1 * variance * count / (count - 1), 1e-5)
    assert unit.norm.num_batches_tracked == old.num_batches_tracked + 1
    scale = unit.norm.weight.detach().double() * run.moments[index][1].double()
    stored = run.results[index].double()
    return wide(scale) * (stored - wide(run.moments[index][0])) + wide(unit.norm.bias.detach())


def check_gradients(run, index, given, x, found):
    """Those of one convolution and its batch norm, from that of their result; the gradient of what was read."""
    units, unit, moments = run.chain.all_units, run.chain.all_units[index], run.moments[index].double()
    normal = (run.results[index].double() - wide(moments[0])) * wide(moments[1])
    of_bias, of_weight = given.sum((0, 2, 3)), (given * normal).sum((0, 2, 3))
    near(found[len(units) + 2 * index], of_weight, 0.03)  # the kernel adds numbers that are not rounded yet
    near(found[len(units) + 2 * index + 1], of_bias, 0.03)
    count = given.numel() / given.shape[1]
    factor = wide(unit.norm.weight.detach().double() * moments[1])
    of_y = factor * (given - wide(of_bias / count) - normal * wide(of_weight / count))
    if index:
        near(run.of_results[index], of_y)
        of_y = run.of_results[index]
    of_y = of_y.bfloat16().double()  # the stem's is not stored
    x, weight = x.detach().requires_grad_(), rounded_weight(unit).requires_grad_()
    of_x, of_w = torch.autograd.grad(conv(unit, x, weight), (x, weight), of_y)
    assert found[index].shape == unit.conv.weight.shape
    near(found[index], of_w, 1e-2)
    return of_x


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", [*KNOWN, "pads, then projects"])
def test_each_kernel_of_a_training_step_against_float64(device, name, channels_last):
    chain, batch = as_chain(backbone(name).to(device)), images(device, 24, channels_last)
    before = copy.deepcopy(chain)
    run = Run(chain, batch)
    *maps, embedding = run.forward()
    last = len(chain.units) - 1
    read = [batch.bfloat16().double()]  # by each convolution
    for index in range(last + 1):
        value = check_result(run, index, before, read[index])
        if index % 2 == 0 and index:
            shortcut = run.made[index - 2].double()
            if index - 1 in chain.projected:
                place = chain.projected[index - 1]
                near(run.made[place], check_result(run, place, before, shortcut))
                value += run.made[place].double()
            else:
                halves = shortcut.shape[1] < value.shape[1]
                value += F.pad(shortcut[:, :, ::2, ::2], (0, 0, 0, 0, 0, shortcut.shape[1])) if halves else shortcut
        if index % 2 or not index or chain.relu[index // 2 - 1]:
            value = value.relu()
        near(run.made[index], value)
        read.append(run.made[index].double())
    near(embedding, value.mean((2, 3)), 1e-4)
    assert [tuple(level.shape) for level in maps] == [tuple(run.made[2 * end + 2].shape) for end in chain.ends]

    assert len(chain.projected) == PROJECTED.get(name, 0)
    torch.manual_seed(2)
    of_maps = [torch.randn_like(level) for level in maps]
    of_maps[1] = None
    of_embedding = torch.randn_like(embedding)
    of_images, found = run.gradients_of(of_maps, of_embedding)
    assert of_images is None
    external = dict(zip((end + 1 for end in chain.ends), of_maps, strict=True))
    gradients = run.gradients
    first = of_maps[-1].double() + of_embedding.double()[:, :, None, None] / 64
    near(gradients[last], first * (run.made[-1] > 0) if chain.relu[-1] else first)
    for index in range(last, -1, -1):
        of_x = check_gradients(run, index, gradients[index].double(), read[index], found)
        if not index:
            break
        if index % 2:  # the trunk: from the shortcut, and from outside
            place, later = index // 2, gradients[index + 1].double()
            if index in chain.projected:
                of_x += check_gradients(run, chain.projected[index], later, read[index], found).bfloat16().double()
            elif later.shape[1] > of_x.shape[1]:
                of_x[:, :, ::2, ::2] += later[:, : of_x.shape[1]]
            else:
                of_x += later
            if external.get(place) is not None:
                of_x += external[place].double()
            rectified = place == 0 or chain.relu[place - 1]
            of_x = of_x * (read[index] > 0) if rectified else of_x
        else:
            of_x = of_x * (read[index] > 0)
        near(gradients[index - 1], of_x)


@pytest.mark.parametrize("num", [2, 130, pytest.param(7, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [*KNOWN, "pads, then projects", *BRANCHED])
def test_evaluation_against_float64(device, name, num):
    made, batch = backbone(name).eval().to(device).requires_grad_(False), images(device, num)
    before = copy.deepcopy(made.state_dict())
    with torch.no_grad():
        found, embedding = features_of(made, batch)
        assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
        expected = copy.deepcopy(made).double()(batch.double())
        with torch.autocast(device.type, torch.bfloat16):
            usual = made(batch)
    for one, other, third in zip(found, expected.maps, usual.maps, strict=True):
        error, usual_error = ((each.double() - other).norm() / other.norm() for each in (one, third))
        assert error < max(0.02, 1.2 * usual_error)
    assert (embedding.double() - expected.embedding).norm() < 0.02 * expected.embedding.norm()


@pytest.mark.parametrize("num", [2, 101, *(pytest.param(num, marks=pytest.mark.gpu) for num in (100, 128))])
@pytest.mark.parametrize("name", ["resnet32-podnet", "resnet32-ucir", *BRANCHED])
def test_gradients_are_as_near_to_float64_as_torchs(device, name, num):
    made = backbone(name).to(device)
    batch, generator = images(device, num), torch.Generator(device).manual_seed(3)

    def loss(maps, embedding):
        generator.manual_seed(3)
        parts = [*maps, embedding]
        factors = [torch.randn(part.shape, generator=generator, device=device) for part in parts]
        return sum((part.float() * factor).mean() for part, factor in zip(parts, factors, strict=True))

    def gradients(network, features):
        return torch.autograd.grad(loss(*features), list(network.parameters()))

    mine = gradients(made, features_of(made, batch))
    with in_reverse():
        again = gradients(made, features_of(made, batch))
    features = features_of(made, batch)
    for _ in range(2):  # the same from one forward pass
        parts = torch.autograd.grad(loss(*features), list(made.parameters()), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(mine, parts, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(mine, again, strict=True))
    with torch.autocast(device.type, torch.bfloat16):
        usual = gradients(made, tuple(made(batch)))
    exact = copy.deepcopy(made).double()
    expected = gradients(exact, tuple(exact(batch.double())))
    errors = [
        [((one.double() - true).norm() / true.norm()).item() for one, true in zip(found, expected, strict=True)]
        for found in (mine, usual)
    ]
    assert sum(errors[0]) < 1.1 * sum(errors[1])
    assert all(one < 2 * other + 0.05 for one, other in zip(*errors, strict=True))
