"""Protocols and options at and beyond their limits, for every method: a result, or a message that names the option."""

from dataclasses import replace

import pytest

from ccfa.data import split
from ccfa.errors import UsageError
from ccfa.experiments import Experiment, resolve
from ccfa.learning import Learner
from ccfa.methods import METHODS
from toy_runs import toy_run
from toys import STAGES, Shortened, has_memory_size, tiny, toy_images

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
def test_a_memory_of_any_size_is_taken_or_refused_by_name(name):
    method = METHODS[name]()
    for memory in (-1, 0, 1, 10**30):
        experiment = Experiment(name, memory=memory)
        if has_memory_size(method) and max(method.needs_memory, 0) <= memory <= 130:
            notes = resolve(experiment).notes
            assert any("sees no image of an old class again" in note for note in notes) == (memory == 0)
        else:
            with pytest.raises(UsageError, match=f"{name}|memory"):
                resolve(experiment)


@every_method
def test_a_single_stage_and_uneven_ones_are_learned(name):
    for first, *later in ([6], [1, 4, 1]):
        learned(tiny(name, epochs=1), stages=split(6, first, later))


@every_method
@pytest.mark.parametrize("change", [{"batch_size": 1}, {"batch_size": 10**9}, {"epochs": 0}, {"lr": 0.0}], ids=str)
def test_extreme_phases_have_a_defined_result(name, change):
    phases = Shortened(METHODS[name](backbone="small").phases, epochs=1)

    def extreme(stage):
        return tuple(replace(phase, **change) for phase in phases(stage))

    learned(replace(tiny(name), phases=extreme), toy_images(per_class=3))


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_smallest_and_the_largest_seed_work(seed, tmp_path):
    experiment = Experiment("finetune", scenario="10", seed=seed, batch_seed=seed, options={"epochs": "0"})
    assert toy_run(tmp_path / "run", resolve(experiment)).finished


WRONG = ["--seed -1", "--batch-seed 1.5", "--validation nan", "--image-size 100000 --data .", "--memory 3.0"]
WRONG += ["--set lr=nan", "--set =3", "--scenario " + "9" * 5000, "--order " + "9" * 5000]


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words[:20])
def test_values_of_the_wrong_kind_or_size_are_refused_at_once(call, tmp_path, words):
    code, _, err = call("run", "podnet", *words.split())
    assert code == 2
    assert "Traceback" not in err
    assert len(err) < 20_000
    assert not list(tmp_path.iterdir())
