"""Exported files predict as the model does, say how to use them, hold no images, and are written only if they agree."""

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ccfa
from ccfa.data import decode_files
from ccfa.deployment import export
from ccfa.errors import DataError, ModelError, UsageError
from ccfa.models import BACKBONES, ResNet, wrap
from timm_models import timm_or_skip

onnxruntime = pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parents[2] / "examples" / "use_exported_model.py"
HEADS = {  # a method for each kind of head, rule and backbone
    "finetune": "LinearHead",
    "icarl": "LinearHead",  # by the nearest mean
    "ucir": "CosineHead",
    "podnet": "LocalSimilarityHead",
    "bic": "CorrectedLinearHead",
    "gdumb": "NormalisedLinearHead",
    "aanet": "LocalSimilarityHead",  # two branches
    "der": "WideningHead",  # a branch per stage
    "foster": "BoostedHead",  # a single branch is left
    "ranpac": "ReadOutHead",
    "fecam": "MahalanobisHead",
}
SHORT = {
    "podnet": {"balanced_epochs": 1},
    "aanet": {"balanced_epochs": 1},
    "bic": {"correction_epochs": 1},
    "der": {"warmup_epochs": 1, "balanced_epochs": 1},
    "foster": {"boosting_epochs": 1, "compression_epochs": 1},
}


def draw(folder, names, num=6, side=16):
    """Photos of one random pattern per class, with noise."""
    for name in names:
        (folder / name).mkdir(parents=True)
        random = np.random.default_rng([*name.encode()])
        pattern = random.integers(40, 216, (4, 4, 3)).repeat(side // 4, 0).repeat(side // 4, 1)
        for number in range(num):
            pixels = np.clip(pattern + random.normal(0, 20, pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def tiny_model(place, method, backbone="tiny"):
    """A model of 16 x 16 pixels that has learned two classes and then one more."""
    BACKBONES.add("tiny", ResNet((8,), (1,), (1,)))
    options = {"backbone": backbone, "epochs": 1, **SHORT.get(method, {})}
    asked = ccfa.Learning(method=method, image_size=16, options=options)
    model = ccfa.learn(place / "model", draw(place / "first", ["ant", "bee"]), asked)
    return model.learn(draw(place / "second", ['cow "é"']))


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path, "podnet")


@pytest.fixture
def pixels():
    return torch.randint(256, (9, 3, 16, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def run_onnx(path, images):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images.numpy()})


def run_torch(path, images):
    return [output.numpy() for output in torch.export.load(path).module()(images)]


RUN = {"onnx": run_onnx, "torch": run_torch}


def assert_predicts_alike(model, path, form, images):
    for batch in (images, images[:1]):
        scores, probabilities, _ = RUN[form](path, batch)
        found = model.predict(batch)
        assert [model.class_names[label] for label in scores.argmax(axis=1)] == [one.name for one in found]
        assert probabilities.max(axis=1) == pytest.approx([one.confidence for one in found], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
def test_exported_files_predict_as_the_model(method, tmp_path, pixels):
    model = tiny_model(tmp_path, method)
    assert type(model.classifier.network.head).__name__ == HEADS[method]
    assert model.rule == ("nearest_mean" if method == "icarl" else "logits")
    for form, ending in (("onnx", "onnx"), ("torch", "pt2")):
        made = ccfa.export_model(model, tmp_path / f"out.{ending}", form)
        assert made.difference <= 1e-4
        assert_predicts_alike(model, made.path, form, pixels)


def test_wrapped_backbones_export(tmp_path, pixels):
    def wrapped(channels):
        return wrap(
            nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)), ["2", "3"]
        )

    BACKBONES.add("wrapped", wrapped)
    model = tiny_model(tmp_path, "ucir", "wrapped")
    assert_predicts_alike(model, ccfa.export_model(model, tmp_path / "a.pt2", "torch").path, "torch", pixels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])  # small ones with the layers of their families
