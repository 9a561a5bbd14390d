"""`ccfa list` and `ccfa doctor`."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS
from ccfa.errors import UsageError
from ccfa.experiments.experiment import SCENARIOS, schema
from ccfa.experiments.tables import TABLES, cited_only
from ccfa.methods import METHODS, Phase
from ccfa.methods.fetril import real_samples
from ccfa.methods.method import NOTHING
from ccfa.methods.parts import class_blocks
from ccfa.models import BACKBONES
from ccfa.reporting import inventory
from ccfa.reporting.inventory import TRAITS, catalogue, findings, traits
from ccfa.reporting.terminal import Output
from toys import EVERY_PAIR, REFUSED
from zoo import write_class, write_noise


def rows(*tables):
    """The cells of each row, by the first cell."""
    console = Output(file=io.StringIO(), width=400)
    console.print(*tables)
    lines = console.file.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.strip("│┃\n ").split("│")] for line in lines]
    return {row[0]: row for row in cells}


def test_methods_are_listed_with_their_memory():
    described, found = map(rows, catalogue("methods"))
    assert {*METHODS, *cited_only()} <= set(described)
    assert all(described[name][1] for name in METHODS)
    memories = [found[name][1] for name in ("finetune", "podnet", "joint")]
    assert memories == ["none", "20 per class, needed", "every image"]
    assert found["ranpac"][:5] == ["ranpac", "none", "", "yes", "yes"]
    assert found["podnet"][2:5] == ["yes", "", ""]


def test_traits_follow_from_the_method(monkeypatch):
    on_images = Phase("main", 1, 0.1, parameters=class_blocks)  # they move the statistics of batch norm
    on_features = replace(on_images, samples=real_samples, use_terms=False)
    for phase, is_frozen in ((on_images, False), (on_features, True)):
        method = replace(METHODS["finetune"](), phases=lambda stage, phase=phase: (phase,))
        monkeypatch.setitem(METHODS._added, "head-alone", lambda method=method: method)
        expected = {**dict.fromkeys(TRAITS, False), "CCFA": True, "frozen": is_frozen, "one class": True}
        assert traits("head-alone", []) == expected
    assert [name for name in METHODS if not traits(name, [])["one class"]] == ["lwf", "ewc"]
    for name in {name for name, _ in EVERY_PAIR}:
        assert traits(name, [])["CCFA"] == ((name, "ccfa") not in REFUSED)
        assert traits(name, [])["exemplars"] == (METHODS[name]().memory != NOTHING)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("datasets", [*DATASETS, "PATH"]),
        ("scenarios", SCENARIOS),
        ("orders", ["natural", "seed-N", "podnet-0"]),
        ("backbones", BACKBONES),
        ("tables", TABLES),
    ],
)
def test_catalogues_are_complete(what, names):
    found = rows(*catalogue(what))
    assert all(found[name][1] for name in names)


def test_options_have_type_and_default_as_they_are_typed():
    functions = {**METHODS, "ccfa": CCFA, **MIXES}
    tables = {table.title: table for table in catalogue("options")}
    assert tables.keys() == functions.keys()
    for name, function in functions.items():
        prefix = "ccfa." if name == "ccfa" else "mix." if name in MIXES else ""
        assert {prefix + option for option in schema(function)} <= set(rows(tables[name]))
    assert rows(tables["podnet"])["epochs"] == ["epochs", "int", "160"]


def test_options_of_one_method():
    (table,) = catalogue("options", "podnet")
    assert table.title == "podnet"
    for what, name in (("options", "podnt"), ("methods", "podnet")):
        with pytest.raises(UsageError, match="podnet"):
            catalogue(what, name)


def found(name, data_dir=None):
    """The doctor's lines about one thing."""
    return [line for line in findings(data_dir) if line.startswith(name)]


def test_the_doctor_says_what_there_is(call, monkeypatch):
    monkeypatch.setattr(inventory, "PACKAGES", ("rich", "no-such-package"))
    code, out, _ = call("doctor")
    assert code == 0
    names = (ccfa.__version__, torch.__version__, "GPU", "rich", "pip install no-such-package", *DATASETS, "disk")
    assert all(name in out for name in names)


def test_the_doctor_says_which_threads_runs_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "1 for tiny images" in found("CPU")[0]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" in found("CPU")[0]


@pytest.mark.parametrize(
    ("count", "build", "lines"),
    [(0, None, ["a CPU build"]), (0, "12.8", ["CUDA 12.8"]), (2, "12.8", ["0: a card, 80 GiB", "1: a card, 80 GiB"])],
)
def test_gpus_are_listed_or_missing_with_a_reason(monkeypatch, count, build, lines):
    gpu = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "cuda", build)
    assert all(part in line for part, line in zip(lines, found("GPU"), strict=True))


def test_data_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("CCFA_DATA", raising=False)
    assert "--data-dir" in found("cifar100")[0]
    assert str(tmp_path) in found("cifar100", tmp_path)[0]
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))
    assert str(tmp_path) in found("cifar100")[0]
    (tmp_path / "cifar-100-binary").mkdir()
    assert found("cifar100", tmp_path) == [f"cifar100: {tmp_path / 'cifar-100-binary'}"]


def test_a_folder_is_checked_without_training(call, tmp_path):
    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / "photos" / name, 3, seed)
    write_class(tmp_path / "photos" / "ant", {"bad.png": b"x"})
    code, out, _ = call("doctor", "--data", "photos")
    assert code == 0
    for text in ("2 classes, 6 images: ant 3, bee 3", "bad.png is not an image", "held out"):
        assert text in out
    assert "torch" not in out
    assert call("doctor", "--data", "photos/ant")[0] == call("doctor", "--data", "nowhere")[0] == 3
    assert call("doctor", "--recursive")[0] == 2


def test_both_parts_of_a_folder_are_checked(call, tmp_path):
    write_noise(tmp_path / "photos/train/ant/inner", 3, seed=0)
    write_noise(tmp_path / "photos/val/ant", 1, seed=0)
    write_noise(tmp_path / "photos/val/bee", 2, seed=2)
    code, out, _ = call("doctor", "--data", "photos", "--recursive")
    assert code == 0
    for text in (
        "train: 1 class, 3 images",
        "val: 2 classes, 3 images",
        "only in test: 'bee'",
        "1 of the 3 test images",
    ):
        assert text in out
