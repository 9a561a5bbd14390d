"""Read-outs by class means and covariances, on a backbone that is frozen after the first stage.

SimpleCIL: Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models", IJCV 2024. SLDA: Hayes and
Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops 2020. FeCAM: Goswami
et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual Learning", NeurIPS 2023.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ccfa.errors import UsageError
from ccfa.methods.frozen import First, LateHead, ReadOut, first_stage, frozen_after, require_head
from ccfa.methods.method import Method, Recipe, register_method
from ccfa.models import Head, LinearHead


@register_method("simplecil", Recipe())
def simplecil(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
) -> Method:
    """SimpleCIL: the cosine to class means.

    The means are those of the embeddings of each class.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
    """
    return frozen_after(first_stage(recipe, first, milestones), MeanHead, Means)


@register_method("slda", Recipe())
def slda(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
    shrinkage: float = 1e-4,
) -> Method:
    """SLDA: linear discriminant analysis.

    There are class means and one covariance S for all classes.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
        shrinkage: The precision matrix is the inverse of (1 - shrinkage) S + shrinkage I.
    """
    if not 0 < shrinkage <= 1:
        raise UsageError(f"shrinkage must be above 0 and at most 1, got {shrinkage}.")
    return frozen_after(first_stage(recipe, first, milestones), DiscriminantHead, partial(Discriminant, shrinkage))


@register_method("fecam", Recipe())
def fecam(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
    covariance: Literal["class", "common"] = "class",
    power: float = 0.5,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    unit: bool = False,
) -> Method:
    """FeCAM: Mahalanobis distances to class means.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
        covariance: A covariance per class, or a common one.
        power: The exponent of Tukey's transform of the features; 1 leaves them as they are.
        alpha1: The weight of the mean variance in the shrinkage of covariances.
        alpha2: The weight of the mean covariance in the shrinkage of covariances.
        unit: Take means and covariances of unit vectors, and shrink once: published for transformers, with `power=1`
            and `alpha2=0`.
    """
    if not 0 < power <= 1:
        raise UsageError(f"power must be above 0 and at most 1, got {power}.")
    return frozen_after(
        first_stage(recipe, first, milestones),
        partial(MahalanobisHead, power=power, unit=unit),
        partial(Gaussians, covariance == "common", alpha1, alpha2),
    )


class MeanHead(LateHead):
    """cos(f, mu_c), where mu_c is the mean embedding of class c."""

    def __init__(self, dim: int, stand_in: Callable[[int], Head] = LinearHead) -> None:
        super().__init__(dim, (dim,), stand_in)

    def similarities(self, features: Tensor) -> Tensor:
        """cos(f, mu_c)."""
        return F.linear(F.normalize(features), F.normalize(self.weights))


class DiscriminantHead(LateHead):
    """w_c . f + b_c, with the bias as the last column of each block."""

    def __init__(self, dim: int, stand_in: Callable[[int], Head] = LinearHead) -> None:
        super().__init__(dim, (dim + 1,), stand_in)

    def similarities(self, features: Tensor) -> Tensor:
        """w_c . f + b_c."""
        return F.linear(features, self.weights[:, :-1], self.weights[:, -1])


class MahalanobisHead(LateHead):
    """Minus the squared distance |A_c (f' - m_c)|^2, where f' is the unit vector of the transformed feature.

    A_c' A_c is the inverse of the covariance of class c. There is one A if the classes have a common covariance. m_c is
    the transformed mean as a unit vector. With `unit`, m_c is the mean of the unit vectors.
    """

    factors: Tensor  # A (classes or 1, dim, dim)

    def __init__(
        self, dim: int, power: float, stand_in: Callable[[int], Head] = LinearHead, unit: bool = False
    ) -> None:
        super().__init__(dim, (dim,), stand_in)
        self.power = power
        self.unit = unit
        self.factors = nn.Buffer(torch.empty(0, dim, dim))

    def transformed(self, features: Tensor) -> Tensor:
        """Tukey's transform f^power, minus that of the absolute value if f < 0; with `unit`, scaled to length 1."""
        features = features if self.power == 1 else features.sign() * features.abs().pow(self.power)
        return F.normalize(features) if self.unit else features

    def similarities(self, features: Tensor) -> Tensor:
        """-|A_c (f' - m_c)|^2."""
        unit = F.normalize(self.transformed(features))
        seen = F.linear(unit, self.factors.flatten(0, 1)).unflatten(1, self.factors.shape[:2])  # (B, classes or 1, dim)
        means = (self.factors @ self.weights[:, :, None]).squeeze(2)  # (classes, dim)
        distances: Tensor = (seen - means).square().sum(dim=2)
        return -distances


class Means(ReadOut):
    """It keeps the sum of each class's embeddings; the head's rows are the means."""

    kind: ClassVar[type[LateHead]] = MeanHead
    sums: Tensor  # (classes, dim)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.empty(0, dtype=torch.float64))

    @property
    def means(self) -> Tensor:
        """The mean embedding of each class (classes, dim)."""
        return self.sums / self.counts[:, None]

    def learn(self, head: Head, embeddings: Tensor, labels: Tensor) -> None:
        """Add images to the sums, and compute the rows."""
        known = require_head(head, self.kind)
        self.count(head.num_classes, embeddings, labels)
        self.add(known, embeddings.double(), labels)
        self.compute(known)

    def add(self, head: LateHead, embeddings: Tensor, labels: Tensor) -> None:
        """Add images to the sums."""
        self.sums = summed(self.sums, embeddings, labels, head.num_classes)

    def compute(self, head: LateHead) -> None:
        """Set the head's rows."""
        head.set_rows(self.means)


class Discriminant(Means):
    """It keeps the sum of all outer products too, and sets the rows of linear discriminant analysis."""

    kind = DiscriminantHead
    products: Tensor  # sum f f' (dim, dim)

    def __init__(self, shrinkage: float) -> None:
        super().__init__()
        self.shrinkage = shrinkage
        self.register_buffer("products", torch.empty(0, dtype=torch.float64))

    def add(self, head: LateHead, embeddings: Tensor, labels: Tensor) -> None:
        """Add images to the sums."""
        super().add(head, embeddings, labels)
        self.products = multiplied(self.products, embeddings)

    def compute(self, head: LateHead) -> None:
        """Set the rows w_c = P mu_c and b_c = -mu_c' P mu_c / 2, with the precision matrix P.

        Means are counted from their own mean. This changes all logits of an image by the same number, and keeps them
        small enough for single precision.
        """
        means = self.means
        covariance = (self.products - (self.counts[:, None] * means).T @ means) / self.counts.sum()
        shrunk = (1 - self.shrinkage) * covariance
        shrunk.diagonal().add_(self.shrinkage)
        middle = means.mean(dim=0)
        apart = means - middle
        weights = torch.cholesky_solve(apart.T, torch.linalg.cholesky(shrunk)).T
        biases = -weights @ middle - (weights * apart).sum(dim=1) / 2
        head.set_rows(torch.cat([weights, biases[:, None]], dim=1))


class Gaussians(Means):
    """It keeps sums and outer products of transformed features, and sets FeCAM's means and inverse covariances."""

    kind = MahalanobisHead
    transformed: Tensor  # sum t(f) of each class (classes, dim)
    products: Tensor  # sum t(f) t(f)' of each class, or of all together (classes or 1, dim, dim)

    def __init__(self, is_common: bool, alpha1: float, alpha2: float) -> None:
        super().__init__()
        self.is_common = is_common
        self.alphas = alpha1, alpha2
        for name in ("transformed", "products"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float64))

    def add(self, head: LateHead, embeddings: Tensor, labels: Tensor) -> None:
        """Add images to the sums."""
        super().add(head, embeddings, labels)
        features = require_head(head, MahalanobisHead).transformed(embeddings)
        self.transformed = summed(self.transformed, features, labels, head.num_classes)
        if self.is_common:
            self.products = multiplied(self.products.squeeze(0), features)[None]
        else:
            dim = features.shape[1]
            known = self.products.view(-1, dim, dim)
            self.products = F.pad(known, (0, 0, 0, 0, 0, head.num_classes - len(known)))
            for label in labels.unique().tolist():
                self.products[label] += features[labels == label].T @ features[labels == label]

    def compute(self, head: LateHead) -> None:
        """Set the means and the factors of the inverse covariances."""
        known = require_head(head, MahalanobisHead)
        mean_of_units = self.transformed / self.counts[:, None]
        known.set_rows(mean_of_units if known.unit else F.normalize(known.transformed(self.means)))
        shrunk = self.covariances()
        for _ in range(1 if known.unit else 2):  # as the published code does
            shrunk = shrink(shrunk, *self.alphas)
        known.factors = inverse_factors(correlations(shrunk)).to(known.new)

    def covariances(self) -> Tensor:
        """The covariance of each class, or the pooled one. A class of one image takes the pooled one."""
        means = self.transformed / self.counts[:, None]
        between = self.transformed[:, :, None] * means[:, None, :]  # n mu mu'
        pooled = (self.products.sum(dim=0) - between.sum(dim=0)) / (self.counts - 1).sum().clamp(min=1)
        if self.is_common:
            return pooled[None]
        own = (self.products - between) / (self.counts - 1).clamp(min=1)[:, None, None]
        return torch.where(self.counts[:, None, None] > 1, own, pooled)


