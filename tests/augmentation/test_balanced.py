"""Balanced targets against the linear program solved exactly, and what must hold whatever the scores are."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array, eye_array, vstack
from torch._subclasses.fake_tensor import FakeTensorMode

from ccfa.augmentation import CCFA, Samples, targets
from ccfa.augmentation.targets import Balanced, draw_places, most_confident, target_rule
from ccfa.errors import UsageError
from ccfa.kernels import LAUNCHED, balanced_assignment
from ccfa.losses import cross_entropy
from ccfa.models import CosineHead, LinearHead
from cuda_on_cpu import in_reverse
from toys import seeded

NUM_ROWS, TOLERANCE = 128, 0.003


def allowed_confidences(confidences, labels, num_old: int, k: int):
    """W (N, old) with NaN wherever S must be zero: the own classes and all but the k highest others."""
    matrix = np.array(confidences[:, :num_old], dtype=np.float64)
    for row, own in zip(matrix, labels, strict=True):
        row[[label for label in own if label < num_old]] = np.nan
        best = np.argsort(np.where(np.isnan(row), -np.inf, row))[::-1][:k]
        row[np.setdiff1d(np.arange(num_old), best)] = np.nan
    return matrix


def exact(matrix):
    """The S (N, old) that solves eq. 2, relaxed: max <W, S> - sum(t) with -t <= n - u <= t, in variables (S, t)."""
    num_rows, num_old = matrix.shape
    rows, columns = np.nonzero(~np.isnan(matrix))
    places = np.arange(len(rows))
    sums = coo_array((np.ones(len(rows)), (columns, places)), shape=(num_old, len(rows) + num_old))
    slack = coo_array(np.hstack([np.zeros((num_old, len(rows))), eye_array(num_old).todense()]))
    solution = linprog(
        np.concatenate([-matrix[rows, columns], np.ones(num_old)]),
        A_ub=vstack([sums - slack, -sums - slack]),
        b_ub=np.repeat([num_rows / num_old, -num_rows / num_old], num_old),
        A_eq=coo_array((np.ones(len(rows)), (rows, places)), shape=(num_rows, len(rows) + num_old)),
        b_eq=np.ones(num_rows),
        method="highs",
    )
    assert solution.status == 0
    dense = np.zeros(matrix.shape)
    dense[rows, columns] = solution.x[: len(rows)]
    return dense


def dense_of(assigned, classes, matrix):
    """S (N, old) of an assignment given as places and their classes."""
    dense = np.zeros(matrix.shape)
    for row, (masses, its_classes) in enumerate(zip(assigned.numpy(), classes.numpy(), strict=True)):
        for mass, its_class in zip(masses, its_classes, strict=True):
            if mass > 0:
                dense[row, its_class] += mass
    np.testing.assert_allclose(dense.sum(axis=1), 1, atol=1e-4)
    assert not np.isnan(matrix[dense > 0]).any()
    return dense


def confidence(dense, matrix) -> float:
    """<W, S>."""
    return np.nansum(matrix * dense)


def imbalance(dense) -> float:
    """sum_j |n_j - u|."""
    num_rows, num_old = dense.shape
    return np.abs(dense.sum(axis=0) - num_rows / num_old).sum()


def of_a_cosine_head(num_old: int, seed: int, scale: float = 12.0):
    """Logits of 128 rows near the weights of their classes, ten of them new."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal((num_old + 10, 32))
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    labels = random.integers(0, num_old + 10, NUM_ROWS)
    features = weights[labels] + 0.15 * random.standard_normal((NUM_ROWS, 32))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return scale * features @ weights.T, labels


def of_random_numbers(num_old: int, seed: int):
    """Logits in which some classes are everybody's favourites."""
    random = np.random.default_rng(seed)
    logits = 2 * random.standard_normal((NUM_ROWS, num_old + 10)) + 2 * random.standard_normal(num_old + 10)
    return logits, random.integers(0, num_old + 10, NUM_ROWS)


