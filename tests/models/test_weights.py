"""Weights from a file: prefixes, classifiers, other networks, and files that hold more than tensors."""

import hashlib
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ccfa.errors import ModelError, UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.experiments.experiment import experiment_method
from ccfa.files import write_tensors
from ccfa.learning import Learner
from ccfa.methods import METHODS, Method, register_method
from ccfa.models import BACKBONES, load_weights, with_weights, wrap
from ccfa.models.pretrained import untrained
from toys import STAGES, tiny, toy_images

SMALL = BACKBONES["small"]


def small(seed=0):
    torch.manual_seed(seed)
    return SMALL(3)


def named(prefix, extra=()):
    """The weights of a small backbone with names as in somebody's file, and tensors of other names."""
    weights = {prefix + name: tensor for name, tensor in small(seed=1).state_dict().items()}
    return weights | {name: torch.zeros(2) for name in extra}


def same(first, second):
    second = second.state_dict()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.state_dict().items())


def saved(path, content):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", named("")),
        ("a.safetensors", named("module.", ["module.fc.weight", "module.fc.bias"])),
        ("a.safetensors", named("network.backbone.", ["network.head.proxies", "network.head.scale"])),
        ("a.pth", named("backbone.", ["head.fc.weight"])),
        ("a.pt", {"state_dict": named("model.encoder."), "epoch": 3}),
        ("a.bin", {"model": named("", ["classifier.weight"]), "optimizer": {"lr": 0.1}}),
        ("a.pth", {name: tensor for name, tensor in named("").items() if "num_batches" not in name}),
    ],
    ids=["plain", "parallel", "model folder", "classifier", "checkpoint", "model", "old"],
)
def test_weights_are_found_under_any_prefix(tmp_path, name, content):
    path = saved(tmp_path / name, content)
    backbone = small()
    assert not same(backbone, small(seed=1))
    loaded = load_weights(backbone, path)
    assert same(backbone, small(seed=1))
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    given = content.get("state_dict", content.get("model", content))
    assert loaded.num_tensors == sum("fc" not in one and "head" not in one and "classifier" not in one for one in given)


def test_a_linked_file_is_read(tmp_path):
    saved(tmp_path / "blob.safetensors", named(""))
    (tmp_path / "link.safetensors").symlink_to("blob.safetensors")
    assert load_weights(small(), tmp_path / "link.safetensors").num_tensors == 42


def test_the_network_of_a_stage_fits(tmp_path):
    learner = Learner(tiny("podnet"), toy_images())
    learner.learn(STAGES[0])
    write_tensors(tmp_path / "stage.safetensors", learner.network.state_dict(), {"stage": 0})
    backbone = small()
    load_weights(backbone, tmp_path / "stage.safetensors")
    assert same(backbone, learner.network.backbone)


def test_wrapped_modules_take_weights_too(tmp_path):
    def net():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))

    source, backbone = net(), wrap(net(), ["0", "1"])
    path = saved(tmp_path / "net.safetensors", source.state_dict())
    assert load_weights(backbone, path).num_tensors == 4
    assert same(source, backbone.module)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "Missing"),
        ({"conv1.weight": torch.zeros(2)}, "conv1.weight"),
        ({**named(""), "layer9.weight": torch.zeros(2)}, "layer9.weight"),
        ({name: tensor for name, tensor in named("").items() if name != "levels.0.0.weight"}, r"levels\.0\.0\.weight"),
        ({name: tensor[..., None] for name, tensor in named("").items()}, r"\(16, 3, 3, 3, 1\) instead of"),
    ],
    ids=["empty", "others", "surplus", "missing", "shape"],
)
def test_weights_of_another_network_are_refused(tmp_path, content, told):
    backbone = small()
    with pytest.raises(ModelError, match=told):
        load_weights(backbone, saved(tmp_path / "a.safetensors", content))
    assert same(backbone, small())


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("kind", ["pickle", "torch", "module"])
def test_files_that_hold_code_are_refused(tmp_path, kind):
    path = tmp_path / "a.pt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"weight": Harmful()}))
    else:
        torch.save({"weight": Harmful()} if kind == "torch" else nn.Linear(2, 2), path)
    with pytest.raises(ModelError, match="safetensors"):
        load_weights(small(), path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", b""),
        ("a.safetensors", b"\xff" * 100),
        ("a.pt", b"PK\x03\x04 not a zip"),
        ("a.pt", torch.zeros(2)),
        ("a.pt", {"state_dict": 5}),
        ("a.pt", {"state_dict": {"a": 5}}),
    ],
)
def test_damaged_and_strange_files_are_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ModelError, match=name):
        load_weights(small(), path)


@pytest.mark.parametrize(
    ("weights", "kind", "told"),
    [
        ("pretrained", UsageError, "timm:NAME"),
        ("weights.h5", UsageError, ".safetensors"),
        ("missing.safetensors", ModelError, "missing.safetensors"),
        (".", UsageError, "pretrained"),
    ],
)
def test_weights_that_are_not_there(weights, kind, told):
    with pytest.raises(kind, match=told):
        resolve(Experiment("finetune", weights=weights))


def test_experiments_start_from_a_file(tmp_path):
    gray = SMALL(1)
    path = saved(tmp_path / "mine.safetensors", gray.state_dict())
    experiment = Experiment("gdumb", weights=str(path))
    assert experiment.name == "digits-gdumb-seed0-weights=mine"
    method = experiment_method(experiment)
    assert same(method.backbone(1), gray)
    assert untrained(method.backbone) is SMALL
    assert experiment_method(Experiment("gdumb", weights="none")).backbone is SMALL
    with pytest.raises(ModelError, match="another network"):
        resolve(Experiment("gdumb", weights=str(path), options={"backbone": "resnet32-podnet"}))


def test_a_file_that_changes_meanwhile_is_refused(tmp_path):
    path = saved(tmp_path / "a.safetensors", named(""))
    builder = with_weights("small", str(path))
    saved(path, {name: tensor + 1 for name, tensor in named("").items()})
    with pytest.raises(ModelError, match="changed"):
        builder(3)


def test_the_backbone_is_an_option_with_a_name_of_its_own(call):
    assert Experiment("podnet", backbone="small") == Experiment("podnet", options={"backbone": "small"})
    with pytest.raises(UsageError, match="twice"):
        Experiment("podnet", backbone="small", options={"backbone": "small"})
    code, _, errors = call("run", "podnet", "--backbone", "smal")
    assert code == 2
    assert "small" in errors


def test_methods_without_a_backbone_refuse_weights():
    @register_method("fixed")
    def fixed(*, lr: float = 0.1) -> Method:
        return METHODS["finetune"](backbone="small", lr=lr)

    with pytest.raises(UsageError, match="fixed"):
        experiment_method(Experiment("fixed", weights="none"))
    assert experiment_method(Experiment("fixed", image_size=32)).backbone is SMALL
