"""From an experiment to data, stages and a method; from text to options; what does not fit is refused by name."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.augmentation import CCFA, CutMix
from ccfa.data import DIGITS, FOLDER, Transforms, data_set, parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments import Experiment, build_method, resolve
from ccfa.experiments.experiment import (
    SCENARIOS,
    describe,
    experiment_method,
    experiment_of,
    preset,
)
from ccfa.methods import METHODS
from ccfa.models import BACKBONES
from ccfa.options import check, decode, decode_options, schema
from zoo import write_noise


def phase_values(method, name):
    return {getattr(phase, name) for stage in resolve(Experiment("podnet")).stages for phase in method.phases(stage)}


def test_phases_that_stay_long_are_named():
    assert any("balanced has 20 epochs" in note for note in resolve(Experiment("podnet", epochs=1)).notes)
    assert resolve(Experiment("podnet", epochs=1, options={"balanced_epochs": 1})).notes == ()
    assert resolve(Experiment("lwf", scenario="5,5", epochs=10)).notes == ()


def test_digits_by_default_in_six_stages():
    resolved = resolve(Experiment("podnet", ccfa=True))
    assert [stage.num_new for stage in resolved.stages] == [5, 1, 1, 1, 1, 1]
    assert resolved.order == tuple(range(10))
    assert len(resolved.train) + len(resolved.test) == 1797
    assert resolved.method.memory.per_class == 4
    assert resolved.notes == ()
    assert resolved.headline == "podnet + CCFA · digits · 10 classes in 6 stages (5 + 1 + 1 + 1 + 1 + 1)"
    assert "(1 + 1 + 1 + ... + 1)" in resolve(Experiment("podnet", scenario="B1-inc1")).headline


def test_the_class_order_relabels_both_sets():
    plain, seeded = (resolve(Experiment("finetune", order=order)) for order in ("natural", "seed-1993"))
    expected = np.random.RandomState(1993).permutation(10)
    assert seeded.order == tuple(expected)
    for name in ("train", "test"):
        before, after = getattr(plain, name), getattr(seeded, name)
        np.testing.assert_array_equal(expected[after.labels.numpy()], before.labels.numpy())
        assert after.class_names == tuple(str(label) for label in expected)


def test_a_folder_is_scaled_and_read_again_when_it_changes(tmp_path):
    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / name, 5, seed, size=20)
    experiment = Experiment("finetune", data=str(tmp_path), image_size=16)
    before = resolve(experiment)
    assert before.train.shape == (3, 16, 16)
    assert [stage.num_new for stage in before.stages] == [1, 1]
    write_noise(tmp_path / "ant", 6, seed=2)
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
        ({"method": "pdnet"}, "podnet"),
        ({"memory": 0}, "exemplars"),
        ({"options": {"memory": "0"}}, "exemplars"),
        ({"memory_total": -3}, "-3"),
        ({"memory": 500}, "130 images"),
        ({"memory_total": 9}, "--memory-total 10"),
        ({"memory": 4, "memory_total": 50}, "not both"),
        ({"method": "finetune", "memory": 4}, "finetune"),
        ({"method": "joint", "memory": 4}, "joint"),
        ({"method": "joint", "ccfa": True}, "joint"),
        ({"seed": 2**63}, "seed"),
        ({"batch_seed": -1}, "seed"),
        ({"validation": 1.5}, "above 0 and below 1"),
        ({"options": {"epocs": "3"}}, "epochs"),
        ({"options": {"ccfa.count": "3"}}, "ccfa.count need --ccfa"),
        ({"ccfa": True, "options": {"ccfa.cont": "3"}}, "count"),
        ({"ccfa": True, "options": {"ccfa.target": "most-confidnt"}}, "most-confident"),
        ({"ccfa": True, "options": {"ccfa.phases": "mian"}}, "main"),
        ({"ccfa": True, "options": {"ccfa.balanced.counts": "3"}}, r"ccfa\.balanced"),
        ({"ccfa": True, "options": {"ccfa.phases": "main", "ccfa.balanced.count": "3"}}, r"ccfa\.balanced"),
        ({"method": "il2a", "ccfa": True, "options": {"ccfa.backbone_weight": "1"}}, "backbone_weight"),
        ({"mix": "cutmx"}, "cutmix"),
        ({"options": {"mix.alpha": "0.5"}}, "mix.alpha need --mix"),
        ({"mix": "mixup", "options": {"mix.alpa": "0.5"}}, "alpha"),
        ({"method": "il2a", "mix": "mixup"}, "ClassMixing"),
        ({"options": {"cutout": "8"}}, "cutout"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(changes, said):
    with pytest.raises(UsageError, match=said):
        resolve(replace(Experiment("podnet"), **changes))


@pytest.mark.parametrize("method", ["podnet", "ucir", "replay"])
def test_a_total_memory_larger_than_the_classes_is_noted(method):
    assert "fewer than 200" in resolve(Experiment(method, memory_total=2000)).notes[0]
    assert resolve(Experiment(method, memory_total=100)).notes == ()


@pytest.mark.parametrize("method", ["lwf", "ewc", "finetune"])
def test_a_stage_of_one_class_is_noted_where_nothing_learns_it(method):
    notes = {scenario: resolve(Experiment(method, scenario=scenario)).notes for scenario in ("8,1,1", "1,7,2")}
    assert notes["1,7,2"] == ()
    assert any("one class" in note for note in notes["8,1,1"]) == (method != "finetune")


def test_options_reach_the_method_and_what_is_plugged_in():
    options = {"epochs": "3", "lr": "0.02", "ccfa.count": "2", "ccfa.step_size": "0.1,0.2"}
    options |= {"mix.alpha": "0.5", "mix.phases": "main", "mix.in_first_stage": "false"}
    experiment = Experiment("podnet", mix="cutmix", ccfa=True, options=options)
    method = experiment_method(experiment)
    (augmentation,) = method.feature_augmentations
    assert (augmentation.count, augmentation.step_size) == (2, (0.1, 0.2))
    assert phase_values(method, "epochs") == {3, 20}
    assert phase_values(method, "lr") == {0.02, 0.05}
    assert method.image_augmentation == CutMix(0.5, phases=("main",), in_first_stage=False)
    assert resolve(experiment).headline.startswith("podnet + CutMix + CCFA · digits")
    assert resolve(Experiment("il2a")).headline.startswith("il2a · digits")


def test_the_balanced_phase_may_have_options_of_its_own():
    options = {"ccfa.count": "2", "ccfa.balanced.count": "3", "ccfa.balanced.weight": "0.5"}
    main, balanced = experiment_method(Experiment("podnet", ccfa=True, options=options)).feature_augmentations
    assert (main.phases, main.count, main.weight) == (("main",), 2, 1.0)
    assert (balanced.phases, balanced.count, balanced.weight) == (("balanced",), 3, 0.5)


def test_a_preset_is_the_default_and_options_win():
    assert build_method("podnet", "digits").transforms == DIGITS
    assert experiment_method(Experiment("podnet", data="some/folder")).transforms == FOLDER
    assert phase_values(build_method("finetune"), "epochs") == {160}
    assert phase_values(build_method("finetune", "digits"), "epochs") == {20}
    assert phase_values(build_method("finetune", "digits", epochs=2), "epochs") == {2}


def test_presets_name_methods_that_exist_with_options_that_exist():
    for data in ("cifar100", "digits", "./photos"):
        assert set(data_set(data).method_options) <= {*METHODS, "ccfa"}
        for method in METHODS:
            assert experiment_method(Experiment(method, data=data)).name == method
            assert preset(method, data).get("backbone", "small") in BACKBONES


def test_named_and_default_scenarios_fit_their_data():
    for scenario in SCENARIOS:
        num_classes = {"B5-inc1": 10, "5,2,2,1": 10, "B18-inc6": 36}.get(scenario, 100)
        assert parse_scenario(scenario, num_classes)[-1].num_seen == num_classes
    for num_classes in range(1, 40):
        stages = parse_scenario(data_set("./photos").default_scenario(num_classes), num_classes)
        assert stages[-1].num_seen == num_classes
        assert len(stages) <= 6


def test_the_configuration_is_json_and_repeats_the_experiment():
    experiment = Experiment(
        "podnet", ccfa=True, mix="mixup", scenario="5,5", order="seed-7", seed=5, options={"epochs": "1"}
    )
    config = resolve(experiment).config
    assert json.loads(json.dumps(config)) == config
    assert experiment_of(config) == replace(experiment, image_size=64)
    assert experiment_of({"experiment": {"method": "podnet", "validation": 0}}) == Experiment("podnet")
    assert resolve(experiment_of(config)).config == config
    assert config["resolved"]["stage_sizes"] == [5, 5]
    assert config["resolved"]["method"]["feature_augmentations"][0]["part"] == "CCFA"
    assert config["resolved"]["method"]["image_augmentation"]["alpha"] == 1.0


CHANGES = {"method": "ucir", "ccfa": True, "mix": "mixup", "data": "photos", "scenario": "B2-inc2", "order": "seed-1"}
CHANGES |= {"memory": 3, "memory_total": 30, "validation": 0.1, "image_size": 32, "skip_bad": True, "seed": 1}
CHANGES |= {"recursive": True, "batch_seed": 1, "options": {"lr": "0.2"}, "backbone": "small", "weights": "mine.pt"}


def test_whatever_differs_shows_in_the_name():
    names = {replace(Experiment("podnet"), **{name: value}).name for name, value in CHANGES.items()}
    assert len(names | {Experiment("podnet").name}) == len(CHANGES) + 1


def test_names_are_plain_directory_names():
    name = Experiment("podnet", data="../a b/photos/", scenario="5,5").name
    assert name == "photos-5_5-podnet-seed0"
    long = [{"milestones": "0.5,0.7" * 60}, {"milestones": "0" * 400}]
    long += [{**long[0], "weight_decay": text} for text in ("1", "2")]
    names = {Experiment("podnet", options=options).name for options in long}
    assert [len(name) for name in names] == [150] * 4


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "no experiment"),
        ([1], "no experiment"),
        ({"seed": 1}, "no experiment"),
        ({"method": "podnet", "x": 1}, "x"),
        ({"method": 5}, "method 5"),
        ({"method": "podnet", "ccfa": 1}, "ccfa"),
        ({"method": "podnet", "seed": True}, "seed True"),
        ({"method": "podnet", "seed": None}, "seed"),
        ({"method": "podnet", "options": {"epochs": 1}}, "options"),
    ],
)
def test_a_configuration_without_an_experiment_is_refused(stored, message):
    with pytest.raises(ModelError, match=message):
        experiment_of({"experiment": stored})


def factory(*, memory: int = 20, rule: Literal["a", "b"] = "a", lr: float = 0.1, epochs: int = 2) -> None:
    """Takes options of several types."""


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("1" + "0" * 400, int, 10**400),
        ("1e-4", float, 1e-4),
        ("7", float, 7.0),
        ("true", bool, True),
        ("small", str, "small"),
        ("b", Literal["a", "b"], "b"),
        ("none", int | None, None),
        ("4", int | None, 4),
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
        ("20 ", int, "a whole number"),
        ("1_000", int, "a whole number"),
        ("\u0663", int, "a whole number"),
        ("", float, "a number"),
        ("-0.1", float, "at least 0"),
        ("nan", float, "finite"),
        ("1e400", float, "finite"),
        ("True", bool, "true or false"),
        ("c", Literal["a", "b"], "a, b"),
        ("1,2,3", tuple[float, float], "2 values"),
        ("1,x", tuple[float, ...], "a number"),
        ("x", Transforms, "Python interface"),
    ],
)
def test_text_that_does_not_fit_is_refused_with_what_was_expected(text, kind, said):
    with pytest.raises(ValueError, match=said):
        decode(text, kind)


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_numbers_survive_text(value):
    assert decode(repr(value), float) == value


@given(st.text())
def test_any_text_is_decoded_or_refused(text):
    for kind in (int, float, bool, int | None, tuple[int, ...], Literal["a"]):
        with contextlib.suppress(ValueError):
            decode(text, kind)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("three", int, "a whole number"),
        (2.5, int, "a whole number"),
        (True, int, "a whole number"),
        (-1, int, "at least 0"),
        ("0.1", float, "a number"),
        (float("nan"), float, "finite"),
        (float("inf"), float | None, "finite"),
        (1, bool, "true or false"),
        (3, str, "text"),
        ("c", Literal["a", "b"], "a, b"),
        (0.5, tuple[float, ...], "a tuple"),
        ((0.5, "x"), tuple[float, ...], "a number"),
        ((1.0,), tuple[float, float], "2 values"),
        ("x", Transforms, "Transforms"),
        (3, str | Callable[[int], str], "text"),
        (3, Callable[[int], str], "a function"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_what_was_expected(value, kind, said):
    with pytest.raises(ValueError, match=said):
        check(value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (7, float),
        (None, int | None),
        ("a", Literal["a"] | None),
        ([0.5, 1], tuple[float, ...]),
        (DIGITS, Transforms),
        (len, str | Callable[[int], str]),
    ],
)
def test_values_that_fit_are_taken(value, kind):
    assert check(value, kind) is value


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": "three"},
        {"epochs": -1},
        {"epochs": 2.5},
        {"memory": "many"},
        {"num_proxies": 2.5},
        {"margin": "x"},
        {"lambda_flat": "1"},
        {"transforms": None},
        {"nca": "foo"},
        {"epoch": 3},
    ],
)
def test_python_options_are_checked_as_typed_ones(options):
    (name,) = options
    for build in (partial(build_method, "podnet", "digits"), METHODS["podnet"]):
        with pytest.raises(UsageError, match=f"{name}.* of podnet|option of podnet '{name}'"):
            build(**options)


def test_numbers_of_numpy_are_numbers():
    method = build_method("podnet", "digits", epochs=np.int64(2), lr=np.float32(0.5))
    (phase, *_) = method.phases(parse_scenario("B5-inc5", 10)[0])
    assert (phase.epochs, phase.lr) == (2, 0.5)
    assert (type(phase.epochs), type(phase.lr)) == (int, float)


@pytest.mark.parametrize("options", [{"count": 2.5}, {"count": "3"}, {"step_size": 1.0}, {"phases": "main"}])
def test_options_of_ccfa_are_checked_in_python(options):
    with pytest.raises(UsageError, match=f"Option {next(iter(options))} of CCFA"):
        CCFA(**options)


def test_names_match_in_any_case():
    assert build_method("PODNet", "CIFAR100").name == "podnet"
    assert phase_values(build_method("PODNet", "Digits"), "epochs") == phase_values(
        build_method("podnet", "digits"), "epochs"
    )
    resolved = resolve(Experiment("PODNet", data="DIGITS", order="Seed-3", backbone="Small"))
    assert resolved.experiment == Experiment("podnet", data="digits", order="seed-3", backbone="small")
    with pytest.raises(UsageError, match="Did you mean 'cifar100'"):
        build_method("podnet", "cifar10")


def test_a_folder_wins_over_a_name_in_another_case(tmp_path, monkeypatch):
    write_noise(tmp_path / "Digits" / "ant", 4, seed=0)
    monkeypatch.chdir(tmp_path)
    assert resolve(Experiment("finetune", data="Digits")).train.class_names == ("ant",)
    assert resolve(Experiment("finetune", data="digits")).train.num_classes == 10


def test_options_are_decoded_or_every_problem_is_reported_at_once():
    assert decode_options({"lr": "1", "memory": "2"}, factory, "toy") == {"lr": 1.0, "memory": 2}
    with pytest.raises(UsageError) as caught:
        decode_options({"memry": "3", "epochs": "x", "rule": "c", "lr": "0.1"}, factory, "toy")
    problems = str(caught.value).splitlines()
    assert len(problems) == 3
    for name, problem in zip(("memory", "epochs", "rule"), problems, strict=True):
        assert name in problem


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_schema_and_a_description_without_addresses(name):
    assert {"backbone", "transforms", "epochs", "batch_size", "lr", "weight_decay"} <= schema(METHODS[name]).keys()
    text = json.dumps(describe(METHODS[name]()))
    assert " at 0x" not in text
    assert json.loads(text)["name"] == name
