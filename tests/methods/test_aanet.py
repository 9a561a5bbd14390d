from dataclasses import replace

import pytest
import torch

from ccfa.data import CIFAR100_PODNET, CIFAR100_UCIR, split
from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.loop import optimise
from ccfa.methods import METHODS
from ccfa.methods.aanet import aanet, blends
from ccfa.methods.afc import afc
from ccfa.methods.baselines import joint
from ccfa.methods.podnet import podnet
from ccfa.methods.ucir import ucir
from ccfa.models.aggregation import FusedLevel
from toys import STAGES, Recorder, begun, learned, tiny

FIRST, SECOND = split(100, 50, 10)[:2]
BASES = {"aanet": podnet, "aanet-ucir": ucir, "aanet-afc": afc}
every_one = pytest.mark.parametrize("name", BASES)


def has_branches(learner: Learner) -> bool:
    return all(isinstance(level, FusedLevel) for level in learner.network.backbone.levels)


@every_one
def test_everything_else_is_the_method_s(name):
    method, base = METHODS[name](memory=7), BASES[name](memory=7)
    assert method.name == name
    assert method.transforms == (CIFAR100_UCIR if name == "aanet-ucir" else CIFAR100_PODNET)
    assert [str(term) for term in method.terms] == [str(term) for term in base.terms]
    assert (method.criterion, method.memory, method.needs_memory) == (base.criterion, base.memory, base.needs_memory)
    for stage in (FIRST, SECOND):
        assert method.phases(stage) == base.phases(stage)


def test_any_method_can_be_wrapped():
    assert aanet(METHODS["replay"]()).name == "aanet-replay"
    with pytest.raises(UsageError, match="AANet has no meaning for joint: it starts afresh"):
        aanet(joint())


@every_one
def test_two_branches_from_the_second_stage_on(name):
    learner = learned(tiny(name), 1)
    assert not has_branches(learner)
    learner.learn(STAGES[1])
    assert has_branches(learner)
    backbone = learner.network.backbone
    kernels = {k: v.clone() for k, v in backbone.state_dict().items() if k.endswith("weight.original")}
    learner.learn(STAGES[2])
    assert learner.network.backbone is backbone
    assert all(torch.equal(backbone.state_dict()[key], value) for key, value in kernels.items())


@every_one
def test_stable_kernels_are_the_first_stage_s(name):
    learner = learned(tiny(name), 3)
    state, initial = learner.network.backbone.state_dict(), learner.initial.backbone.state_dict()
    compared = 0
    for key, kernels in initial.items():
        if kernels.dim() == 4:
            level, rest = key.removeprefix("levels.").split(".", 1)
            layer = rest.removesuffix(".weight")
            assert torch.equal(state[f"levels.{level}.stable.{layer}.parametrizations.weight.original"], kernels)
            assert not torch.equal(state[f"levels.{level}.plastic.{rest}"], kernels)
            assert (state[f"levels.{level}.stable.{layer}.parametrizations.weight.0.factors"] != 1).any()
            compared += 1
    assert compared == 7
    assert all(level.blend.item() == 0.5 for level in learner.network.backbone.levels)


@every_one
def test_the_second_stage_starts_where_the_first_ended(name):
    learner = begun(tiny(name), STAGES[1])
    images = learner.method.transforms.test(learner.train.images[:20])
    learner.network.eval()
    assert torch.equal(learner.network.backbone(images).embedding, learner.previous.backbone(images).embedding)


@pytest.mark.parametrize(("name", "resets"), [("aanet", True), ("aanet-ucir", False), ("aanet-afc", True)])
def test_the_learned_scale_starts_again_once_on_podnet(name, resets):
    learner = begun(tiny(name), STAGES[1])
    learned_scale = learner.previous.head.scale.item()
    assert learned_scale != 1
    assert learner.network.head.scale.item() == (1 if resets else learned_scale)
    learner = begun(tiny(name, reset_scale=not resets), STAGES[1])
    assert learner.network.head.scale.item() == (learned_scale if resets else 1)
    learner = begun(tiny(name), STAGES[2])
    assert learner.network.head.scale.item() == learner.previous.head.scale.item() != 1


def blends_after(lr: float) -> tuple[Learner, Recorder]:
    recorder = Recorder()
    return learned(tiny("aanet", learn_blend=True, blend_lr=lr), 2, observer=recorder), recorder


def test_the_learned_blend_moves_between_the_epochs_only():
    learner, recorder = blends_after(0.1)
    assert len(blends(learner.network)) == len(learner.network.backbone.levels)
    assert all(blend.item() != 0.5 for blend in blends(learner.network))
    order = [(progress.stage.index, progress.phase) for progress, _, _ in recorder.epochs]
    later = ["main", "blend", "main", "blend", "balanced", "balanced"]
    assert order == [(0, "main")] * 2 + [(1, name) for name in later]
    assert {tuple(losses) for progress, losses, _ in recorder.epochs if progress.phase == "blend"} == {
        ("classification", "loss")
    }


def test_the_blend_phase_moves_the_blend_alone():
    learner = begun(tiny("aanet", learn_blend=True, blend_lr=0.1), STAGES[1])
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


def test_the_first_stage_has_no_blend_to_learn():
    method = METHODS["aanet"](learn_blend=True)
    assert method.phases(FIRST) == podnet().phases(FIRST)
    main, balanced = method.phases(SECOND)
    assert balanced == podnet().phases(SECOND)[1]
    assert replace(main, parameters=None, after_epoch=None) == replace(podnet().phases(SECOND)[0], parameters=None)
    blend = main.after_epoch
    assert (blend.epochs, blend.lr, blend.weight_decay) == (1, 1e-8, 5e-4)
    assert not blend.train_batch_norm
    assert not blend.use_terms


def test_a_learned_blend_needs_exemplars():
    aanet(ucir(memory=0))
    with pytest.raises(UsageError, match="exemplars"):
        aanet(ucir(memory=0), learn_blend=True)


def test_importance_follows_the_fused_maps():
    learner = learned(tiny("aanet-afc"), 2)
    (term,) = learner.terms
    assert [part.mean().item() for part in term.importance.split([16, 32, 64])] == pytest.approx([1] * 3, abs=1e-5)
