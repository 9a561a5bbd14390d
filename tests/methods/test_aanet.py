"""AANet: two branches as one backbone, and what it leaves to the method it wraps."""

import pytest
import torch
from torch import nn

from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.loop import optimise
from ccfa.methods import METHODS
from ccfa.methods.aanet import aanet, blends
from ccfa.models import BACKBONES, ChainBackbone, CosineHead, Network
from ccfa.models.aggregation import FusedLevel, KernelScaling, two_branches
from toys import STAGES, Recorder, begun, learned, tiny

BASES = {"aanet": "podnet", "aanet-ucir": "ucir", "aanet-afc": "afc"}
every_one = pytest.mark.parametrize("name", BASES)


def trained(name: str = "small") -> ChainBackbone:
    """A backbone whose every tensor differs from its start: zero-initialised residuals would hide the branches."""
    torch.manual_seed(0)
    backbone = BACKBONES[name](3)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    backbone(torch.randn(16, 3, 8, 8))  # moves the running statistics
    return backbone


def factors(backbone: nn.Module) -> list[nn.Parameter]:
    return [module.factors for module in backbone.modules() if isinstance(module, KernelScaling)]


@pytest.mark.parametrize("name", ["small", "resnet32-podnet", "resnet32-ucir"])
@pytest.mark.parametrize("training", [False, True])
def test_equal_branches_are_the_plain_backbone(name, training):
    plain = trained(name).train(training)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    fused = two_branches(plain)
    assert (fused.training, fused.dim) == (training, plain.dim)
    for level in fused.levels:
        level.blend.fill_(0.3)
    images = torch.randn(4, 3, 8, 8)
    features = fused(images)
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
    expected = plain(images)
    assert torch.equal(features.embedding, expected.embedding)
    assert all(map(torch.equal, features.maps, expected.maps))


@pytest.mark.parametrize(("name", "num_factors"), [("resnet32-podnet", 51_248), ("resnet32-ucir", 53_808)])
@pytest.mark.parametrize("learn_blend", [False, True])
def test_what_trains(name, num_factors, learn_blend):
    plain = BACKBONES[name](3)
    fused = two_branches(plain, learn_blend)
    norms = sum(p.numel() for m in plain.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    plastic = sum(p.numel() for p in plain.parameters())
    num_blends = len(fused.levels) if learn_blend else 0
    assert sum(p.numel() for p in fused.parameters()) == plastic + norms + num_factors + num_blends
    assert all(p.requires_grad and p.is_leaf for p in fused.parameters())
    assert all(torch.equal(factor, torch.ones_like(factor)) for factor in factors(fused))


def test_levels_fuse_scaled_and_plastic_maps():
    fused = two_branches(trained()).eval()
    plain_kernels = fused.levels[0].stable[0].weight.detach().clone()
    with torch.no_grad():
        for level in fused.levels:
            level.blend.fill_(0.3)
        for factor in factors(fused):
            factor[1, 0] = -2.0
    plain_kernels[1, 0] *= -2.0
    assert torch.equal(fused.levels[0].stable[0].weight, plain_kernels)
    images = torch.randn(2, 3, 8, 8)
    maps = fused(images).maps
    for level, x, fused_map in zip(fused.levels, (images, *maps), maps, strict=False):
        torch.testing.assert_close(fused_map, 0.3 * level.stable(x) + 0.7 * level.plastic(x))


def test_placement_and_memory_layout():
    plain = trained().to(memory_format=torch.channels_last)
    network = Acceleration().place(Network(two_branches(plain), CosineHead(64)), torch.device("cpu"))
    for module in network.backbone.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.is_leaf for parameter in network.backbone.parameters())


@every_one
def test_everything_else_is_the_method_s(name):
    method, base = METHODS[name](memory=7), METHODS[BASES[name]](memory=7)
    assert [str(term) for term in method.terms] == [str(term) for term in base.terms]
    for part in ("transforms", "criterion", "memory", "needs_memory", "prepare", "phases"):
        assert getattr(method, part) == getattr(base, part)


def test_any_method_can_be_wrapped():
    assert aanet(METHODS["replay"]()).name == "aanet-replay"
    with pytest.raises(UsageError, match="joint"):
        aanet(METHODS["joint"]())


def test_stable_kernels_are_the_first_stage_s():
    learner = learned(tiny("aanet", epochs=1), 1)
    assert not any(isinstance(level, FusedLevel) for level in learner.network.backbone.levels)
    for stage in STAGES[1:]:
        learner.learn(stage)
    state, initial = learner.network.backbone.state_dict(), learner.initial.backbone.state_dict()
    kernels = {key: value for key, value in initial.items() if value.dim() == 4}
    assert len(kernels) == 7
    for key, value in kernels.items():
        level, layer = key.removeprefix("levels.").removesuffix(".weight").split(".", 1)
        assert torch.equal(state[f"levels.{level}.stable.{layer}.parametrizations.weight.original"], value)
        assert not torch.equal(state[f"levels.{level}.plastic.{layer}.weight"], value)
        assert (state[f"levels.{level}.stable.{layer}.parametrizations.weight.0.factors"] != 1).any()
    assert all(level.blend.item() == 0.5 for level in learner.network.backbone.levels)


@pytest.mark.parametrize(("name", "resets"), [("aanet", True), ("aanet-ucir", False), ("aanet-afc", True)])
def test_the_second_stage_starts_where_the_first_ended(name, resets):
    learner = begun(tiny(name, epochs=1), STAGES[1])
    images = learner.method.transforms.test(learner.train.images[:20])
    learner.network.eval()
    assert torch.equal(learner.network.backbone(images).embedding, learner.previous.backbone(images).embedding)
    learned_scale = learner.previous.head.scale.item()
    assert learned_scale != 1
    assert learner.network.head.scale.item() == (1 if resets else learned_scale)
    learner.optimise()
    learner.conclude()
    learner.begin(STAGES[2])
    assert learner.network.head.scale.item() == learner.previous.head.scale.item() != 1


def test_the_learned_blend_moves_between_the_epochs():
    recorder = Recorder()
    learner = learned(tiny("aanet", learn_blend=True, blend_lr=0.1), 2, observer=recorder)
    assert all(blend.item() != 0.5 for blend in blends(learner.network))
    order = [(progress.stage.index, progress.phase) for progress, _, _ in recorder.epochs]
    later = ["main", "blend", "main", "blend", "balanced", "balanced"]
    assert order == [(0, "main")] * 2 + [(1, name) for name in later]


def test_the_blend_phase_moves_the_blend_alone():
    learner: Learner = begun(tiny("aanet", epochs=1, learn_blend=True, blend_lr=0.1), STAGES[1])
    main = learner.method.phases(STAGES[1])[0]
    assert not {id(p) for p in main.parameters(learner.network)} & {id(p) for p in blends(learner.network)}
    with torch.no_grad():  # branches that agree give the blend no gradient
        for parameter in learner.network.backbone.parameters():
            if parameter.dim() == 4:
                parameter.add_(0.1 * torch.randn_like(parameter))
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    optimise(learner, main.after_epoch, 0, 0)
    moved = {key for key, value in learner.network.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {f"backbone.levels.{level}.blend" for level in range(3)}


def test_a_learned_blend_needs_exemplars():
    ucir = METHODS["ucir"](memory=0)
    aanet(ucir)
    with pytest.raises(UsageError, match="exemplars"):
        aanet(ucir, learn_blend=True)
