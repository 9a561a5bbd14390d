"""Stopped anywhere and continued in a new learner, every method ends with the same bits as if it had not been."""

import json

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
    """Learns all stages and stores the learner's whole state, as bytes, after every step and every stage."""

    def __init__(self, variant, device="cpu", state=None):
        name, options = VARIANTS[variant]
        method = tiny(name, **options)
        method = method if method.no_old_head else plugged(method, "ccfa")
        self.learner = Learner(method, toy_images(), observer=self, device=device)
        self.places, self.epochs, self.ends = {}, [], {}
        self.is_restored = state is not None
        if state:
            restore(self.learner, load(state[0]), json.loads(state[1]))

    def stored(self):
        tensors, facts = state_of(self.learner)
        return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), json.dumps(facts)

    def on_batch(self, progress, losses):
        """Keep the last step of each kind: amid an epoch and, in stage 1, at the end of an epoch and of a phase."""
        at_end = (progress.batch + 1 == progress.num_batches, progress.epoch + 1 == progress.num_epochs)
        if not self.is_restored and (progress.stage.index == 1 or not at_end[0]):
            place = progress.stage.index, progress.phase, at_end
            self.places[place] = progress.stage.index, len(self.epochs), self.stored()

    def on_epoch(self, progress, losses, lr, seconds):
        self.epochs.append(losses)

    def finish(self, first=0, last=2):
        for stage in STAGES[first : last + 1]:
            self.learner.learn(stage)
            if not self.is_restored:
                self.ends[stage.index] = len(self.epochs), self.stored(), self.outcome()
        return self

    def outcome(self):
        learner = self.learner
        modules = [learner.network, learner.previous, learner.initial, *learner.terms]
        tensors = {
            f"{number}.{name}": value.clone()
            for number, module in enumerate(modules)
            for name, value in module.state_dict().items()
        }
        predicted = learner.predict(toy_images(seed=1).images)
        return {**tensors, "predictions": predicted}, rows_of(learner.memory.classes)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_equals_not_stopping(variant):
    """Stopped inside a stage, the learner is the same after that stage; between two stages, after all stages."""
    whole = Snapshots(variant).finish()
    stops = [(stage, stage, *place) for stage, *place in whole.places.values()]
    stops += [(stage + 1, 2, *end[:2]) for stage, end in whole.ends.items()]
    for first, last, num_epochs, state in stops:
        again = Snapshots(variant, state=state).finish(first, last)
        found, kept = again.outcome()
        all_epochs, _, (tensors, exemplars) = whole.ends[last]
        assert_same(found, tensors)
        assert kept == exemplars
        assert again.epochs == whole.epochs[num_epochs:all_epochs]


@pytest.mark.parametrize(
    ("variant", "device"),
    [("podnet", "cpu")]
    + [pytest.param(name, "cuda", marks=ON_A_GPU) for name in ("podnet", "aanet, blend learned", "bic", "il2a")],
)
def test_a_restored_learner_is_in_exactly_the_stored_state(variant, device, monkeypatch):
    """On a GPU steps are not bit-repeatable, but what they start from is: captured or not, nothing is left over."""
    for _, _, state in Snapshots(variant, device).finish().places.values():
        again, seen = Snapshots(variant, device, state), []
        with monkeypatch.context() as patch:
            patch.setattr(loop, "run_epoch", lambda *work, again=again, seen=seen: seen.append(again.stored()))
            again.learner.begin(again.learner.stage)
            again.learner.optimise()
        assert_same(load(state[0]), load(seen[0][0]))
        assert seen[0][1] == state[1]
