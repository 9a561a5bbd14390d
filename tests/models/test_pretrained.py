"""Models of timm as backbones: features, images, and whole runs. The models are small and have random weights."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import ccfa
from ccfa.augmentation import CCFA
from ccfa.augmentation.mixing import ManifoldMixup
from ccfa.data import FOLDER, Framing, read_photos
from ccfa.deployment.runs import model_of_run
from ccfa.errors import ModelError, ResourceError, UsageError, installing
from ccfa.experiments import Experiment, build_method, resolve
from ccfa.experiments.experiment import experiment_method, experiment_of
from ccfa.experiments.first_stage import first_stage_key
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import TIME_LIMIT_CODE
from ccfa.files import read_tensors
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.state import new_network
from ccfa.methods import METHODS, with_augmentation
from ccfa.models import Timm, backbone_builder, load_weights, pretrained_config, with_weights
from ccfa.models.pretrained import TimmBackbone, import_timm
from timm_models import timm_or_skip
from toys import STAGES, TOY, Shortened, toy_images
from zoo import write_noise

timm = timm_or_skip()
SMALL = "test_resnet"


def made(name=SMALL, channels=3, size=None):
    torch.manual_seed(0)
    return Timm(name, pretrained=False, image_size=size)(channels)


@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("test_resnet", 64, 96),
        ("test_convnext", 64, 64),
        ("test_vit", 64, 64),
        ("vit_tiny_patch16_224", 32, 192),
        ("resnet10t", 64, 512),
        ("mobilenetv4_conv_small", 64, 1280),
    ],
)
def test_features_are_those_of_the_model(name, size, dim):
    backbone, images = made(name, size=size).eval(), torch.randn(2, 3, size, size)
    with torch.no_grad():
        features = backbone(images)
        assert torch.equal(features.embedding, backbone.module(images))
    assert features.embedding.shape == (2, dim) == (2, backbone.dim)
    assert len(features.maps) > 2
    assert all(level.dim() == 4 for level in features.maps)


def test_widths_are_measured_where_timm_names_another():
    backbone = made("mobilenetv4_conv_small", size=64)
    assert backbone.dim != backbone.module.num_features


def test_other_images_are_resized_to_the_models_size():
    backbone, small = made().eval(), torch.rand(2, 3, 32, 32)
    assert backbone.image_size == 160
    large = torch.nn.functional.interpolate(small, (160, 160), mode="bilinear", antialias=True)
    with torch.no_grad():
        assert torch.equal(backbone(small).embedding, backbone(large).embedding)


def test_gray_images():
    assert made(channels=1)(torch.rand(2, 1, 160, 160)).embedding.shape == (2, 96)


def test_nothing_is_dropped_at_random():
    module = timm.create_model(SMALL, num_classes=0, drop_path_rate=0.9)
    backbone, images = TimmBackbone(module, 3, 64, "bicubic").train(), torch.rand(2, 3, 64, 64)
    assert any(type(layer).__name__ == "DropPath" for layer in backbone.modules())
    assert torch.equal(backbone(images).embedding, backbone(images).embedding)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ghostnet_050", {"drop_rate": 0.5}),
        ("vit_dlittle_patch16_reg1_gap_256", {"attn_drop_rate": 0.5, "img_size": 64, "depth": 1}),
    ],
)
def test_functions_drop_nothing_at_random(name, given):
    """These models call dropout with a rate that is not of a layer of its own."""
    module = timm.create_model(name, num_classes=0, **given)
    backbone, images = TimmBackbone(module, 3, 64, "bicubic").train(), torch.rand(2, 3, 64, 64)
    assert torch.equal(backbone(images).embedding, backbone(images).embedding)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_model_compiles_as_one_graph(name):
    backbone, images = made(name, size=32), torch.rand(2, 3, 16, 16)
    compiled = torch.compile(lambda batch: backbone(batch), backend="eager", fullgraph=True)
    assert torch.equal(compiled(images).embedding, backbone(images).embedding)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("resnet18x", "resnet18"),
        ("test_resnet.a1_in1", "test_resnet.r160_in1k"),
        ("densenet121", "DenseNet"),
        ("mixer_s32_224", "weights"),
    ],
)
def test_models_that_cannot_be_backbones(name, told):
    with pytest.raises(UsageError, match=told):
        Timm(name, pretrained=name == "mixer_s32_224")(3)


def test_models_without_weights_of_their_own_can_be_used():
    assert with_weights("timm:mixer_s32_224", "none", 64)(3).dim == 512


def test_sizes_that_a_model_cannot_take():
    with pytest.raises(UsageError, match="40"):
        made("test_vit", size=40)(torch.rand(1, 3, 40, 40))
    with pytest.raises(UsageError, match="at least 1"):
        Timm(SMALL, image_size=-1)


def test_manifold_mixup_is_refused():
    images, generator = torch.randn(4, 3, 8, 8), torch.Generator().manual_seed(0)
    mixing = ManifoldMixup()(images, torch.arange(4), STAGES[0], generator).mixing
    with pytest.raises(UsageError, match="Manifold Mixup"):
        made()(images, mixing)


def tiny(method, name):
    method = METHODS[method](backbone=Timm(name, pretrained=False, image_size=32), transforms=TOY, memory=3, lr=0.01)
    return with_augmentation(replace(method, phases=Shortened(method.phases, epochs=1)), CCFA(count=1, steps=1))


@pytest.mark.parametrize(
    ("method", "name"), [("podnet", "test_resnet"), ("afc", "test_convnext"), ("ucir", "test_vit")]
)
def test_methods_train_on_models_of_timm(method, name):
    learner = Learner(tiny(method, name), toy_images())
    for stage in STAGES[:2]:
        learner.learn(stage)
    assert set(learner.predict(toy_images(seed=1).images).tolist()) <= {0, 1, 2, 3}


def test_afc_needs_maps_that_decide_the_embedding():
    with pytest.raises(UsageError, match="AFC"):
        Learner(tiny("afc", "test_vit"), toy_images()).learn(STAGES[0])


def test_a_name_with_a_prefix_is_a_pretrained_model():
    builder = backbone_builder(f"timm:{SMALL}")
    assert builder == Timm("test_resnet.r160_in1k", pretrained=True, image_size=160)
    assert timm.get_pretrained_cfg(SMALL).tag == "r160_in1k"
    config = pretrained_config("vit_tiny_patch16_224")
    assert (config.size, config.mean, config.crop, config.interpolation) == (224, (0.5, 0.5, 0.5), 0.9, "bicubic")


def test_images_are_normalised_as_the_model_was_trained(tmp_path):
    plain = build_method("podnet", str(tmp_path), backbone=f"timm:{SMALL}").transforms
    assert plain == replace(FOLDER, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    gray = build_method("podnet", "digits", backbone="timm:resnet18").transforms
    assert gray.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,))
    assert build_method("podnet", "digits", backbone=f"timm:{SMALL}", transforms=TOY).transforms == TOY
    assert build_method("podnet", "digits").transforms.mean != gray.mean


def test_weights_that_cannot_be_downloaded(monkeypatch):
    def offline(name, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ResourceError, match="--weights FILE"):
        Timm(SMALL)(3)


def test_a_torchvision_that_does_not_fit(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("ccfa.models.pretrained.importlib.import_module", fail)
    with pytest.raises(UsageError, match=r"same index.*docs/backbones\.md"):
        import_timm()


def test_without_timm_the_extra_is_named(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "timm", None)
    code, _, errors = call("run", "finetune", "--backbone", f"timm:{SMALL}")
    assert code == 2
    assert installing("timm") in errors
    assert installing("timm") in call("doctor")[1]


def test_the_doctor_and_the_list_name_timm(call):
    assert f"timm {timm.__version__}" in call("doctor")[1]
    assert "timm:NAME" in call("list", "backbones")[1]


# Files of torchvision and timm.


def test_files_of_torchvision_fit_the_same_model_of_timm(tmp_path):
    from torchvision.models import resnet18

    theirs = resnet18().eval()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    backbone = made("resnet18", size=64).eval()
    assert load_weights(backbone, tmp_path / "resnet18.pth").num_tensors == len(theirs.state_dict()) - 2
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        theirs.fc = torch.nn.Identity()
        torch.testing.assert_close(backbone(images).embedding, theirs(images))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet"])
def test_files_of_timm_fit_with_their_classifier(tmp_path, name):
    theirs, images = timm.create_model(name).eval(), torch.randn(2, 3, 160, 160)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    backbone = made(name).eval()
    load_weights(backbone, tmp_path / "model.safetensors")
    with torch.no_grad():
        theirs.reset_classifier(0)
        assert torch.equal(backbone(images).embedding, theirs(images))


# Whole runs on photos.


@pytest.fixture
def photos(tmp_path):
    for seed, name in enumerate(("ant", "bee", "cow")):
        write_noise(tmp_path / "photos" / name, 4, seed, size=40)
    return tmp_path / "photos"


@pytest.fixture
def weights(tmp_path):
    save_file(made().module.state_dict(), tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


SHORT = ("--scenario", "2,1", "--set", "epochs=1", "batch_size=4")


def test_an_experiment_takes_size_and_weights_from_the_model(photos, weights):
    experiment = Experiment("finetune", data=str(photos), backbone=f"timm:{SMALL}", weights=str(weights))
    resolved = resolve(experiment)
    assert resolved.train.shape == (3, 160, 160)
    method = resolved.config["resolved"]["method"]
    assert method["backbone"]["part"] == "FromFile"
    assert method["backbone"]["sha256"] == load_weights(made(), weights).sha256
    assert method["backbone"]["backbone"] == {
        "part": "Timm",
        "name": "test_resnet.r160_in1k",
        "pretrained": False,
        "image_size": 160,
    }
    assert method["transforms"]["mean"] == [0.5, 0.5, 0.5]
    assert json.loads(json.dumps(resolved.config)) == resolved.config
    assert resolve(experiment_of(resolved.config)).config == resolved.config
    smaller = resolve(replace(experiment, image_size=48))
    assert smaller.train.shape == (3, 48, 48)
    assert smaller.method.backbone.backbone.image_size == 48
    assert len({one.name for one in (experiment, replace(experiment, image_size=64), smaller.experiment)}) == 3


@pytest.fixture
def smooth(tmp_path):
    """Photos that are not square, of two classes, and timm's own view of each by the name of a model."""
    colours = np.random.default_rng(0).integers(0, 256, (2, 7, 9, 3)).astype(np.uint8)
    photos = [Image.fromarray(one).resize((420, 300), Image.Resampling.BICUBIC) for one in colours]
    for photo, name in zip(photos, ("ant", "bee"), strict=True):
        for part in ("train", "test"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            photo.save(tmp_path / "photos" / part / name / "one.png")

    def seen(name):
        transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=timm.create_model(name)))
        return torch.stack([transform(photo) for photo in photos])

    return tmp_path / "photos", seen


