"""Read-outs in closed form, on a backbone that is frozen after the first stage: RanPAC and ACIL.

RanPAC: McDonnell et al., "Random Projections and Pre-trained Models for Continual Learning", NeurIPS 2023. ACIL: Zhuang
et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection", NeurIPS 2022.
Both are ridge regression from random features h of an image to its class as a one-hot vector y. It needs two sums over
the images of all stages, G = sum h h' and Q = sum h y', and none of the images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.errors import UsageError
from ccfa.methods.frozen import First, LateHead, ReadOut, first_stage, frozen_after, new_images, require_head
from ccfa.methods.method import LearnerView, Method, Recipe, register_method
from ccfa.models import Head, LinearHead

RIDGES = tuple(10.0**power for power in range(-8, 9))  # RanPAC's candidates
FITTED = 0.8  # the fraction of a stage's images to which candidates are fitted; the others compare them
FEW = 5  # images of a class, of which fewer tell nothing about the ridge
ROWS_AT_ONCE = 4096  # images whose random features are in memory together


@register_method("ranpac", Recipe())
def ranpac(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
    projection: int = 2000,
    ridge: float | None = None,
    balanced: bool = False,
) -> Method:
    """RanPAC: ridge regression of random features.

    The backbone is trained in the first stage, or taken as it is with `epochs=0`.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
        projection: The number of random features; 0 means ridge regression on the embedding itself.
        ridge: The ridge; if none, it is chosen by held-out images at each stage of several classes with five images or
            more.
        balanced: Every class counts the same, however many images it has.
    """
    return _read_out(first_stage(recipe, first, milestones), projection, ridge, balanced)


@register_method("acil", Recipe())
def acil(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
    projection: int = 8192,
    ridge: float | None = 0.1,
    balanced: bool = False,
) -> Method:
    """ACIL: as RanPAC, with a fixed ridge and more features.

    The number and the scale of the random features are the published ones. The published recursion is not needed: it
    computes the same weights.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
        projection: The number of random features; 0 means ridge regression on the embedding itself.
        ridge: The ridge; if none, it is chosen as RanPAC's.
        balanced: Every class counts the same, however many images it has.
    """
    return _read_out(first_stage(recipe, first, milestones), projection, ridge, balanced, uniform=True)


def _read_out(first: Method, projection: int, ridge: float | None, balanced: bool, uniform: bool = False) -> Method:
    if projection < 0:
        raise UsageError(f"projection must be a number of random features, or 0 for none, got {projection}.")
    if ridge is not None and not 0 < ridge < math.inf:
        raise UsageError(f"ridge must be a positive number, or None to have it chosen, got {ridge}.")
    head = partial(ReadOutHead, num_random=projection, uniform=uniform)
    return frozen_after(first, head, partial(RidgeReadOut, ridge, balanced))


class ReadOutHead(LateHead):
    """Logits h(f) . row_c on random features h(f) = relu(f W), or on h(f) = f if there are none.

    W is drawn with the first classes: normal with a standard deviation of 1, or uniform in +-1/sqrt(dim).
    """

    projection: Tensor  # W (dim, random features)

    def __init__(
        self, dim: int, num_random: int, uniform: bool = False, stand_in: Callable[[int], Head] = LinearHead
    ) -> None:
        super().__init__(dim, (num_random or dim,), stand_in, uniform)
        self.num_random = num_random
        self.projection = nn.Buffer(torch.empty(0, num_random))

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        is_first = not self.num_classes
        super().grow(num_new, generator)
        if is_first and self.num_random:
            self.projection = self._drawn(generator).to(self.new)

    def _drawn(self, generator: Generator | None) -> Tensor:
        shape = self.dim, self.num_random
        if self.uniform:
            return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(self.dim)
        return torch.randn(shape, generator=generator)

    def hidden(self, features: Tensor) -> Tensor:
        """h(f) (B, random features)."""
        return F.relu(features @ self.projection) if self.num_random else features

    def similarities(self, features: Tensor) -> Tensor:
        """h(f) . row_c."""
        return F.linear(self.hidden(features), self.weights)


@dataclass(frozen=True)
class Sums:
    """All that ridge regression needs to know of images: two sums over them, in double precision."""

    gram: Tensor  # G = sum h h' (M, M)
    products: Tensor  # Q = sum h y' (M, classes)

    @classmethod
    def of(cls, head: ReadOutHead, embeddings: Tensor, labels: Tensor, weights: Tensor | None = None) -> "Sums":
        """The sums over images, given by their embeddings (N, dim), labels (N,) and weights (N,)."""
        size = head.new.shape[1]
        gram = torch.zeros(size, size, dtype=torch.float64, device=embeddings.device)
        products = torch.zeros(size, head.num_classes, dtype=torch.float64, device=embeddings.device)
        for rows in torch.arange(len(labels), device=labels.device).split(ROWS_AT_ONCE):
            hidden = head.hidden(embeddings[rows]).double()
            weighted = hidden if weights is None else hidden * weights[rows, None]
            gram.addmm_(weighted.T, hidden)
            products.addmm_(weighted.T, F.one_hot(labels[rows], head.num_classes).double())
        return cls(gram, products)

    @property
    def least_ridge(self) -> float:
        """The least ridge for which the system is not singular in double precision: M * eps * trace(G)."""
        return len(self.gram) * torch.finfo(torch.float64).eps * float(self.gram.trace())

    def solved(self, ridge: float) -> Tensor:
        """The rows (classes, M) with (G + ridge I) rows' = Q."""
        system = self.gram.clone()
        system.diagonal().add_(max(ridge, self.least_ridge))
        return torch.cholesky_solve(self.products, torch.linalg.cholesky(system)).T

    def error(self, rows: Tensor) -> float:
        """The sum of |rows h - y|^2 over the images, less that of |y|^2, which no rows can change."""
        return float((rows @ self.gram * rows).sum() - 2 * (rows * self.products.T).sum())


