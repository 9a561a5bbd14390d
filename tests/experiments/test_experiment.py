import contextlib
import functools
import json
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ccfa.augmentation import CCFA, CutMix
from ccfa.data import DIGITS, FOLDER, Transforms, data_set, load_parts, parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments import Experiment, build_method, resolve
from ccfa.experiments.experiment import (
    SCENARIOS,
    decode,
    decode_options,
    describe,
    experiment_method,
    experiment_of,
    preset,
    schema,
)
from ccfa.methods import METHODS
from ccfa.models import BACKBONES


def phase_values(method, name):
    return {getattr(phase, name) for stage in resolve(Experiment("podnet")).stages for phase in method.phases(stage)}


def test_digits_by_default_in_six_stages():
    resolved = resolve(Experiment("podnet"))
    assert [stage.num_new for stage in resolved.stages] == [5, 1, 1, 1, 1, 1]
    assert resolved.order == tuple(range(10))
    assert len(resolved.train) + len(resolved.test) == 1797
    assert resolved.method.memory.per_class == 4
    assert resolved.notes == ()


def test_the_class_order_relabels_both_sets():
    plain, seeded = (resolve(Experiment("finetune", order=order)) for order in ("natural", "seed-1993"))
    expected = np.random.RandomState(1993).permutation(10)
    assert seeded.order == tuple(expected)
    for name in ("train", "test"):
        before, after = getattr(plain, name), getattr(seeded, name)
        np.testing.assert_array_equal(expected[after.labels.numpy()], before.labels.numpy())
        assert after.class_names == tuple(str(label) for label in expected)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_experiments_resolved_with_one_loader_share_their_images(validation):
    base = Experiment("podnet", validation=validation)
    load = functools.cache(load_parts)
    shared = [resolve(replace(base, order=order), load=load) for order in ("natural", "seed-1")]
    alone = resolve(replace(base, order="seed-1"))
    assert shared[1].config == alone.config
    for part in ("train", "test"):
        first, second, other = (getattr(resolved, part).images for resolved in (*shared, alone))
        assert first is second
        assert first is not other
        assert torch.equal(first, other)


def test_a_folder_that_changed_is_read_again(tmp_path):
    experiment = Experiment("finetune", data=str(tmp_path), image_size=8)
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / name / f"{index}.png")
    before = resolve(experiment)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "ant" / "4.png")
    assert resolve(experiment).config != before.config