def test_models_of_timm_learn_twice_and_export(name, tmp_path):
    timm_or_skip()
    options = {"epochs": 1, "batch_size": 4, "projection": 50}
    asked = ccfa.Learning(backbone=f"timm:{name}", weights="none", image_size=32, options=options)
    ccfa.learn(tmp_path / "model", draw(tmp_path / "photos", ["ant", "bee"]), asked)
    ccfa.learn(tmp_path / "model", draw(tmp_path / "more", ["cow"]))
    shutil.move(tmp_path / "more/cow", tmp_path / "photos/cow")
    model = ccfa.load_model(tmp_path / "model", "cpu")
    assert model.config["weights"] == "none"
    found = model.predict(tmp_path / "photos")
    made = ccfa.export_model(model, tmp_path / "out.onnx", images=tmp_path / "photos")
    assert made.compared["photo"] == len(found) == 18
    pixels = torch.from_numpy(decode_files([one.path for one in found], model.framing).images)
    assert [one.name for one in found] == [one.name for one in model.predict(pixels)]
    assert_predicts_alike(model, made.path, "onnx", pixels)


@pytest.mark.slow
def test_onnx_from_the_command_line(tmp_path, call, pixels):
    model = tiny_model(tmp_path, "icarl")
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)).resize((400, 300))
    large.save(tmp_path / "large.jpg")
    code, output, _ = call("export", tmp_path / "model")
    path = tmp_path / "model.onnx"
    assert (code, [*tmp_path.glob("*.onnx")]) == (0, [path])
    assert "model.onnx" in output
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(one.name, one.type, one.shape) for one in session.get_inputs()] == [
        ("images", "tensor(uint8)", ["batch", 3, 16, 16])
    ]
    metadata = session.get_modelmeta().custom_metadata_map
    assert_facts({name: json.loads(text) for name, text in metadata.items()}, model)
    assert_nothing_private(path.read_bytes(), model)
    photos = [tmp_path / "large.jpg", *sorted((tmp_path / "first" / "bee").iterdir())]
    found = model.predict(photos)
    lines = example_output(path, photos, tmp_path)
    likeness = [line for line in lines if line.endswith("unlike the learned images")]
    assert likeness == [f"{one.path} is unlike the learned images" for one in found if one.unfamiliar]
    told = [line.rpartition(" ") for line in lines if line not in likeness]
    assert [words for words, _, _ in told] == [f"{one.path}: {one.name}" for one in found]
    assert [float(share) for _, _, share in told] == pytest.approx([one.confidence for one in found], abs=2e-4)


