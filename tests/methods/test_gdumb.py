import pytest
import torch
from torch import nn, optim

import reference
from ccfa.data import Stage
from ccfa.learning.loop import descend
from ccfa.methods.gdumb import NormalisedLinearHead, gdumb
from toys import STAGES, begun, learned, tiny, toy_images

FIRST, LATER = Stage(0, 0, 50), Stage(1, 50, 60)


def published_rates(num_epochs, lr=0.05):
    """The rates of the published loop: torch's scheduler, stepped from the third epoch on."""
    optimiser = optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, T_0=1, T_mult=2, eta_min=lr / 100)
    rates = []
    for epoch in range(num_epochs):
        if epoch < 2:
            optimiser.param_groups[0]["lr"] = lr * (0.1, 1)[epoch]
        else:
            optimiser.step()
            scheduler.step()
        rates.append(optimiser.param_groups[0]["lr"])
    return rates


def test_published_rates():
    (first,), (later,) = gdumb().phases(FIRST), gdumb().phases(LATER)
    assert (first.epochs, later.epochs) == (256, 32)
    for phase in (first, later):
        rates = [phase.lr * phase.schedule(epoch, phase.epochs) for epoch in range(phase.epochs)]
        assert rates == pytest.approx(published_rates(phase.epochs), rel=1e-12)


def test_later_stages_start_from_the_first():
    learner = begun(tiny("gdumb", epochs=1), STAGES[2])
    initial, previous = learner.initial.backbone.state_dict(), learner.previous.backbone.state_dict()
    current = learner.network.backbone.state_dict()
    assert all(torch.equal(current[key], initial[key]) for key in current)
    assert not all(torch.equal(current[key], previous[key]) for key in current)
    assert learner.network.head.num_classes == 6
    assert not torch.equal(learner.network.head.weights[:4], learner.previous.head.weights)
    assert all(parameter.requires_grad for parameter in learner.network.parameters())
    rows = learner.method.phases(STAGES[2])[0].rows(learner)
    learner.optimise()
    learner.conclude()
    assert sorted(rows.tolist()) == sorted(row for stored in learner.memory.classes for row in stored.tolist())


def test_from_scratch_the_memory_is_all_there_is():
    published = gdumb(pretrain=False)
    assert published.phases(FIRST) == published.phases(LATER)
    assert published.phases(LATER)[0].epochs == 256
    method = tiny("gdumb", epochs=1, pretrain=False)
    for stage in STAGES[:2]:
        learner = begun(method, stage)
        rows = method.phases(stage)[0].rows(learner)
        assert torch.bincount(learner.train.labels[rows]).tolist() == [3] * stage.num_seen
    initial, current = learner.initial.backbone.state_dict(), learner.network.backbone.state_dict()
    assert not torch.equal(initial["levels.0.0.weight"], current["levels.0.0.weight"])


def test_head_normalises_its_logits_as_the_reference():
    head = NormalisedLinearHead(4, relu=True).double()
    head.grow(3, torch.Generator().manual_seed(0))
    features = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = (features @ head.weights.T).detach().numpy()
    assert head(features).detach().numpy() == pytest.approx(reference.normalised_scores(scores), rel=1e-9)
    head.eval()
    mean, variance = head.norm.running_mean.numpy(), head.norm.running_var.numpy()
    assert mean == pytest.approx(0.1 * scores.mean(axis=0))
    assert variance == pytest.approx(0.9 + 0.1 * scores.var(axis=0, ddof=1))
    assert head(features).detach().numpy() == pytest.approx((scores - mean) / (variance + 1e-6) ** 0.5, rel=1e-9)
    head.train().grow(3)
    assert head.norm.running_mean.tolist() == [0] * 6
    assert head(features[:1]).isfinite().all()


def test_gradients_together_are_limited():
    x = nn.Parameter(torch.zeros(2))
    descend((torch.tensor([30.0, 40.0]) * x).sum(), optim.SGD([x], lr=1.0), [x], None, clip_norm=10.0)
    assert x.tolist() == pytest.approx([-6, -8], rel=1e-5)
    descend((torch.tensor([0.3, 0.4]) * x).sum(), optim.SGD([x], lr=1.0), [x], None, clip_norm=10.0)
    assert x.tolist() == pytest.approx([-6.3, -8.4], rel=1e-5)


def test_it_learns_the_toys():
    test = toy_images(seed=1).subset(toy_images(seed=1).rows(0, 4))
    predicted = learned(tiny("gdumb", epochs=20), 2).predict(test.images)
    assert (predicted == test.labels).float().mean() > 0.5  # chance is 0.25