def run_view(data, name, images=None):
    """The test images of a run as its backbone sees them."""
    experiment = Experiment("finetune", data=data, backbone=f"timm:{name}", weights="none")
    method = experiment_method(experiment)
    images = resolve(experiment).test.images if images is None else images
    size = (Timm(name).image_size,) * 2
    return torch.nn.functional.interpolate(
        method.transforms.test(images), size, mode=Timm(name).config.interpolation, antialias=True
    )


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_mambaout"])  # bilinear, bicubic, the whole centre
def test_test_photos_are_seen_as_by_timm(smooth, name):
    """From a folder, and from squares of 256 pixels as `ccfa prepare` makes them."""
    photos, seen = smooth
    expected = seen(name)
    squares = read_photos(photos / "test", Framing(256)).images.images
    for found in (run_view(str(photos), name), run_view("imagenet100", name, squares)):
        assert found.shape == expected.shape
        assert (found - expected).abs().mean() < 0.06 * expected.std()  # of the whole centre square: 0.14 or more


def test_run_on_photos_becomes_a_model_with_its_framing(call, photos, tmp_path):
    words = ("--data", photos, "--backbone", f"timm:{SMALL}", "--weights", "none", "--image-size", "32", *SHORT)
    assert call("run", "replay", "--out", "run", *words)[0] == 0
    model, run = model_of_run(tmp_path / "run", tmp_path / "model"), Run(tmp_path / "run")
    assert model.framing == Framing(32, 0.95, "bilinear")
    assert ccfa.load_model(model.path).method.backbone.image_size == 32
    assert model.config["updates"][-1]["accuracy"] == run.report().overall[-1]


