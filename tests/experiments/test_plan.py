import doctest
from dataclasses import replace
from itertools import product

import pytest

from ccfa.errors import UsageError
from ccfa.experiments import plan as module
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.plan import Plan
from ccfa.methods import METHODS

ON = {"ccfa": (True,), "seeds": (0,)}
OFF = {"ccfa": (False,), "seeds": (0,)}


def test_the_example_holds():
    assert doctest.testmod(module) == (0, 2)


def test_every_combination_is_one_experiment():
    base = Experiment("", data="cifar100", memory=5, validation=0.1, image_size=32, skip_bad=True, batch_seed=7)
    plan = Plan(("podnet", "ucir"), base, orders=("podnet-0", "podnet-1"), seeds=(3, 4))
    expected = [
        replace(base, method=method, ccfa=ccfa, order=order, seed=seed)
        for method, ccfa, order, seed in product(("podnet", "ucir"), (False, True), ("podnet-0", "podnet-1"), (3, 4))
    ]
    assert plan.experiments() == expected
    assert len({experiment.name for experiment in expected}) == 16


def test_without_orders_the_data_decides():
    assert [experiment.order for experiment in Plan(("podnet",)).experiments()] == [None] * 6


def test_all_means_every_method():
    found = [(experiment.method, experiment.ccfa) for experiment in Plan(("all",), seeds=(0,)).experiments()]
    assert found == [(name, ccfa) for name in METHODS for ccfa in (False, True)]


def test_an_option_goes_to_what_has_it():
    options = {"epochs": "1", "lambda_flat": "2", "ccfa.count": "3", "mix.num_places": "2"}
    mixes = {"mix": ("none", "manifold-mixup")}
    plan = Plan(("finetune", "podnet"), Experiment("", options=options), seeds=(0,), axes=mixes)
    for experiment in plan.experiments():
        has = {
            "epochs": True,
            "lambda_flat": experiment.method == "podnet",
            "ccfa.count": experiment.ccfa,
            "mix.num_places": experiment.mix is not None,
        }
        assert experiment.options == {name: text for name, text in options.items() if has[name]}
    assert len(plan.experiments()) == 8


def test_axes_are_combined():
    axes = {"memory": ("1", "5"), "ccfa.count": ("1", "3"), "scenario": ("B5-inc1", "5,5"), "mix": ("none", "cutmix")}
    found = Plan(("podnet",), axes=axes, **ON).experiments()
    assert [(one.memory, one.options["ccfa.count"], one.scenario, one.mix) for one in found] == list(
        product((1, 5), ("1", "3"), ("B5-inc1", "5,5"), (None, "cutmix"))
    )
    assert len({one.name for one in found}) == 16


def test_what_lacks_the_option_of_an_axis_is_run_once():
    found = Plan(("finetune", "podnet"), seeds=(0,), axes={"ccfa.count": ("1", "3"), "lambda_flat": ("2",)})
    assert [(one.method, one.options) for one in found.experiments()] == [
        ("finetune", {}),
        ("finetune", {"ccfa.count": "1"}),
        ("finetune", {"ccfa.count": "3"}),
        ("podnet", {"lambda_flat": "2"}),
        ("podnet", {"ccfa.count": "1", "lambda_flat": "2"}),
        ("podnet", {"ccfa.count": "3", "lambda_flat": "2"}),
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(()), "at least one method"),
        (Plan(("podnet",), seeds=()), "one seed"),
        (Plan(("podnett",)), "(?s)podnett.*podnet"),
        (Plan(("podnet", "all")), "method 'all'"),
        (Plan(("podnet",), Experiment("", options={"epoch": "1"})), "(?s)option of these methods 'epoch'.*epochs"),
        (Plan(("finetune",), Experiment("", options={"lambda_flat": "1"})), "lambda_flat"),
        (Plan(("finetune",), Experiment("", options={"memory": "1"})), "option of these methods 'memory'"),
        (Plan(("replay",), Experiment("", options={"ccfa.cuont": "1"})), "(?s)ccfa.cuont.*ccfa.count"),
        (Plan(("replay",), axes={"ccfa.cuont": ("1",)}), "axis 'ccfa.cuont'. Did you mean 'ccfa.count'"),
        (Plan(("replay",), axes={"memry": ("1",)}), "Did you mean 'memory'"),
        (Plan(("replay",), axes={"ccfa.count": ("1",)}, **OFF), "needs CCFA"),
        (Plan(("replay",), axes={"mix.alpha": ("1",)}), "axis 'mix.alpha'"),
        (Plan(("replay",), axes={"seed": ("1",)}), "axis 'seed'"),
        (Plan(("replay",), axes={"memory": ("1", "few")}), "Axis memory: .*'few'"),
        (Plan(("replay",), axes={"mix": ("cutmx",)}), "Did you mean 'cutmix'"),
        (Plan(("replay",), Experiment("", memory=2), axes={"memory": ("1",)}), "memory is given twice"),
        (Plan(("replay",), Experiment("", options={"lr": "1"}), axes={"lr": ("1",)}), "lr is given twice"),
    ],
)
def test_what_cannot_be_swept_is_refused(plan, message):
    with pytest.raises(UsageError, match=message):
        plan.experiments()
