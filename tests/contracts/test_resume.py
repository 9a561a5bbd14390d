"""Stopped anywhere and continued in a new learner, every method ends with the same bits as if it had not been.

What is stored after a stage decides all that follows, so a continued learner is compared at the end of its stage. After
a stop between two stages it learns one stage, and after a stop amid stage 1 the rest of the run.
"""

import json

import pytest
import torch
from safetensors.torch import load, save

from ccfa.learning import Learner, Observer, loop
from ccfa.learning.state import restore, state_of
from ccfa.methods import METHODS
from toys import STAGES, plugged, tiny, toy_images

VARIANTS = {
    **{name: (name, {}) for name in METHODS},
    "aanet, blend learned": ("aanet", {"learn_blend": True, "blend_lr": 1e-2}),
    "bic, inclearn's loss": ("bic", {"loss": "inclearn"}),
    "wa, weights not negative": ("wa", {"nonnegative": True}),
    "gdumb from scratch": ("gdumb", {"pretrain": False}),
    "ranpac without random features": ("ranpac", {"projection": 0}),
    "ranpac after podnet": ("ranpac", {"first": "podnet"}),
    "fecam, common covariance": ("fecam", {"covariance": "common"}),
    "fetril on podnet's first stage": ("fetril", {"first": "podnet"}),
    "il2a, published covariances": ("il2a", {"published_covariances": True}),
}


class Snapshots(Observer):
    """Learns stages and stores the learner's whole state, as bytes, after some of the steps and after every stage."""

    def __init__(self, variant, device="cpu", state=None):
        name, options = VARIANTS[variant]
        method = tiny(name, **options)
        method = method if method.no_old_head else plugged(method, "ccfa")
        self.learner = Learner(method, toy_images(), observer=self, device=device)
        self.places, self.epochs, self.ends = {}, [], {}
        if state:
            restore(self.learner, load(state[0]), json.loads(state[1]))

    def stored(self):
        tensors, facts = state_of(self.learner)
        return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), json.dumps(facts)

    def on_batch(self, progress, losses):
        """Keep the last step of each kind: amid an epoch and, in stage 1, at the end of an epoch and of a phase."""
        kind = "phase" if progress.epoch + 1 == progress.num_epochs else "epoch"
        if progress.batch + 1 < progress.num_batches:
            kind = "amid"
        if progress.stage.index == 1 or kind == "amid":
            self.places[progress.stage.index, progress.phase, kind] = len(self.epochs), self.stored()

    def on_epoch(self, progress, losses, lr, seconds):
        assert progress.batch == progress.num_batches - 1
        self.epochs.append(losses)

    def learn(self, first=0, last=2):
        for stage in STAGES[first : last + 1]:
            self.learner.learn(stage)
            self.ends[stage.index] = len(self.epochs), self.stored()
        return self


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_equals_not_stopping(variant):
    whole = Snapshots(variant).learn()
    stops = [(stage + 1, stage + 1, *whole.ends[stage]) for stage in (0, 1)]
    for (stage, _, kind), stop in whole.places.items():
        stops.append((stage, 2 if kind == "amid" and stage == 1 else stage, *stop))
    for first, last, num_epochs, state in stops:
        again = Snapshots(variant, state=state).learn(first, last)
        epochs_by_then, (tensors, facts) = whole.ends[last]
        _, (found, found_facts) = again.ends[last]
        assert_same(load(found), load(tensors))
        assert found_facts == facts
        assert again.epochs == whole.epochs[num_epochs:epochs_by_then]


@pytest.mark.parametrize(
    ("variant", "device"),
    [("podnet", "cpu")]
    + [
        pytest.param(name, "cuda", marks=pytest.mark.gpu)
        for name in ("podnet", "aanet, blend learned", "bic", "il2a", "fetril")
    ],
)
def test_a_restored_learner_is_in_exactly_the_stored_state(variant, device, monkeypatch):
    """On a GPU steps are not bit-repeatable, but what they start from is: captured or not, nothing is left over."""
    for _, state in Snapshots(variant, device).learn().places.values():
        again, seen = Snapshots(variant, device, state), []
        with monkeypatch.context() as patch:
            patch.setattr(loop, "run_epoch", lambda *work, again=again, seen=seen: seen.append(again.stored()))
            again.learner.begin(again.learner.stage)
            again.learner.optimise()
        assert_same(load(state[0]), load(seen[0][0]))
        assert seen[0][1] == state[1]
