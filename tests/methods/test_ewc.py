"""EWC's Fisher information, how it is merged, and the penalty."""

import numpy as np
import pytest
import torch

import reference
from ccfa.learning.step import step_losses
from toys import STAGES, begun, learned, tiny

LARGEST = 1e-4
NUM_HEAD = 65  # numbers of a class: 64 weights of the small backbone's embedding and a bias


def test_fisher_as_the_reference():
    learner = learned(tiny("ewc", epochs=1), 3)
    (term,), network = learner.terms, learner.network
    earlier = learned(tiny("ewc", epochs=1), 2).terms[0].fisher
    before = {key: value.clone() for key, value in network.state_dict().items()}
    term.fisher = earlier
    term.conclude(learner)
    found = term.fisher.double().numpy()
    moved = {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key, _ in network.named_buffers() if "running" in key or "num_batches" in key}
    assert torch.equal(term.state_dict()["fisher"], term.fisher)

    network.load_state_dict(before)
    gradients = []
    for images, labels in learner.training_batches(16, "elastic"):
        network.zero_grad()
        embedding = network.backbone(images).embedding
        logits = embedding @ network.head.weights[:, :-1].T + network.head.weights[:, -1]
        torch.nn.functional.cross_entropy(logits, labels).backward()
        parts = [parameter.grad.flatten().double().numpy() for parameter in network.backbone.parameters()]
        arrays = [part.detach().double().numpy() for part in (embedding, logits)]
        parts.append(reference.linear_gradient(*arrays, labels.numpy()).flatten())
        gradients.append(np.concatenate(parts))
    assert len(gradients) > 1
    new = reference.fisher(gradients, LARGEST)
    assert (new == LARGEST).any()
    assert (new < LARGEST).any()
    expected = reference.merged_fisher(earlier.double().numpy(), new, 4, 6)
    assert len(found) == len(expected) == len(earlier) + 2 * NUM_HEAD
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)


@pytest.fixture
def moved():
    """A learner in stage 1 whose parameters have moved away from the previous network's."""
    learner = begun(tiny("ewc", epochs=1), STAGES[1])
    with torch.no_grad():
        for parameter in learner.network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return learner


def losses_of(learner):
    rows, (main,) = learner.training_rows(), learner.method.phases(learner.stage)
    return step_losses(learner, rows, main, learner.generator("step")).read()


def flat(network):
    """The parameters as NumPy: backbone, then the rows of all classes."""
    parts = [*network.backbone.parameters(), network.head.weights]
    return np.concatenate([part.detach().double().flatten().numpy() for part in parts])


def test_penalty_as_the_reference(moved):
    fisher = moved.terms[0].fisher.double().numpy()
    expected = reference.elastic_penalty(fisher, flat(moved.network), flat(moved.previous), 1000.0)
    assert losses_of(moved)["elastic"].item() == pytest.approx(expected, rel=1e-4)


def test_gradient_pulls_back_what_mattered(moved):
    head, first, before = moved.network.head, *(next(n.parameters()) for n in (moved.network, moved.previous))
    found, old, new = torch.autograd.grad(losses_of(moved)["elastic"], [first, head.old, head.new])
    expected = 1000 * moved.terms[0].fisher[: first.numel()].view(first.shape) * (first - before)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-9)
    assert old.any()
    assert not new.any()  # new rows are free


def test_nothing_moved_costs_nothing():
    learner = begun(tiny("ewc", epochs=1), STAGES[2])
    assert losses_of(learner)["elastic"].item() == 0
