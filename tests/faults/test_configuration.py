"""Protocols and options at and beyond their limits, for every method: a result, or a message that names the option."""

import json
from dataclasses import replace

import pytest
import torch

from ccfa.data import split
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Learner
from ccfa.methods import METHODS, Budget, with_memory
from toy_runs import toy_run
from toys import STAGES, Shortened, has_memory_size, tiny, toy_images

CPU = torch.device("cpu")
every_method = pytest.mark.parametrize("name", METHODS)


def learned(method, train=None, stages=STAGES[:2]):
    """A learner that learned these stages, checked to have finite weights and to predict seen classes."""
    learner = Learner(method, train or toy_images())
    for stage in stages:
        learner.learn(stage)
    assert all(tensor.isfinite().all() for tensor in learner.network.state_dict().values())
    predicted = learner.predict(toy_images(seed=1).images)
    assert 0 <= int(predicted.min()) <= int(predicted.max()) < stages[-1].num_seen
    return learner


@every_method
@pytest.mark.parametrize("memory", [-1, 0, 1, 10**30])
def test_a_memory_of_any_size_is_taken_or_refused_by_name(name, memory):
    method, experiment = METHODS[name](), Experiment(name, memory=memory)
    if has_memory_size(method) and max(method.needs_memory, 0) <= memory <= 130:
        notes = resolve(experiment).notes
        assert any("sees no image of an old class again" in note for note in notes) == (memory == 0)
    else:
        with pytest.raises(UsageError, match=f"{name}|memory"):
            resolve(experiment)


@every_method
def test_the_smallest_and_the_largest_memory_are_learned_with(name):
    method = tiny(name, epochs=1)
    if not has_memory_size(method):
        pytest.skip(f"{name} has no memory size")
    images = toy_images()
    for per_class in (max(method.needs_memory, 1), 2**31):
        learner = learned(with_memory(method, Budget(per_class=per_class)), images)
        assert [len(rows) for rows in learner.memory.classes] == [min(per_class, 12)] * 4


@every_method
@pytest.mark.parametrize("sizes", [[6], [1, 4, 1]], ids=str)
def test_stages_of_any_size_are_learned_without_nan(name, sizes):
    learned(tiny(name, epochs=1), stages=split(6, sizes[0], sizes[1:]))


def test_a_smaller_last_stage_is_announced():
    assert "(4 + 4 + 2)" in resolve(Experiment("finetune", scenario="B4-inc4")).headline


@every_method
@pytest.mark.parametrize("change", [{"batch_size": 1}, {"batch_size": 10**9}, {"epochs": 0}, {"lr": 0.0}], ids=str)
def test_extreme_phases_have_a_defined_result(name, change):
    method = tiny(name)
    phases = Shortened(METHODS[name](backbone="small").phases, epochs=1)

    def extreme(stage):
        return tuple(replace(phase, **change) for phase in phases(stage))

    learned(replace(method, phases=extreme), toy_images(per_class=3))


def test_batches_of_every_size_have_more_than_one_row_where_there_are_more():
    images = toy_images(per_class=3)
    for size in (2, 4, 5):  # 6 rows in batches of 4 or 5 would leave 2 or 1
        method = tiny("finetune", epochs=1)
        learned(replace(method, phases=Shortened(method.phases, 1, size)), images)


def test_a_rate_of_zero_changes_no_parameter():
    method = tiny("finetune", epochs=1)
    phases = method.phases
    method = replace(method, phases=lambda stage: tuple(replace(p, lr=0.0, weight_decay=0.0) for p in phases(stage)))
    learner = Learner(method, toy_images())
    learner.begin(STAGES[0])
    before = [parameter.detach().clone() for parameter in learner.network.parameters()]
    learner.optimise()
    assert all(map(torch.equal, before, learner.network.parameters()))


@pytest.mark.parametrize("seed", ["-1", str(2**63), "1.5", "one", "nan", ""])
@pytest.mark.parametrize("option", ["--seed", "--batch-seed"])
def test_impossible_seeds_are_refused(call, tmp_path, option, seed):
    code, _, err = call("run", "finetune", f"{option}={seed}")
    assert code == 2
    assert "seed" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_smallest_and_the_largest_seed_work(seed, tmp_path):
    options = {"epochs": "0"}
    resolved = resolve(Experiment("finetune", scenario="10", seed=seed, batch_seed=seed, options=options))
    assert toy_run(tmp_path / "run", resolved).finished


@pytest.mark.parametrize(
    "arguments",
    [
        ["--validation", "nan"],
        ["--validation", "-0.5"],
        ["--validation", "inf"],
        ["--image-size", "0", "--data", "."],
        ["--image-size", "100000", "--data", "."],
        ["--memory", "True"],
        ["--memory", "3.0"],
        ["--memory-total", "-1"],
        ["--set", "lr=nan"],
        ["--set", "epochs=true"],
        ["--set", "epochs=20 "],
        ["--set", "=3"],
        ["--scenario", "B5-inc-1"],
        ["--scenario", "9" * 5000],
        ["--order", "9" * 5000],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_values_of_the_wrong_kind_or_size_are_refused_at_once(call, tmp_path, arguments):
    code, _, err = call("run", "podnet", *arguments)
    assert code == 2
    assert "Traceback" not in err
    assert len(err) < 20_000
    assert not list(tmp_path.iterdir())


def test_of_an_option_given_twice_the_last_counts(call, tmp_path):
    words = ["run", "finetune", "--scenario", "10", "--set", "epochs=0", "--seed", "1", "--seed", "2"]
    assert call(*words, "--out", "run")[0] == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["experiment"]["seed"] == 2


@pytest.mark.parametrize("order", ["0,1,2", "0,0,1,2,3,4,5,6,7,8", "natural,1", "seed--1", ""])
def test_class_orders_that_are_none_are_refused(order):
    with pytest.raises(UsageError, match="class order"):
        resolve(Experiment("finetune", order=order or ","))