@pytest.mark.parametrize("k", [3, 10])
@pytest.mark.parametrize("scores", ["softmax", "logits"])
@pytest.mark.parametrize(
    ("made", "num_old"), [(of_a_cosine_head, 50), (of_a_cosine_head, 950), (of_random_numbers, 90)]
)
def test_the_objective_is_that_of_the_linear_program(made, num_old, scores, k):
    logits, labels = made(num_old, seed=0)
    logits, labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)[:, None]
    confidences = logits.softmax(dim=1) if scores == "softmax" else logits
    matrix = allowed_confidences(confidences.numpy(), labels.numpy(), num_old, k)
    assigned, classes, valid = Balanced(k, scores).assignment(logits, labels, num_old)
    assert valid.all()
    best, found = exact(matrix), dense_of(assigned, classes, matrix)
    gap = (confidence(best, matrix) - imbalance(best) - confidence(found, matrix) + imbalance(found)) / NUM_ROWS
    assert -1e-5 < gap < TOLERANCE


@pytest.mark.parametrize("scores", ["softmax", "logits"])
@pytest.mark.parametrize(
    ("made", "num_old", "k", "num_rows"),
    [
        (of_a_cosine_head, 50, 10, 128),
        (of_a_cosine_head, 950, 5, 128),
        (of_random_numbers, 90, 16, 128),
        (of_a_cosine_head, 6, 6, 97),  # own classes take places
        (of_a_cosine_head, 50, 10, 1),
    ],
)
def test_the_kernel_makes_the_same_assignment(device, monkeypatch, made, num_old, k, num_rows, scores):
    logits, labels = made(num_old, seed=0)
    logits, labels = torch.tensor(logits[:num_rows], dtype=torch.float32), torch.tensor(labels[:num_rows, None])
    found, classes, valid = Balanced(k, scores).assignment(logits.to(device), labels.to(device), num_old)
    with in_reverse():
        again, _, _ = Balanced(k, scores).assignment(logits.to(device), labels.to(device), num_old)
    assert torch.equal(found, again)
    assert ("balanced.cu", "balance") in LAUNCHED
    monkeypatch.setattr(targets, "balanced_assignment", lambda *problem: asked.append(problem))
    asked = []
    expected, expected_classes, expected_valid = Balanced(k, scores).assignment(logits.double(), labels, num_old)
    assert len(asked) == 1
    assert torch.equal(valid.cpu(), expected_valid)
    same = (classes.cpu() == expected_classes).all(dim=1)  # float32 may order two classes differently
    assert same.double().mean() > 0.95
    torch.testing.assert_close(found.cpu().double()[same], expected[same], atol=5e-4, rtol=0)


@pytest.mark.parametrize("places", [2, 3, 10, 16])
def test_the_kernel_takes_candidates_in_any_order(device, places):
    generator = seeded(0)
    confidences = torch.randn(60, places, generator=generator).sort(dim=1).values  # the lowest first
    classes = torch.rand(60, 20, generator=generator).argsort(dim=1)[:, :places]
    classes[0], confidences[1] = 20, 0  # no class is left; all are alike
    problem = confidences.to(device), classes.to(device), 20, torch.tensor(3.0, device=device)
    found = balanced_assignment(*problem, targets.ITERATIONS, targets.RESTART, targets.PRICE_WEIGHT)
    expected = targets.solve(confidences.double(), classes, 20, torch.tensor(3.0))
    torch.testing.assert_close(found.cpu().double(), expected, atol=5e-4, rtol=0)