def test_run_on_small_images_becomes_a_model_of_the_same_backbone(call, tmp_path):
    ccfa.register_data("few")(lambda: (toy_images(per_class=2), toy_images(seed=1, per_class=1)))
    words = ("--data", "few", "--backbone", f"timm:{SMALL}", "--weights", "none", "--set", "epochs=0", "memory=1")
    assert call("run", "replay", "--scenario", "6", "--out", "run", *words)[0] == 0
    model = model_of_run(tmp_path / "run", tmp_path / "model")
    assert (model.framing.size, model.method.backbone.image_size) == (8, 160)


def test_first_stages_with_other_weights_or_versions_are_not_mixed(photos, weights, tmp_path, monkeypatch):
    experiment = Experiment("finetune", data=str(photos), backbone=f"timm:{SMALL}", image_size=32)
    save_file({n: t + 1 for n, t in made().module.state_dict().items()}, tmp_path / "other.safetensors")
    (tmp_path / "same.safetensors").write_bytes(weights.read_bytes())

    def key(given):
        resolved = resolve(replace(experiment, weights=str(given)))
        return first_stage_key(resolved, Acceleration(), torch.device("cpu"))

    assert key(weights) == key(tmp_path / "same.safetensors")
    before = key("none")
    assert len({before, key(weights), key(tmp_path / "other.safetensors")}) == 3
    monkeypatch.setattr(timm, "__version__", "0.1")
    assert key("none") != before


