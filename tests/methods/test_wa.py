"""WA's and LwF's losses, the alignment of weights, and the head that both parts of LwF's loss need."""

from functools import partial

import numpy as np
import pytest
import torch

import reference
from ccfa.data import split
from ccfa.learning import Observer
from ccfa.learning.step import step_losses
from ccfa.methods import METHODS, wa
from ccfa.methods.parts import SeparateLinearHead
from ccfa.methods.wa import align_weights
from ccfa.models import LinearHead
from toys import STAGES, begun, learned, moved_by, plugged, seeded, tiny

LATER = {  # epochs, weight decay, epochs at which the rate drops
    "wa": (170, 2e-4, [60, 100, 140]),
    "lwf": (250, 2e-4, [60, 120, 180, 220]),
    "ewc": (180, 2e-4, [70, 120, 150]),
}


@pytest.mark.parametrize("name", LATER)
def test_later_stages_have_their_own_numbers(name):
    (main,) = METHODS[name]().phases(split(100, 50, 10)[1])
    factors = [main.schedule(epoch, main.epochs) for epoch in range(main.epochs)]
    drops = [epoch for epoch in range(1, main.epochs) if factors[epoch] < factors[epoch - 1]]
    assert (main.epochs, main.weight_decay, drops) == LATER[name]
    (main,) = METHODS[name](epochs=20, later_share=0.5, later_weight_decay=0.25).phases(STAGES[1])
    assert (main.epochs, main.weight_decay) == (10, 0.25)


def test_the_rate_of_the_first_stage_falls_as_published():
    for name, drops in (("wa", [60, 120, 170]), ("lwf", [60, 120, 160])):
        (main,) = METHODS[name]().phases(split(100, 50, 10)[0])
        factors = [main.schedule(epoch, main.epochs) for epoch in range(main.epochs)]
        assert (main.epochs, main.weight_decay) == (200, 5e-4)
        assert [epoch for epoch in range(1, 200) if factors[epoch] < factors[epoch - 1]] == drops


@pytest.mark.parametrize("name", ["wa", "lwf"])
@pytest.mark.parametrize("stage", STAGES[1:], ids=["stage 1", "stage 2"])
def test_loss_as_the_reference(name, stage):
    learner = begun(tiny(name, epochs=1), stage)
    learner.network.backbone.eval()  # the head trains
    rows, (main,) = learner.training_rows(), learner.method.phases(stage)
    images = learner.method.transforms.train(learner.train.images[rows], learner.generator("step"))
    labels, num_old = learner.train.labels[rows].numpy(), stage.num_old

    def scores(network):
        weights = network.head.weights.detach().double()
        embedding = network.backbone(images).embedding.detach().double()
        return (embedding @ weights[:, :-1].T + weights[:, -1]).numpy()

    teacher, logits = scores(learner.previous), scores(learner.network)
    losses = step_losses(learner, rows, main, learner.generator("step")).read()
    distilled = reference.softened_cross_entropy(teacher, logits[:, :num_old], 2.0)
    if name == "wa":
        share = num_old / stage.num_seen
        expected = share * distilled, (1 - share) * reference.cross_entropy(logits, labels).mean()
    else:
        assert labels.min() >= num_old
        expected = 3 * distilled, reference.separate_cross_entropy(logits, labels, num_old).mean()
    found = losses["distillation"].item(), losses["classification"].item()
    assert found == pytest.approx(expected, rel=1e-4)


def grown(make) -> LinearHead:
    """A head of 3 old and 2 new classes in double precision, with biases if it has some."""
    head, generator = make(4).double(), seeded()
    head.grow(3, generator)
    head.grow(2, generator)
    torch.nn.init.normal_(head.new, generator=generator)
    return head