def test_when_no_kernel_can_balance(device):
    confidences, classes, share = torch.rand(4, 3), torch.tensor([[0, 1, 2]] * 4), torch.tensor(1.0)
    confidences, classes, share = (part.to(device) for part in (confidences, classes, share))
    assert balanced_assignment(confidences, classes, 5, share, 2, 50, 3.0) is not None
    assert balanced_assignment(confidences.double(), classes, 5, share, 2, 50, 3.0) is None
    assert balanced_assignment(confidences, classes, 5, share.to("meta"), 2, 50, 3.0) is None
    assert balanced_assignment(confidences, classes, 20_000, share, 2, 50, 3.0) is None
    assert balanced_assignment(confidences[:0], classes[:0], 5, share, 2, 50, 3.0) is None
    assert balanced_assignment(confidences.repeat(129, 1), classes.repeat(129, 1), 5, share, 2, 50, 3.0) is None
    assert balanced_assignment(confidences.repeat(1, 6), classes.repeat(1, 6), 5, share, 2, 50, 3.0) is None


def with_own_probability(own, num_old: int):
    """Logits of a cosine head in which each row's own class has the probability `own` (one, or one a row)."""
    logits, labels = of_a_cosine_head(num_old, seed=1, scale=6.0)
    rows = np.arange(NUM_ROWS)
    logits[rows, labels] = -np.inf
    logits[rows, labels] = np.log(np.exp(logits).sum(axis=1)) + np.log(own / (1 - own))
    return logits, labels


@pytest.mark.parametrize(("num_old", "k"), [(50, 3), (99, 10), (6, 6)])  # 6 of 6: own classes take places
@pytest.mark.parametrize("own", [0.3, 0.999, np.random.default_rng(0).uniform(0.3, 0.99, NUM_ROWS)])
def test_confidence_gained_is_that_of_the_linear_program(own, num_old, k):
    """The objective hides it: beside a sure own class, all confidences together are smaller than its tolerance."""
    logits, labels = with_own_probability(own, num_old)
    logits, labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)[:, None]
    matrix = allowed_confidences(logits.softmax(dim=1).numpy(), labels.numpy(), num_old, k)
    assigned, classes, _ = Balanced(k).assignment(logits, labels, num_old)
    ours, best = dense_of(assigned, classes, matrix), exact(matrix)
    allowed = ~np.isnan(matrix)
    evenly = confidence(allowed / allowed.sum(axis=1, keepdims=True), matrix)
    assert confidence(ours, matrix) - evenly > 0.95 * (confidence(best, matrix) - evenly)
    assert (imbalance(ours) - imbalance(best)) / NUM_ROWS < TOLERANCE / 2


def test_one_class_is_the_most_confident():
    logits, labels = of_a_cosine_head(50, 0)
    # Ties and confidences that softmax rounds to zero must not matter.
    arguments = torch.tensor(logits).mul(40).round().float(), torch.tensor(labels)[:, None], 50, 3
    balanced, confident = (rule(*arguments, seeded(0)) for rule in (Balanced(1), most_confident))
    assert torch.equal(balanced.classes, confident.classes)
    assert torch.equal(balanced.valid, confident.valid)


@pytest.mark.parametrize(("num_old", "own_logit"), [(4, 0.0), (50, 0.0), (10, 1e4)])  # softmax rounds others to 0
def test_equal_scores_are_spread_evenly(num_old, own_logit):
    logits, labels = torch.zeros(NUM_ROWS, num_old + 2), torch.full((NUM_ROWS, 1), num_old)
    logits[:, num_old] = own_logit
    assigned, classes, _ = Balanced(num_old).assignment(logits, labels, num_old)
    sums = torch.zeros(num_old).index_add(0, classes.flatten(), assigned.flatten())
    torch.testing.assert_close(sums, torch.full((num_old,), NUM_ROWS / num_old), atol=1e-3, rtol=0)


def test_rows_with_few_classes_take_what_they_may():
    labels = torch.tensor([[0, 1], [0, 0], [2, 1], [4, 5], [2, 2]])
    for num_old, expected in [(2, [False, True, True, True, True]), (3, [True] * 5)]:
        drawn = Balanced(10)(torch.randn(5, 6, generator=seeded(0)), labels, num_old, 200, seeded(1))
        assert drawn.valid.tolist() == [expected] * 200
        assert ((drawn.classes >= 0) & (drawn.classes < num_old)).all()
        for row in np.flatnonzero(expected):
            assert set(drawn.classes[:, row].tolist()) <= set(range(num_old)) - set(labels[row].tolist())