def summed(sums: Tensor, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The sums of each class (classes, dim), with rows for new classes and these features (N, dim) added."""
    known = sums.view(-1, features.shape[1])
    return F.pad(known, (0, 0, 0, num_classes - len(known))).index_add(0, labels, features)


def multiplied(products: Tensor, features: Tensor) -> Tensor:
    """The sum of outer products (dim, dim), with those of these features (N, dim) added."""
    added = features.T @ features
    return products + added if len(products) else added


def shrink(covariances: Tensor, alpha1: float, alpha2: float) -> Tensor:
    """S + alpha1 v I + alpha2 c (1 - I): v is the mean variance, and c the mean of all covariances that are not 0."""
    variances = torch.diagonal(covariances, dim1=1, dim2=2)
    others = covariances - torch.diag_embed(variances)
    mean = others.sum(dim=(1, 2)) / (others != 0).sum(dim=(1, 2)).clamp(min=1)
    eye = torch.eye(covariances.shape[1], dtype=covariances.dtype, device=covariances.device)
    return (
        covariances + (alpha1 * variances.mean(dim=1))[:, None, None] * eye + (alpha2 * mean)[:, None, None] * (1 - eye)
    )


def correlations(covariances: Tensor) -> Tensor:
    """S_ij / sqrt(S_ii S_jj). Features that do not vary at all have a variance of 1."""
    variances = torch.diagonal(covariances, dim1=1, dim2=2)
    varying = variances > 0
    scales = torch.where(varying, variances, 1).rsqrt()
    return covariances * scales[:, :, None] * scales[:, None, :] + torch.diag_embed((~varying).to(covariances))


def inverse_factors(matrices: Tensor) -> Tensor:
    """A with A' A = the pseudo-inverse of each symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrices)
    least = values[:, -1:] * matrices.shape[1] * torch.finfo(values.dtype).eps
    roots = torch.where(values > least, values.clamp(min=least).rsqrt(), 0)
    factors: Tensor = roots[:, :, None] * vectors.mT
    return factors
