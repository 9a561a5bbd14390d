"""`ccfa list` and `ccfa doctor`."""

import io
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import DATASETS, Stage
from ccfa.errors import UsageError
from ccfa.experiments.experiment import SCENARIOS, experiment_method
from ccfa.experiments.tables import TABLES, cited_only
from ccfa.kernels import kernels_left_out
from ccfa.methods import METHODS, Method, Phase, register_method
from ccfa.methods.fetril import real_samples
from ccfa.methods.method import NOTHING
from ccfa.methods.parts import class_blocks
from ccfa.models import BACKBONES
from ccfa.models.resnet import ResNet
from ccfa.options import meanings, schema
from ccfa.reporting import inventory
from ccfa.reporting.inventory import NETWORKS, TRAITS, catalogue, findings, kernel_findings, traits
from ccfa.reporting.kernel_check import Comparison
from ccfa.reporting.terminal import Output
from ccfa.settings import Experiment
from toys import EVERY_PAIR, REFUSED
from zoo import write_class, write_noise


def rows(*tables):
    """The cells of each row, by the first cell."""
    console = Output(file=io.StringIO(), width=400)
    console.print(*tables)
    lines = console.file.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.strip("│┃\n ").split("│")] for line in lines]
    return {row[0]: row for row in cells}


def listed_methods():
    """What the list of methods says of each, and its caption."""
    (table,) = catalogue("methods")
    names, meanings, letters = (column.cells for column in table.columns)
    return dict(zip(names, zip(meanings, letters, strict=True), strict=True)), table.caption


def test_methods_are_listed_with_letters(tmp_path, monkeypatch):
    results = Path("results").absolute()
    monkeypatch.chdir(tmp_path)
    found, caption = listed_methods()
    assert all(found[name][0] for name in METHODS)
    letters = {name: found[name][1] for name in ("lwf", "podnet", "ranpac", "fetril")}
    assert letters == {"lwf": " C   ", "podnet": "EC  1", "ranpac": "  FP1", "fetril": " CFP1"}
    assert all(name in caption for name in cited_only())
    assert "measured" not in rows(*catalogue("methods", "podnet"))
    (tmp_path / "results").symlink_to(results)
    assert listed_methods()[0]["podnet"][1] == "EC  1M"
    assert rows(*catalogue("methods", "podnet"))["measured"][1].startswith("yes")


def test_the_list_of_methods_has_a_line_for_each():
    console = Output(file=io.StringIO(), width=80)
    console.print(*catalogue("methods"))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(METHODS)]] == list(METHODS)
    assert len(lines) <= len(METHODS) + 6


def test_aanets_name_what_they_are_on():
    found, _ = listed_methods()
    assert [found[name][0].split(":")[0] for name in ("aanet", "aanet-ucir", "aanet-afc")] == [
        "AANet on PODNet",
        "AANet on UCIR",
        "AANet on AFC",
    ]


def test_a_method_is_described_by_name():
    described = rows(*catalogue("methods", "GDumb"))
    assert "formulation B3" in described["what it is"][1]
    assert "Prabhu" in described["paper"][1]
    assert described["CCFA"][1].startswith("no: it learns from its memory")
    assert rows(*catalogue("methods", "ranpac"))["frozen"][1].startswith("yes")
    with pytest.raises(UsageError, match="Did you mean 'podnet'"):
        catalogue("methods", "pdnet")


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


def test_every_network_is_described():
    assert {name for name, one in BACKBONES.items() if isinstance(one, ResNet)} == set(NETWORKS)


EVERYTHING = {**METHODS, "ccfa": CCFA, **MIXES}


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_option_has_a_meaning_and_a_value(name):
    function = EVERYTHING[name]
    prefix = "ccfa." if name == "ccfa" else "mix." if name in MIXES else ""
    found = rows(*catalogue("options", name))
    for option in schema(function):
        _, value, meaning = found[prefix + option]
        assert value
        assert meaning
    assert set(meanings(function)) == set(schema(function)), "a meaning of what is no option"


@pytest.mark.parametrize(("data", "epochs", "memory"), [("digits", 20, 4), ("cifar100", 160, 20), ("./photos", 40, 20)])
def test_options_have_the_values_that_a_run_would_use(data, epochs, memory):
    found = rows(*catalogue("options", "podnet", data))
    assert (found["epochs"][1], found["memory"][1]) == (str(epochs), str(memory))
    method = experiment_method(Experiment("podnet", data=data))
    assert (method.phases(Stage(0, 0, 5))[0].epochs, method.memory.per_class) == (epochs, memory)


