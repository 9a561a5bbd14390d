"""The options that every method has, and a method of one's own."""

import inspect
from dataclasses import replace

import pytest

from ccfa.data import DIGITS, split
from ccfa.errors import UsageError
from ccfa.experiments import build_method
from ccfa.methods import METHODS, Method, Recipe, register_method
from ccfa.methods.parts import cosine
from ccfa.methods.podnet import podnet
from ccfa.models import BACKBONES
from ccfa.options import schema
from toys import STAGES, TOY, main_phase

PUBLISHED = {  # epochs, learning rate, batch size, weight decay, exemplars per class, epochs at which the rate drops
    "finetune": (160, 0.1, 128, 5e-4, 0, []),
    "replay": (160, 0.1, 128, 5e-4, 20, []),
    "ucir": (160, 0.1, 128, 5e-4, 20, [80, 120]),
    "geodl": (160, 0.1, 128, 5e-4, 20, [80, 120]),
    "podnet": (160, 0.1, 128, 5e-4, 20, []),
    "afc": (160, 0.1, 128, 5e-4, 20, []),
    "icarl": (70, 2.0, 128, 5e-5, 20, [50, 64]),
    "gdumb": (256, 0.05, 16, 1e-6, 20, []),
    "bic": (250, 0.1, 128, 2e-4, 20, [100, 150, 200]),
    "wa": (200, 0.1, 128, 5e-4, 20, [60, 120, 170]),
    "lwf": (200, 0.1, 128, 5e-4, 0, [60, 120, 160]),
    "ewc": (200, 0.1, 128, 5e-4, 0, [60, 120, 170]),
    "der": (200, 0.1, 128, 5e-4, 20, [60, 120, 160]),
    "foster": (200, 0.1, 128, 5e-4, 20, []),
    "il2a": (101, 1e-3, 64, 2e-4, 0, [45, 90]),
    "pass": (101, 1e-3, 64, 2e-4, 0, [44, 89]),
    **dict.fromkeys(("ranpac", "acil", "simplecil", "slda", "fecam", "fetril"), (160, 0.1, 128, 5e-4, 0, [120, 140])),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(name):
    method = METHODS[name]()
    main = main_phase(method.phases(split(100, 50, 10)[0]))
    numbers = main.epochs, main.lr, main.batch_size, main.weight_decay, method.memory.quota(50)
    assert numbers == PUBLISHED[name][:5]
    factors = [main.schedule(epoch, main.epochs) for epoch in range(main.epochs)]
    drops = [epoch for epoch in range(1, main.epochs) if factors[epoch] < 0.3 * factors[epoch - 1]]
    assert [epoch for epoch in drops if factors[epoch] > 5e-4] == PUBLISHED[name][5]


@pytest.mark.parametrize("name", METHODS)
def test_recipe_reaches_every_method(name):
    given = {"epochs": 7, "lr": 0.5, "batch_size": 9, "weight_decay": 0.25, "backbone": "small", "transforms": TOY}
    method = METHODS[name](**given)
    main = main_phase(method.phases(STAGES[0]))
    assert (main.epochs, main.lr, main.batch_size, main.weight_decay) == (7, 0.5, 9, 0.25)
    assert (method.name, method.backbone, method.transforms) == (name, BACKBONES["small"], TOY)
    assert given.keys() <= schema(METHODS[name]).keys()


def test_signature_shows_every_option():
    options = inspect.signature(METHODS["aanet-ucir"]).parameters
    assert options["backbone"].default == "resnet32-ucir"
    assert (options["margin"].default, options["reset_scale"].default) == (0.5, False)
    assert "lambda_spatial" not in inspect.signature(METHODS["afc"]).parameters


def test_unknown_option_is_named():
    with pytest.raises(UsageError, match=r"'epoch'.*'epochs'"):
        podnet(epoch=2)


@pytest.mark.parametrize(("method", "option"), [("podnet", "backbone"), ("afc", "discrepancy"), ("bic", "loss")])
def test_a_misspelt_variant_is_named(method, option):
    with pytest.raises(UsageError, match="papr"):
        METHODS[method](**{option: "papr"})


@pytest.mark.parametrize(
    "numbers",
    [{"epochs": -1}, {"epochs": True}, {"batch_size": 0}, {"balanced_epochs": 0.5}]
    + [{"lr": value} for value in (float("nan"), float("inf"), 1e300, "0.1")]
    + [{"weight_decay": -1.0}, {"balanced_lr": -0.1}],
    ids=str,
)
def test_impossible_numbers_are_refused(numbers):
    (name,) = numbers
    with pytest.raises(UsageError, match=name.removeprefix("balanced_")):
        podnet(**numbers)


def test_a_phase_checks_its_clipping():
    with pytest.raises(UsageError, match="clip_norm"):
        replace(Recipe().phase(cosine), clip_norm=float("nan"))


def test_own_method_is_found_by_name():
    @register_method("mine", METHODS["replay"])
    def mine(method: Method, *, strength: float = 2.0) -> Method:
        """A method of one's own."""
        return replace(method, classification_weight=lambda stage: strength)

    method = build_method("mine", "digits", strength=3.0, memory=1)
    assert (method.name, method.memory.per_class, method.classification_weight(STAGES[0])) == ("mine", 1, 3.0)
    assert method.transforms == DIGITS  # the presets of replay
    assert {"memory", "strength", "epochs"} <= schema(METHODS["mine"]).keys()
    assert inspect.getdoc(METHODS["mine"]) == "A method of one's own."


def test_own_method_without_base():
    @register_method("alone")
    def alone(*, backbone: str = "small", lr: float = 0.1) -> Method:
        return METHODS["finetune"](backbone=backbone, lr=lr)

    assert build_method("alone", "digits").backbone is BACKBONES["small"]
    assert alone(lr=0.5).phases(STAGES[0])[0].lr == 0.5


def test_taken_names_are_refused():
    with pytest.raises(UsageError, match="'podnet'"):
        register_method("podnet", Recipe())(lambda recipe: None)


def test_options_need_types_and_their_own_names():
    with pytest.raises(UsageError, match="strength"):

        @register_method("untyped")
        def untyped(strength=1):
            return podnet()

    with pytest.raises(UsageError, match="lr"):

        @register_method("doubled", Recipe())
        def doubled(recipe: Recipe, *, lr: float = 1.0) -> Method:
            return podnet()