def test_rows_without_a_class_do_not_count():
    logits = torch.zeros(8, 4)
    labels = torch.tensor([[0, 1]] * 4 + [[2, 3]] * 4)
    logits[:4, 0] = 5.0
    assigned, classes, valid = Balanced(2).assignment(logits, labels, 2)
    assert valid.tolist() == [False] * 4 + [True] * 4
    torch.testing.assert_close(assigned[4:].sum(dim=0), torch.tensor([2.0, 2.0]), atol=1e-3, rtol=0)
    assert (classes[:4] == 2).all()


def test_places_are_drawn_as_often_as_the_assignment_says():
    assigned = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 1.0, 0.0, 0.0]])
    places = draw_places(assigned, 20000, seeded(0))
    shares = torch.nn.functional.one_hot(places, 4).float().mean(dim=0)
    torch.testing.assert_close(shares, assigned, atol=0.015, rtol=0)
    assert (shares[assigned == 0] == 0).all()
    assert torch.equal(places, draw_places(assigned, 20000, seeded(0)))
    assert not torch.equal(places[:50], draw_places(assigned, 50, seeded(1)))


def test_no_operator_looks_at_the_data():
    with FakeTensorMode():  # its tensors have no data
        drawn = Balanced(5)(torch.randn(32, 20), torch.randint(0, 20, (32, 2)), 15, 3, torch.Generator())
    assert drawn.classes.shape == drawn.valid.shape == (3, 32)


def test_ccfa_with_balanced_targets_reaches_more_classes():
    head, old_head = CosineHead(16), CosineHead(16)
    old_head.grow(20, seeded(0))
    head.grow(24, seeded(0))
    features = torch.randn(1, 16, generator=seeded(1)) + 0.3 * torch.randn(40, 16, generator=seeded(2))
    samples = Samples.of(torch.nn.functional.normalize(features), torch.full((40,), 22))
    reached = {}
    for target in ("most-confident", "balanced-10", "balanced-10-logits"):
        augmented = CCFA(count=1, steps=60, target=target)(samples, head, old_head, cross_entropy, seeded(3))
        assert augmented.features.shape == (80, 16)
        reached[target] = len(set(augmented.labels[40:, 0].tolist()))
    assert reached["balanced-10"] > 2 * reached["most-confident"]
    assert reached["balanced-10-logits"] > reached["most-confident"]


def test_rules_have_names_and_limits():
    assert target_rule("balanced-10") == Balanced(10)
    assert target_rule("balanced-3-logits") == Balanced(3, "logits")
    for name in ("balanced", "balanced-0", "balanced-x", "balanced-3-softmax"):
        with pytest.raises(UsageError, match=rf"{name}.*balanced-K-logits"):
            CCFA(target=name)


def test_temporary_outputs_are_no_seen_classes():
    def draws(num_auxiliary):
        generator = torch.Generator().manual_seed(0)
        head = LinearHead(8)
        head.grow(6, generator)
        old_head = LinearHead(8)
        old_head.grow(4, generator)
        head.grow(2, generator)
        rows = torch.full((num_auxiliary, 9), 5.0)  # outputs that would take most of a softmax over everything
        head.new = torch.nn.Parameter(torch.cat([head.new.detach(), rows]))
        head.num_auxiliary = num_auxiliary
        samples = Samples.of(torch.randn(32, 8, generator=generator), torch.randint(8, (32,), generator=generator))
        return CCFA(count=2, target="balanced-3")(samples, head, old_head, cross_entropy, generator)

    for plain, auxiliary in zip(draws(0), draws(3), strict=True):
        assert torch.equal(plain, auxiliary)