def test_validation_holds_training_images_out_and_says_so():
    full, held = resolve(Experiment("podnet")), resolve(Experiment("podnet", validation=0.2))
    assert len(held.train) + len(held.test) == len(full.train)
    assert any("not on the test set" in note for note in held.notes)
    originals = {image.tobytes() for image in full.train.images.numpy()}
    assert {image.tobytes() for image in held.test.images.numpy()} <= originals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "pdnet"}, "Did you mean 'podnet'"),
        ({"data": "digts"}, "Did you mean 'digits'"),
        ({"order": "natral"}, "Did you mean 'natural'"),
        ({"order": "podnet-0"}, "cifar100 only"),
        ({"order": "0,1,1"}, "repeated"),
        ({"scenario": "B5inc1"}, "Cannot read the scenario"),
        ({"scenario": "B50-inc10"}, "add up to 50 classes, expected 10"),
        ({"scenario": "B5-inc6"}, "does not fit"),
        ({"scenario": "5,2"}, "add up to 7 classes, expected 10"),
        ({"memory": 0}, "needs exemplars"),
        ({"options": {"memory": "0"}}, "needs exemplars"),
        ({"memory": -3}, "negative"),
        ({"memory_total": -3}, "negative"),
        ({"memory": 500}, r"larger than the smallest class \(130 images\)"),
        ({"memory_total": 9}, "--memory-total 10 or more"),
        ({"memory": 4, "memory_total": 50}, "not both"),
        ({"method": "finetune", "memory": 4}, "keeps no exemplars"),
        ({"method": "joint", "memory": 4}, "keeps every image"),
        ({"method": "joint", "ccfa": True}, "has no meaning for joint"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"batch_seed": -1}, "seed must be from 0"),
        ({"validation": 1.5}, "above 0 and below 1"),
        ({"validation": float("nan")}, "above 0 and below 1"),
        ({"options": {"epocs": "3"}}, "Did you mean 'epochs'"),
        ({"options": {"backbone": "smal"}}, "Did you mean 'small'"),
        ({"options": {"batch_size": "0"}}, "batch_size"),
        ({"options": {"ccfa.count": "3"}}, "ccfa.count need --ccfa"),
        ({"ccfa": True, "options": {"ccfa.cont": "3"}}, "Did you mean 'count'"),
        ({"mix": "cutmx"}, "Did you mean 'cutmix'"),
        ({"options": {"mix.alpha": "0.5"}}, "mix.alpha need --mix"),
        ({"ccfa": True, "options": {"mix.alpha": "0.5"}}, "mix.alpha need --mix"),
        ({"mix": "mixup", "options": {"mix.alpa": "0.5"}}, "Did you mean 'alpha'"),
        ({"mix": "mixup", "options": {"mix.alpha": "0"}}, "alpha > 0"),
        ({"method": "il2a", "mix": "mixup"}, "makes ClassMixing of its images already"),
        ({"method": "pass", "mix": "cutmix"}, "makes Rotations of its images already"),
        ({"ccfa": True, "options": {"ccfa.step_size": "2,1"}}, "step_size"),
        ({"ccfa": True, "options": {"ccfa.target": "most-confidnt"}}, "Did you mean 'most-confident'"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(changes, said):
    with pytest.raises(UsageError, match=said):
        resolve(replace(Experiment("podnet"), **changes))


@pytest.mark.parametrize("method", ["podnet", "ucir", "replay"])
def test_a_total_memory_larger_than_the_classes_is_noted(method):
    assert "fewer than 200" in resolve(Experiment(method, memory_total=2000)).notes[0]
    assert resolve(Experiment(method, memory_total=100)).notes == resolve(Experiment("finetune")).notes == ()


def test_options_reach_the_method_and_its_augmentation():
    options = {"epochs": "3", "lr": "0.02", "ccfa.count": "2", "ccfa.step_size": "0.1,0.2"}
    method = experiment_method(Experiment("podnet", ccfa=True, options=options))
    (augmentation,) = method.feature_augmentations
    assert (augmentation.count, augmentation.step_size) == (2, (0.1, 0.2))
    assert phase_values(method, "epochs") == {3, 20}
    assert phase_values(method, "lr") == {0.02, 0.05}


def test_options_reach_the_mixing():
    options = {"mix.alpha": "0.5", "mix.phases": "main", "mix.in_first_stage": "false", "ccfa.count": "1"}
    method = experiment_method(Experiment("podnet", mix="cutmix", ccfa=True, options=options))
    assert method.image_augmentation == CutMix(0.5, phases=("main",), in_first_stage=False)
    assert method.feature_augmentations[0].count == 1
    headline = resolve(Experiment("podnet", mix="manifold-mixup", ccfa=True)).headline
    assert headline.startswith("podnet + ManifoldMixup + CCFA · digits")
    assert resolve(Experiment("il2a")).headline.startswith("il2a · digits")


def test_a_preset_is_the_default_and_options_win():
    assert build_method("podnet", "digits").transforms == DIGITS
    assert build_method("podnet", "some/folder").transforms == FOLDER
    assert phase_values(build_method("finetune"), "epochs") == {160}
    assert phase_values(build_method("finetune", "digits"), "epochs") == {20}
    assert phase_values(build_method("finetune", "digits", epochs=2), "epochs") == {2}


def test_presets_name_methods_that_exist_with_options_that_exist():
    for data in ("cifar100", "digits", "./photos"):
        assert set(data_set(data).method_options) <= {*METHODS, "ccfa"}
        for method in METHODS:
            assert build_method(method, data).name == method
            assert preset(method, data).get("backbone", "small") in BACKBONES


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_named_scenarios_fit_their_data(scenario):
    num_classes = {"B5-inc1": 10, "5,2,2,1": 10, "B18-inc6": 36}.get(scenario, 100)
    assert parse_scenario(scenario, num_classes)[-1].num_seen == num_classes


@pytest.mark.parametrize("num_classes", range(1, 40))
def test_the_default_scenario_fits_any_number_of_classes(num_classes):
    stages = parse_scenario(data_set("./photos").default_scenario(num_classes), num_classes)
    assert stages[-1].num_seen == num_classes
    assert len(stages) <= 6


def test_the_configuration_is_json_and_repeats_the_experiment():
    experiment = Experiment(
        "podnet", ccfa=True, mix="mixup", scenario="5,5", order="seed-7", seed=5, options={"epochs": "1"}
    )
    config = resolve(experiment).config
    assert json.loads(json.dumps(config)) == config
    assert experiment_of(config) == experiment
    assert resolve(experiment_of(config)).config == config
    assert config["resolved"]["stage_sizes"] == [5, 5]
    assert config["resolved"]["method"]["feature_augmentations"][0]["part"] == "CCFA"
    assert config["resolved"]["method"]["image_augmentation"]["alpha"] == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ucir"},
        {"ccfa": True},
        {"mix": "mixup"},
        {"data": "photos"},
        {"scenario": "B2-inc2"},
        {"order": "seed-1"},
        {"memory": 3},
        {"memory_total": 30},
        {"validation": 0.1},
        {"image_size": 32},
        {"skip_bad": True},
        {"seed": 1},
        {"batch_seed": 1},
        {"options": {"lr": "0.2"}},
    ],
)
def test_whatever_differs_shows_in_the_name(changes):
    assert replace(Experiment("podnet"), **changes).name != Experiment("podnet").name


