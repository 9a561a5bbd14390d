"""Stopped anywhere and continued in a new learner, every method ends with the same bits as if it had not been."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load, save

from ccfa.learning import Learner, loop
from ccfa.learning.state import restore, state_of
from ccfa.methods import METHODS
from toys import STAGES, plugged, rows_of, tiny, toy_images

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VARIANTS = {
    **{name: (name, {}) for name in METHODS},
    "aanet, blend learned": ("aanet", {"learn_blend": True, "blend_lr": 1e-2}),
    "bic, inclearn's loss": ("bic", {"loss": "inclearn"}),
    "gdumb from scratch": ("gdumb", {"pretrain": False}),
    "il2a, published covariances": ("il2a", {"published_covariances": True}),
}


class Snapshots:
    """An observer that stores the learner's whole state after every step, as bytes."""

    def __init__(self):
        self.learner = None
        self.taken = []

    def on_batch(self, progress, losses):
        self.taken.append((progress, stored(self.learner)))

    def on_epoch(self, progress, losses, lr, seconds):
        self.taken.append(losses)


def stored(learner):
    tensors, facts = state_of(learner)
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), json.dumps(facts)


def restored(method, state, observer=None, device="cpu"):
    content, facts = state
    learner = Learner(method, toy_images(), observer=observer, device=device)
    restore(learner, load(content), json.loads(facts))
    return learner


def method_of(variant):
    name, options = VARIANTS[variant]
    method = tiny(name, **options)
    return method if method.no_old_head else plugged(method, "ccfa")


def finish(learner, first):
    for stage in STAGES[first:]:
        learner.learn(stage)
    return learner


def outcome(learner):
    images = toy_images(seed=1).images
    networks = [learner.network, learner.previous, learner.initial]
    return {
        "weights": [{name: tensor.clone() for name, tensor in network.state_dict().items()} for network in networks],
        "terms": [dict(term.state_dict()) for term in learner.terms],
        "exemplars": rows_of(learner.memory.classes),
        "predictions": learner.predict(images),
    }


def assert_same(left, right):
    for group in ("weights", "terms"):
        for before, after in zip(left[group], right[group], strict=True):
            assert before.keys() == after.keys()
            for name in before:
                torch.testing.assert_close(before[name], after[name], rtol=0, atol=0, equal_nan=False, msg=name)
    assert left["exemplars"] == right["exemplars"]
    assert torch.equal(left["predictions"], right["predictions"])


def places(taken):
    """A step to stop after in each phase of each stage: amid an epoch, at its end, and at the phase's end."""
    chosen = {}
    for number, entry in enumerate(taken):
        if isinstance(entry, tuple):
            progress = entry[0]
            at_end = (progress.batch + 1 == progress.num_batches, progress.epoch + 1 == progress.num_epochs)
            chosen[progress.stage.index, progress.phase, at_end] = number
    return sorted(chosen.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_equals_not_stopping(variant):
    method = method_of(variant)
    observer = Snapshots()
    learner = observer.learner = Learner(method, toy_images(), observer=observer)
    whole = outcome(finish(learner, 0))
    for number in places(observer.taken):
        progress, state = observer.taken[number]
        again = Snapshots()
        again.learner = restored(method, state, again)
        assert_same(whole, outcome(finish(again.learner, progress.stage.index)))
        epochs = [entry for entry in again.taken if isinstance(entry, dict)]
        assert epochs == [entry for entry in observer.taken[number + 1 :] if isinstance(entry, dict)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_between_stages_equals_not_stopping(variant):
    method = method_of(variant)
    learner = Learner(method, toy_images())
    states = []
    for stage in STAGES:
        learner.learn(stage)
        states.append(stored(learner))
    whole = outcome(learner)
    for index, state in enumerate(states, start=1):
        assert_same(whole, outcome(finish(restored(method, state), index)))


def note_state(seen, learner, phase, work):
    seen.append(stored(learner))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("variant", ["podnet", "aanet, blend learned", "bic", "il2a"])
def test_a_restored_learner_is_in_exactly_the_stored_state(variant, device, monkeypatch):
    """On a GPU steps are not bit-repeatable, but what they start from is: captured or not, nothing is left over."""
    method, observer = method_of(variant), Snapshots()
    observer.learner = Learner(method, toy_images(), observer=observer, device=device)
    finish(observer.learner, 0)
    for number in places(observer.taken):
        state = observer.taken[number][1]
        learner = restored(method, state, device=device)
        seen = []
        look = partial(note_state, seen)
        monkeypatch.setattr(loop, "run_epoch", look)
        learner.begin(learner.stage)
        learner.optimise()
        monkeypatch.undo()
        before, after = load(state[0]), load(seen[0][0])
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert seen[0][1] == state[1]