def chosen_ridge(fitted: Sums, held_out: Sums) -> float:
    """RanPAC's rule: the candidate with the least squared error on held-out images."""
    least = fitted.least_ridge
    candidates = sorted({max(ridge, least) for ridge in RIDGES})
    return min(candidates, key=lambda ridge: held_out.error(fitted.solved(ridge)))


def chosen_ridge_of_few(
    head: ReadOutHead, embeddings: Tensor, labels: Tensor, num_fitted: int, weights: Tensor | None = None
) -> float:
    """The same for fewer images than random features: one decomposition of the images' own system, h h', serves all."""
    hidden = head.hidden(embeddings).double()
    targets = F.one_hot(labels, head.num_classes).double()
    if weights is not None:
        hidden, targets = (part * weights.sqrt()[:, None] for part in (hidden, targets))
    fitted, held_out = hidden[:num_fitted], hidden[num_fitted:]
    values, vectors = torch.linalg.eigh(fitted @ fitted.T)
    least = hidden.shape[1] * torch.finfo(torch.float64).eps * float(values.sum())
    seen, known = held_out @ fitted.T @ vectors, vectors.T @ targets[:num_fitted]

    def error(ridge: float) -> float:
        return float((seen / (values.clamp(min=0) + ridge) @ known - targets[num_fitted:]).square().sum())

    return min(sorted({max(ridge, least) for ridge in RIDGES}), key=error)


class RidgeReadOut(ReadOut):
    """It keeps G and Q, and sets the head's rows to the solution of (G + ridge I) rows' = Q.

    With `balanced`, an image counts as one over the number of its class's images, so that a class of few images is
    not drowned by the others.
    """

    kind = ReadOutHead
    gram: Tensor
    products: Tensor
    ridge: Tensor  # the last one in use; 0 before the first stage

    def __init__(self, ridge: float | None, balanced: bool = False) -> None:
        super().__init__()
        self.fixed_ridge = ridge
        self.balanced = balanced
        self.register_buffer("gram", torch.empty(0, dtype=torch.float64))
        self.register_buffer("products", torch.empty(0, dtype=torch.float64))
        self.register_buffer("ridge", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def conclude(self, learner: LearnerView) -> None:
        """Add the new classes' images, choose the ridge and solve."""
        head, (embeddings, labels) = require_head(learner.network.head, ReadOutHead), new_images(learner)
        order = torch.randperm(len(labels), generator=learner.generator("read-out"), device=labels.device)
        embeddings, labels = embeddings[order], labels[order]
        num_fitted, weights = int(FITTED * len(labels)), self.weights(head, embeddings, labels)
        parts = (slice(num_fitted), slice(num_fitted, None))
        fitted, held_out = (
            Sums.of(head, embeddings[part], labels[part], None if weights is None else weights[part]) for part in parts
        )
        sizes = [len(own) for own in learner.new_classes()]
        if self.fixed_ridge is not None:
            self.ridge.fill_(self.fixed_ridge)
        elif len(sizes) > 1 and min(sizes) >= FEW:  # with one class, or a few images, held-out ones tell nothing
            few = num_fitted < head.new.shape[1]
            chosen = (
                chosen_ridge_of_few(head, embeddings, labels, num_fitted, weights)
                if few
                else chosen_ridge(fitted, held_out)
            )
            self.ridge.fill_(chosen)
        elif not self.ridge:
            self.ridge.fill_(float((fitted.gram + held_out.gram).trace()) / len(fitted.gram))
        self._solve(head, fitted, held_out)

    def learn(self, head: Head, embeddings: Tensor, labels: Tensor) -> None:
        """Add images and solve; the ridge stays."""
        known = require_head(head, ReadOutHead)
        self._solve(known, Sums.of(known, embeddings, labels, self.weights(known, embeddings, labels)))

    def weights(self, head: ReadOutHead, embeddings: Tensor, labels: Tensor) -> Tensor | None:
        """The weight of each image, which is counted now, or None if all are 1."""
        self.count(head.num_classes, embeddings, labels)
        return 1 / self.counts[labels] if self.balanced else None

    def _solve(self, head: ReadOutHead, *parts: Sums) -> None:
        """Add to G and Q, with columns for classes that are new, and solve."""
        if not len(self.gram):
            self.gram, self.products = (torch.zeros_like(sums) for sums in (parts[0].gram, parts[0].products))
        self.products = F.pad(self.products, (0, head.num_classes - self.products.shape[1]))
        for part in parts:
            self.gram += part.gram
            self.products += part.products
        head.set_rows(Sums(self.gram, self.products).solved(float(self.ridge)))