def test_names_are_plain_directory_names():
    name = Experiment("podnet", data="../a b/photos/", scenario="5,5").name
    assert name == "photos-5_5-podnet-seed0"
    long = [{"milestones": "0.5,0.7" * 60}, {"milestones": "0" * 400}]
    long += [{**long[0], "weight_decay": text} for text in ("1", "2")]
    names = {Experiment("podnet", options=options).name for options in long}
    assert [len(name) for name in names] == [150] * 4


def test_the_headline_says_what_runs():
    headline = resolve(Experiment("podnet", ccfa=True)).headline
    assert headline == "podnet + CCFA · digits · 10 classes in 6 stages (5 + 1 + 1 + 1 + 1 + 1)"
    assert "(1 + 1 + 1 + ... + 1)" in resolve(Experiment("podnet", scenario="B1-inc1")).headline


def test_a_folder_is_scaled_to_the_image_size(tmp_path):
    for label in ("ant", "bee"):
        (tmp_path / label).mkdir()
        for index in range(5):
            Image.new("RGB", (20, 30), (40 * index, 90, 10)).save(tmp_path / label / f"{index}.png")
    resolved = resolve(Experiment("finetune", data=str(tmp_path), image_size=16))
    assert resolved.train.shape == (3, 16, 16)
    assert [stage.num_new for stage in resolved.stages] == [1, 1]


def test_a_whole_number_will_do_for_a_fraction():
    assert experiment_of({"experiment": {"method": "podnet", "validation": 0, "memory": None}}) == Experiment("podnet")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no experiment"),
        ({"experiment": {}}, "no experiment"),
        ({"experiment": [1]}, "no experiment"),
        ({"experiment": {"method": "podnet", "x": 1}}, "x"),
        ({"experiment": {"method": 5}}, "method 5"),
        ({"experiment": {"method": ["podnet"]}}, "method"),
        ({"experiment": {"method": "podnet", "ccfa": 1}}, "ccfa"),
        ({"experiment": {"method": "podnet", "seed": True}}, "seed True"),
        ({"experiment": {"method": "podnet", "seed": 0.5}}, "seed"),
        ({"experiment": {"method": "podnet", "seed": None}}, "seed"),
        ({"experiment": {"method": "podnet", "validation": "0.1"}}, "validation"),
        ({"experiment": {"method": "podnet", "options": {"epochs": 1}}}, "options"),
        ({"experiment": {"method": "podnet", "options": [1]}}, "options"),
    ],
)
def test_a_configuration_without_an_experiment_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        experiment_of(config)


def test_the_balanced_phase_may_have_options_of_its_own():
    options = {"ccfa.count": "2", "ccfa.balanced.count": "3", "ccfa.balanced.weight": "0.5"}
    main, balanced = experiment_method(Experiment("podnet", ccfa=True, options=options)).feature_augmentations
    assert (main.phases, main.count, main.weight) == (("main",), 2, 1.0)
    assert (balanced.phases, balanced.count, balanced.weight) == (("balanced",), 3, 0.5)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("podnet", {"ccfa.balanced.counts": "3"}),
        ("podnet", {"ccfa.balanced.phases": "main"}),
        ("podnet", {"ccfa.phases": "main", "ccfa.balanced.count": "3"}),
        ("il2a", {"ccfa.backbone_weight": "1"}),
    ],
)
def test_options_of_shares_that_have_no_meaning_are_refused(method, options):
    with pytest.raises(UsageError, match=r"ccfa\.ba"):
        experiment_method(Experiment(method, ccfa=True, options=options))