def test_a_stopped_run_resumes_with_the_same_weights_only(call, photos, weights, tmp_path):
    words = ("--data", photos, "--backbone", f"timm:{SMALL}", "--weights", weights, "--image-size", "32", *SHORT)
    assert call("run", "finetune", "--out", "whole", *words)[0] == 0
    assert call("run", "finetune", "--out", "stopped", "--minutes", "0", *words)[0] == TIME_LIMIT_CODE
    content = weights.read_bytes()
    save_file({n: t + 1 for n, t in made().module.state_dict().items()}, weights)
    code, _, errors = call("resume", "stopped")
    assert code == ModelError.exit_code
    assert "sha256" in errors
    weights.write_bytes(content)
    assert call("resume", "stopped")[0] == 0
    first, second = (tmp_path / name / "networks" / "stage-001.safetensors" for name in ("whole", "stopped"))
    assert first.read_bytes() == second.read_bytes()


def test_the_version_of_timm_is_written_down(call, photos, tmp_path, monkeypatch):
    words = ("--data", photos, "--backbone", f"timm:{SMALL}", "--weights", "none", "--image-size", "32", *SHORT)
    assert call("run", "finetune", "--out", "run", "--minutes", "0", *words)[0] == TIME_LIMIT_CODE
    path = tmp_path / "run" / "environment.json"
    assert json.loads(path.read_text())["timm"] == timm.__version__
    monkeypatch.setattr(timm, "__version__", "0.1")
    assert call("resume", "run")[0] == 0
    assert "timm" in str(json.loads(path.read_text())["resumed"])


def test_a_run_starts_from_the_network_of_another(call, photos, tmp_path):
    words = ("--data", photos, "--backbone", f"timm:{SMALL}", "--image-size", "32", *SHORT)
    assert call("run", "finetune", "--weights", "none", "--out", "first", *words)[0] == 0
    stage = tmp_path / "first" / "networks" / "stage-001.safetensors"
    experiment = Experiment("ucir", data=str(photos), backbone=f"timm:{SMALL}", image_size=32, weights=str(stage))
    backbone = new_network(experiment_method(experiment), 3).backbone
    stored, _ = read_tensors(stage)
    assert all(torch.equal(value, stored[f"backbone.{name}"]) for name, value in backbone.state_dict().items())


def test_weights_of_another_network_leave_no_directory(call, photos, tmp_path):
    save_file(made("test_convnext").module.state_dict(), tmp_path / "other.safetensors")
    words = ("--data", photos, "--backbone", f"timm:{SMALL}", "--weights", "other.safetensors", *SHORT)
    code, _, errors = call("run", "finetune", *words, "--out", "run")
    assert code == ModelError.exit_code
    assert "another network" in errors
    assert not (tmp_path / "run").exists()