@pytest.mark.parametrize("bias", [True, False])
def test_alignment_as_the_reference(bias):
    head = grown(partial(LinearHead, bias=bias))
    with torch.no_grad():
        head.new *= 10
    before = head.weights.detach().numpy()
    align_weights(head)
    after = head.weights.detach()
    np.testing.assert_allclose(after[:, :4], reference.aligned_weights(before[:, :4], 3), rtol=1e-12)
    np.testing.assert_array_equal(after[:, 4:], before[:, 4:])
    norms = after[:, :4].norm(dim=1)
    assert norms[:3].mean().item() == pytest.approx(norms[3:].mean().item())
    align_weights(head)  # published code aligns twice: gamma is 1 then
    torch.testing.assert_close(head.weights.detach(), after, rtol=1e-12, atol=0)


@pytest.mark.parametrize("factor", [0.0, 0.01])
def test_small_weights_are_not_enlarged(factor):
    head = grown(LinearHead)
    with torch.no_grad():
        head.new *= factor
    before = head.new.detach().clone()
    align_weights(head)
    assert torch.equal(head.new, before)


@pytest.mark.parametrize("stage", STAGES[:2])
def test_weights_are_aligned_after_later_stages(stage):
    learner = begun(tiny("wa", epochs=1), stage)
    head, (term,) = learner.network.head, learner.terms
    with torch.no_grad():
        head.new *= 10
    before = head.weights.detach().double().numpy()
    term.conclude(learner)
    expected = reference.aligned_weights(before[:, :-1], 2) if stage.index else before[:, :-1]  # nothing is old yet
    np.testing.assert_allclose(head.weights.detach()[:, :-1], expected, rtol=1e-5)


def test_aligned_weights_predict_and_teach(monkeypatch):
    plain = learned(tiny("wa", epochs=1, align=False), 2).network.head.new.detach()
    monkeypatch.setattr(wa, "align_weights", lambda head: head.new.detach().mul_(0.5))
    aligned = learned(tiny("wa", epochs=1), 2)
    assert torch.equal(aligned.network.head.new, plain / 2)
    assert torch.equal(aligned.previous.head.weights, aligned.network.head.weights)


def test_weights_are_not_negative_after_any_step():
    seen = []

    class Watching(Observer):
        def on_batch(self, progress, losses):
            seen.append(learner.network.head.weights.min().item())

        def on_epoch(self, *given):
            return

    learner = begun(tiny("wa", epochs=1, nonnegative=True), STAGES[1], observer=None)
    assert learner.network.head.weights.shape == (4, 64)  # without a bias
    assert learner.network.head.new.min() < 0
    learner.observer = Watching()
    moved_by(learner, 0)
    assert min(seen) == 0
    assert learner.network.head.weights.sum(dim=1).min() > 0


def test_old_and_new_classes_compete_among_themselves():
    head = grown(SeparateLinearHead)
    features, labels = torch.randn(6, 4, generator=seeded(1)).double(), torch.tensor([0, 1, 2, 3, 4, 3])
    plain = LinearHead.forward(head, features)
    losses = torch.nn.functional.cross_entropy(head(features, labels), labels, reduction="none")
    expected = reference.separate_cross_entropy(plain.detach().numpy(), labels.numpy(), 3)
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-12)
    for rows, moved, still in ((slice(3), head.old, head.new), (slice(3, None), head.new, head.old)):
        of_moved, of_still = torch.autograd.grad(losses[rows].sum(), (moved, still), retain_graph=True)
        assert of_moved.isfinite().all()
        assert of_moved.any()
        assert not of_still.any()
    assert torch.equal(head(features), plain)
    assert torch.equal(head.eval()(features, labels), plain)  # CCFA attacks the frozen head with labels


@pytest.mark.parametrize("name", ["lwf", "ewc"])
def test_ccfa_gives_old_classes_samples(name):
    """Without exemplars, the old classes' weights learn from L_cls by augmented samples alone."""
    gradients = []
    for augmentation in ("nothing", "ccfa"):
        learner = begun(plugged(tiny(name, epochs=1), augmentation), STAGES[1])
        rows, (main,) = learner.training_rows(), learner.method.phases(STAGES[1])
        loss = step_losses(learner, rows, main, learner.generator("step")).read()["classification"]
        gradients.append(torch.autograd.grad(loss, learner.network.head.old)[0])
    assert not gradients[0].any()
    assert gradients[1].any()