def example_output(path, photos, place):
    """What the example prints where torch and ccfa cannot be imported."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'ccfa'])); import runpy; del sys.argv[0]\n"
    words = [sys.executable, "-c", f"{blocked}runpy.run_path({str(EXAMPLE)!r})", EXAMPLE, path, *photos]
    result = subprocess.run(words, capture_output=True, text=True, check=True, cwd=place)
    return result.stdout.splitlines()


def assert_facts(facts, model):
    assert facts["class_names"] == ["ant", "bee", 'cow "é"']
    assert [facts[name] for name in ("channels", "size", "crop", "interpolation")] == [3, 16, 1.0, "bilinear"]
    assert facts["temperature"] == model.calibration.temperature
    assert facts["unfamiliar_below"] == model.calibration.unfamiliar_below
    assert facts["ccfa"] == ccfa.__version__
    assert len(facts["model"]) == 64


def assert_nothing_private(content, model):
    """No pixels, no encoded images, no paths of this machine."""
    stored = [*model.state.memory.images, *model.state.held_out.images]
    assert stored
    assert not any(image.numpy().tobytes()[:48] in content for image in stored)
    assert not any(image.float().numpy().tobytes()[:48] in content for image in stored)
    assert b"\x89PNG" not in content
    assert str(Path(ccfa.__file__).parent).encode() not in content
    assert os.path.dirname(torch.__file__).encode() not in content


def test_torch_from_the_command_line(model, tmp_path, call):
    code, output, _ = call("export", tmp_path / "model", "--format", "torch")
    path = tmp_path / "model.pt2"
    assert (code, "model.pt2" in output) == (0, True)
    extra = {"metadata.json": ""}
    torch.export.load(path, extra_files=extra)
    assert_facts(json.loads(extra["metadata.json"]), model)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for content in parts.values():
        assert_nothing_private(content, model)
        assert not zipfile.is_zipfile(io.BytesIO(content))  # a pickle of torch
    assert sorted(os.listdir(tmp_path)) == ["first", "model", "model.pt2", "second"]


def test_images_of_every_kind_are_compared(model, monkeypatch, tmp_path):
    sizes = []
    opened = export._open_torch

    def counting(content):
        run = opened(content)
        return lambda images: (sizes.append(len(images)), run(images))[1]

    monkeypatch.setitem(export.FORMATS, "torch", export.FORMATS["torch"]._replace(opened=counting))
    made = ccfa.export_model(model, tmp_path / "a.pt2", "torch")
    kept = {"held-out image": len(model.state.held_out.images), "exemplar": len(model.state.memory.images)}
    assert made.compared == kept | {"noise image": export.NOISE}
    assert sum(sizes) == sum(made.compared.values()) + export.BATCH
    assert {1, 7} <= set(sizes)


def test_photos_are_compared_too(model, tmp_path, call, monkeypatch):
    without = ccfa.Model(model.path, model.state._replace(memory=None, held_out=None), model.device)
    assert ccfa.export_model(without, tmp_path / "a.pt2", "torch").compared == {"noise image": export.NOISE}
    (tmp_path / "first/ant/bad.png").write_bytes(b"nothing")
    made = ccfa.export_model(without, tmp_path / "a.pt2", "torch", tmp_path / "first")
    assert made.compared == {"photo": 12, "noise image": export.NOISE}
    with pytest.raises(DataError, match=r"bad\.png"):
        ccfa.export_model(without, tmp_path / "a.pt2", "torch", tmp_path / "first/ant/bad.png")
    with pytest.raises(DataError, match="nowhere"):
        ccfa.export_model(without, tmp_path / "a.pt2", "torch", tmp_path / "nowhere")


def test_what_was_compared_is_told(tmp_path, call):
    tiny_model(tmp_path, "simplecil")
    words = ["export", tmp_path / "model", "--format", "torch"]
    _, out, _ = call(*words)
    assert "On 14 noise images" in out
    assert "--images" in out
    assert "replaced" not in out
    code, out, _ = call(*words, "--images", tmp_path / "first/ant")
    assert code == 0
    assert "On 6 photos and 14 noise images" in out
    assert "--images" not in out
    assert "replaced" in out


@pytest.mark.parametrize(
    "change",
    [
        lambda scores, shares, familiarity: (scores, shares + 2e-4, familiarity),
        lambda scores, shares, familiarity: (scores + 1.0, shares, familiarity),
        lambda scores, shares, familiarity: (scores * np.nan, shares, familiarity),
        lambda scores, shares, familiarity: (scores, shares * np.nan, familiarity),
        lambda scores, shares, familiarity: (scores[:, ::-1], shares, familiarity),
        lambda scores, shares, familiarity: (scores, shares, familiarity + 1.0),
    ],
)
def test_differences_are_found(change, model, pixels):
    def run(images):
        return [output.numpy() for output in model.classifier(images)]

    assert export._compared(model.classifier, run, pixels) == 0
    with pytest.raises(ModelError, match="differs"):
        export._compared(model.classifier, lambda images: change(*run(images)), pixels)


def test_a_failed_export_writes_nothing(model, tmp_path, monkeypatch):
    (tmp_path / "a.pt2").write_bytes(b"earlier")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    for name in ("a.pt2", "b.pt2"):
        with pytest.raises(ModelError, match="differs"):
            ccfa.export_model(model, tmp_path / name, "torch")
    assert (tmp_path / "a.pt2").read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_tampered_model_is_refused(model, tmp_path, call):
    weights = model.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, errors = call("export", model.path)
    assert (code, "model.safetensors" in errors) == (ModelError.exit_code, True)
    assert not [*tmp_path.glob("*.onnx")]


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages_are_named(missing, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"\[onnx\]"):
        ccfa.export_model(model, tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize(("name", "form"), [("a.pt2", "onnx"), ("config.json", "torch"), ("a.onnx", "tflite")])
def test_wrong_names_are_refused(name, form, model, tmp_path):
    with pytest.raises(UsageError):
        ccfa.export_model(model, tmp_path / name, form)


def test_networks_that_cannot_be_exported_are_told(tmp_path):
    class DependsOnData(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) if x.mean() > -100 else x

    BACKBONES.add("wrapped", lambda channels: wrap(nn.Sequential(DependsOnData(channels, 8, 3), nn.ReLU()), ["1"]))
    model = tiny_model(tmp_path, "finetune", "wrapped")
    with pytest.raises(ModelError, match="cannot be exported"):
        ccfa.export_model(model, tmp_path / "a.pt2", "torch")