def test_options_of_what_is_plugged_in_are_listed_too():
    (table,) = catalogue("options", "PODNet", "Glyphs", ccfa=True, mix="cutmix")
    assert table.title == "podnet + ccfa + cutmix on glyphs"
    found = rows(table)
    assert {"epochs", "ccfa.count", "mix.alpha"} <= set(found)
    (plug_in,) = experiment_method(Experiment("podnet", ccfa=True, data="glyphs")).feature_augmentations
    assert found["ccfa.count"][1] == str(plug_in.count)
    assert found["nca"][2].endswith("(code, paper)")


def test_options_are_asked_for_by_method(call):
    code, out, _ = call("list", "options")
    assert code == 0
    assert "ccfa list options METHOD --data DATA" in out
    assert len(out.splitlines()) < 10
    for words, said in [
        (["options", "podnt"], "podnet"),
        (["datasets", "podnet"], "ccfa list options podnet"),
        (["methods", "--ccfa"], "ccfa list options podnet"),
        (["options", "gdumb", "--ccfa"], "gdumb"),
        (["options", "podnet", "--data", "cifar10"], "Did you mean 'cifar100'"),
    ]:
        code, _, err = call("list", *words)
        assert code == 2
        assert said in err


def test_a_plug_in_describes_its_options():
    @register_method("mine", METHODS["replay"])
    def mine(method: Method, *, depth: int = 3, width: int = 4) -> Method:
        """My own.

        Args:
            depth: How deep it goes,
                which is written on two lines.

        Returns:
            width: No option.
        """
        return method

    found = rows(*catalogue("options", "mine"))
    assert found["depth"] == ["depth", "3", "How deep it goes, which is written on two lines."]
    assert found["width"] == ["width", "4"]
    assert found["memory"][2]
    assert listed_methods()[0]["mine"][0] == "My own."


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


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch say that there are so many cards."""

    def there_are(count):
        gpu = SimpleNamespace(name="a card", total_memory=80 * 2**30, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())

    return there_are


@pytest.mark.parametrize(
    ("count", "build", "lines"),
    [(0, None, ["a CPU build"]), (0, "12.8", ["CUDA 12.8"]), (2, "12.8", ["0: a card, 80 GiB", "1: a card, 80 GiB"])],
)
def test_gpus_are_listed_or_missing_with_a_reason(gpus, monkeypatch, count, build, lines):
    gpus(count)
    monkeypatch.setattr(torch.version, "cuda", build)
    assert all(part in line for part, line in zip(lines, found("GPU"), strict=True))


def test_kernels_need_a_gpu(gpus, call):
    gpus(0)
    code, _, errors = call("doctor", "--kernels")
    assert (code, "no GPU" in errors) == (5, True)


@pytest.mark.parametrize("left_out", [True, False])
def test_gpus_without_kernels_are_named(gpus, monkeypatch, left_out):
    gpus(2)
    monkeypatch.setattr(inventory, "can_run", lambda device: False)
    with kernels_left_out() if left_out else nullcontext():
        lines = list(kernel_findings())
    assert [line.partition(":")[2].partition(":")[0] for line in lines] == ["0", "1"]
    assert all("no CUDA kernels of ours" in line and ("CCFA_KERNELS" in line) == left_out for line in lines)


NEAR = Comparison({"x": 0.01, "y": 0.01}, {"x": 0.01, "y": 0.01}, ("resnet.cu", "sgd.cu"))
FAR = Comparison({"x": 0.01, "y": 0.3}, {"x": 0.01, "y": 0.02}, ("resnet.cu",))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_kernels_are_tried_on_each_gpu(gpus, call, monkeypatch, is_wrong):
    gpus(2)
    monkeypatch.setattr(inventory, "can_run", lambda device: True)
    monkeypatch.setattr(
        inventory, "compare_steps", lambda name, device, size: FAR if is_wrong and name == "ucir" else NEAR
    )
    code, out, errors = call("doctor", "--kernels")
    assert out.count("by resnet, sgd: agrees with torch. Mean difference from float32 1.0%") == (4 if is_wrong else 6)
    assert out.count("by resnet: WRONG") == (2 if is_wrong else 0)
    assert ("worst of y 30.0% (torch in bfloat16: 2.0%)" in out) == is_wrong
    assert (code, "ucir on cuda:0 and ucir on cuda:1" in errors) == ((1, True) if is_wrong else (0, False))


def test_a_number_that_is_none_is_wrong():
    assert not replace(NEAR, by_kernels={"x": 0.01, "y": math.nan}).agrees


@pytest.mark.gpu
def test_the_kernels_agree_on_this_gpu():
    assert all("resnet" in line and "agrees" in line for line in kernel_findings())


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
