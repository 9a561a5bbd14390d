import math

import numpy as np
import pytest
import torch

import reference
from ccfa.data import Stage
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.step import step_losses
from ccfa.losses import geodesic_cosine_distance, geodesic_distance, geodesic_flow, squared_distance
from ccfa.methods.geodl import geodl
from ccfa.methods.ucir import ucir
from toys import STAGES, begun, learned, seeded, tiny


def features(num: int, dim: int, noise: float = 0.3) -> list[torch.Tensor]:
    """Features of an old network, and of a new one that differs by noise; unit rows."""
    random = np.random.RandomState(0)  # the legacy stream, which never changes
    old = random.randn(num, dim)
    new = old + noise * random.randn(num, dim)
    return [torch.nn.functional.normalize(torch.from_numpy(rows)) for rows in (old, new)]


@pytest.mark.parametrize(("num", "dim"), [(12, 40), (40, 12), (5, 5), (3, 8)])
def test_kernel_as_the_reference(num, dim):
    old, new = features(num, dim)
    root = geodesic_flow(old, new)
    kernel = reference.geodesic_kernel(old.numpy(), new.numpy())
    np.testing.assert_allclose((root @ root.mT).numpy(), kernel, atol=1e-10)
    products = [
        np.einsum("nd,de,ne->n", *parts) for parts in ((old, kernel, new), (old, kernel, old), (new, kernel, new))
    ]
    cosines = products[0] / np.sqrt(products[1] * products[2])
    assert geodesic_cosine_distance(5 * old, 7 * new).item() == pytest.approx((1 - cosines).mean(), rel=1e-9)
    distances = products[1] + products[2] - 2 * products[0]
    assert geodesic_distance(5 * old, 7 * new).item() == pytest.approx(distances.mean(), rel=1e-9)


def test_kernel_is_the_mean_projection_on_the_way():
    old, new = features(6, 20)
    start, end = (np.linalg.svd((rows - rows.mean(dim=1, keepdim=True)).numpy().T)[0][:, :4] for rows in (old, new))
    across = end @ np.linalg.inv(start.T @ end) - start  # tangents of the angles
    left, tangents, right = np.linalg.svd(across, full_matrices=False)
    angles, places = np.arctan(tangents), (np.arange(2000) + 0.5) / 2000
    mean = np.zeros((20, 20))
    for place in places:
        basis = start @ right.T * np.cos(place * angles) + left * np.sin(place * angles)
        mean += basis @ basis.T / len(places)
    root = geodesic_flow(old, new)
    np.testing.assert_allclose((root @ root.mT).numpy(), mean, atol=1e-7)


@pytest.mark.parametrize(
    ("noise", "distance", "cosine"),
    [(0.03, 0.00044562, 0.00022411), (0.3, 0.042102, 0.021577), (1.0, 0.31697, 0.18126)],
)
def test_values_of_the_published_functions(noise, distance, cosine):
    """They approximate the kernel, for 128 images in 256 dimensions to 0.1 %, and to 2.5 % for large angles."""
    old, new = features(128, 256, noise)
    assert geodesic_distance(old, new).item() == pytest.approx(distance, rel=2e-3 if noise < 1 else 0.03)
    assert geodesic_cosine_distance(old, new).item() == pytest.approx(cosine, rel=5e-3)


def test_equal_subspaces_are_projected_on():
    old, _ = features(6, 20)
    centred = old - old.mean(dim=1, keepdim=True)
    basis = torch.linalg.svd(centred.mT, full_matrices=False)[0][:, :4]
    root = geodesic_flow(old, old)
    torch.testing.assert_close(root @ root.mT, basis @ basis.mT)


def test_images_that_repeat_have_no_directions_of_their_own():
    old, new = features(8, 20)
    twice = torch.arange(8).repeat(2)
    root = geodesic_flow(old[twice], new[twice])
    singular = torch.linalg.svdvals(root)
    assert root.isfinite().all()
    assert (singular[:16] > 1e-3).all()
    assert (singular[16:] < 1e-6).all()


@pytest.mark.parametrize(("num", "dim"), [(1, 20), (2, 20), (20, 2)])
def test_too_few_images_for_a_subspace_are_compared_as_they_are(num, dim):
    old, new = features(num, dim)
    assert geodesic_distance(old, new).item() == pytest.approx(squared_distance(old, new).item())


def test_gradients_pass_by_the_kernel():
    old, new = features(6, 20)
    root = geodesic_flow(old, new)
    expected = -2 / 6 * (old - new) @ root @ root.mT
    current = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(geodesic_distance(old, current), current)
    along = (expected * new).sum(dim=1, keepdim=True) * new  # rows are normalised, so their length has no effect
    torch.testing.assert_close(gradient, expected - along)


def test_diverged_features_give_a_loss_that_is_not_finite():
    old, new = features(6, 20)
    new[2, 3] = math.nan
    assert not geodesic_distance(old, new).isfinite()


def test_term_takes_the_last_map_in_quarters(monkeypatch):
    monkeypatch.setattr("ccfa.data.Transforms.drawn", lambda self, images, draws: self.test(images))
    stage = Stage(1, 2, 3)
    learner = begun(tiny("geodl", epochs=1), stage)
    learner.network.eval()
    with torch.no_grad():
        for parameter in learner.network.backbone.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded()), alpha=0.2)
    rows = learner.training_rows()
    images = learner.method.transforms.test(learner.train.images[rows])
    with torch.no_grad():
        maps = [network.backbone(images).maps[-1] for network in (learner.previous, learner.network)]
    assert maps[0].shape[2:] == (2, 2)
    expected = 5 * math.sqrt(2 / 1) * geodesic_distance(*(level.flatten(1) for level in maps)).item()
    losses = step_losses(learner, rows, learner.method.phases(stage)[0], learner.generator("step")).read()
    assert losses.keys() == {"classification", "geodesic", "loss"}
    assert losses["geodesic"].item() == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-4


def test_options_choose_formula_and_ranking():
    assert [term().loss for term in geodl().terms] == [geodesic_distance]
    paper, ranking = geodl(distance="paper", margin_ranking=True).terms
    assert paper().loss is geodesic_cosine_distance
    assert (ranking().margin, ranking().num_negatives) == (ucir().terms[1]().margin, ucir().terms[1]().num_negatives)


def test_steps_with_decompositions_are_not_captured(monkeypatch):
    asked = []
    prepare = "ccfa.learning.acceleration.Acceleration.prepare"
    monkeypatch.setattr(prepare, lambda self, step, *others: asked.append(self.graph) or step)
    for name in ("geodl", "ucir"):
        learner = learned(tiny(name, epochs=1), 0, acceleration=Acceleration(graph=True))
        for stage in STAGES[:2]:
            learner.learn(stage)
    assert asked == [True, False, True, True]