# Options as text.


def factory(*, memory: int = 20, rule: Literal["a", "b"] = "a", lr: float = 0.1, epochs: int = 2) -> None:
    """Takes options of several types."""


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    name: str


def test_schema_names_options_and_types():
    assert schema(factory) == {"memory": int, "rule": Literal["a", "b"], "lr": float, "epochs": int}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_complete_schema(name):
    options = schema(METHODS[name])
    assert {"backbone", "transforms", "epochs", "batch_size", "lr", "weight_decay"} <= options.keys()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("0.5", float, 0.5),
        ("1e-4", float, 1e-4),
        ("7", float, 7.0),
        ("true", bool, True),
        ("false", bool, False),
        ("small", str, "small"),
        ("b", Literal["a", "b"], "b"),
        ("none", int | None, None),
        ("4", int | None, 4),
        ("0.5,0.75", tuple[float, ...], (0.5, 0.75)),
        ("0.5, 0.75", tuple[float, ...], (0.5, 0.75)),
        ("", tuple[float, ...], ()),
        ("1,2", tuple[float, float], (1.0, 2.0)),
    ],
)
def test_text_becomes_the_value_of_its_type(text, kind, value):
    decoded = decode(text, kind)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("1.5", int, "a whole number"),
        ("x", float, "a number"),
        ("", int, "a whole number"),
        ("20 ", int, "a whole number"),
        ("1_000", int, "a whole number"),
        ("\u0663", int, "a whole number"),
        (" 0.1", float, "a number"),
        ("-1", int, "at least 0"),
        ("-0.1", float, "at least 0"),
        ("nan", float, "finite"),
        ("inf", float, "finite"),
        ("1e400", float, "finite"),
        ("True", bool, "true or false"),
        ("1", bool, "true or false"),
        ("c", Literal["a", "b"], "not one of a, b"),
        ("1", tuple[float, float], "2 values"),
        ("1,2,3", tuple[float, float], "2 values"),
        ("1,x", tuple[float, ...], "a number"),
        ("x", Transforms, "Python interface"),
    ],
)
def test_text_that_does_not_fit_is_refused_with_what_was_expected(text, kind, said):
    with pytest.raises(ValueError, match=said):
        decode(text, kind)


def test_whole_numbers_too_large_for_a_float_are_still_numbers():
    assert decode("1" + "0" * 400, int) == 10**400


@given(st.integers(0, 10**30))
def test_whole_numbers_survive_text(value):
    assert decode(str(value), int) == value


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_numbers_survive_text(value):
    assert decode(repr(value), float) == value


@given(st.text())
def test_any_text_is_decoded_or_refused(text):
    for kind in (int, float, bool, int | None, tuple[int, ...], Literal["a"]):
        with contextlib.suppress(ValueError):
            decode(text, kind)


def test_every_problem_is_reported_at_once():
    texts = {"memry": "3", "epochs": "x", "rule": "c", "lr": "0.1"}
    with pytest.raises(UsageError) as caught:
        decode_options(texts, factory, "toy")
    message = str(caught.value)
    assert "Unknown option of toy 'memry'. Did you mean 'memory'?" in message
    assert "Option epochs of toy: expected a whole number, got 'x'." in message
    assert "Option rule of toy" in message
    assert "lr of toy" not in message


def test_good_options_are_decoded_against_the_signature():
    assert decode_options({"lr": "1", "memory": "2"}, factory, "toy") == {"lr": 1.0, "memory": 2}
    assert decode_options({"step_size": "0.1,0.2"}, CCFA, "ccfa") == {"step_size": (0.1, 0.2)}
    assert decode_options({"step_size": "none"}, CCFA, "ccfa") == {"step_size": None}


def test_parts_are_described_by_name_and_arguments():
    part = functools.partial(factory, 1, memory=3)
    assert describe(part) == {"part": "factory", "arguments": [1], "memory": 3}
    assert describe(Outer(Inner((1,)), "x")) == {
        "part": "Outer",
        "inner": {"part": "Inner", "sizes": [1]},
        "name": "x",
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_described_as_json_without_addresses(name):
    text = json.dumps(describe(METHODS[name]()))
    assert " at 0x" not in text
    assert json.loads(text)["name"] == name
