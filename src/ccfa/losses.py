"""Losses as functions of tensors: on class scores, and the distillation penalties L_dist.

A criterion l_cls gives one value per row of scaled logits. A penalty compares what the previous network and the current
one compute.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)_y."""
    return F.cross_entropy(logits, labels, reduction="none")


def nca(logits: Tensor, labels: Tensor) -> Tensor:
    """NCA as PODNet's published code computes it: -l_y + log(exp(max_j l_j) + sum_{j != y} exp(l_j)).

    That code subtracts its margin from every class, so that it cancels, and replaces the target in the denominator by
    the largest logit instead of removing it.
    """
    largest = logits.amax(dim=1, keepdim=True)
    denominator = torch.cat([largest, _without_label(logits, labels)], dim=1)
    return denominator.logsumexp(dim=1) - _at_label(logits, labels)


def nca_exclusive(logits: Tensor, labels: Tensor) -> Tensor:
    """NCA as the paper writes it: [ -log( exp(l_y) / sum_{j != y} exp(l_j) ) ]_+, the margin being the head's."""
    return F.relu(_without_label(logits, labels).logsumexp(dim=1) - _at_label(logits, labels))


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """iCaRL's: one sigmoid per class against the one-hot label, averaged over classes."""
    targets = (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).to(logits)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)


def margin_ranking(
    similarities: Tensor, labels: Tensor, num_old: int, margin: float = 0.5, num_negatives: int = 2
) -> Tensor:
    """UCIR's: mean over old-class rows and their hardest new classes m of [margin - s_y + s_m]_+; 0 without old rows.

    A stage with fewer than `num_negatives` new classes uses all of them; published code fails there.
    """
    hardest = similarities[:, num_old:].topk(min(num_negatives, similarities.shape[1] - num_old)).values
    own = similarities.gather(1, labels[:, None])
    is_old = (labels < num_old).to(similarities)
    losses = F.relu(margin - own + hardest).mean(dim=1)
    return (is_old * losses).sum() / is_old.sum().clamp(min=1)


def semantic_augmentation(
    prototypes: Tensor,
    covariances: Tensor,
    labels: Tensor,
    weights: Tensor,
    biases: Tensor,
    strength: float,
    scale: Tensor,
) -> Tensor:
    """IL2A's L_seman: cross-entropy of scale * (w_c m_y + b_c + (strength / 2) (w_c - w_y)^T S_y (w_c - w_y)).

    At scale 1 it bounds the expected cross-entropy of features drawn from N(m_y, strength * S_y) from above. Rows of
    `prototypes` and `covariances` belong to `labels`.
    """
    differences = weights - weights[labels][:, None]  # (B, classes, dim)
    variances = (differences @ covariances * differences).sum(dim=2)
    logits = F.linear(prototypes, weights, biases) + strength / 2 * variances
    return F.cross_entropy(scale * logits, labels)


def _at_label(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels[:, None]).squeeze(1)


def _without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits with minus infinity at the label."""
    return logits.scatter(1, labels[:, None], float("-inf"))


def pod_spatial(previous: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor:
    """POD-spatial as published code computes it: mean over levels and rows of || n(p(A'^2)) - n(p(A^2)) ||_2.

    p sums the squared map over its width and over its height and concatenates; n normalises the whole vector of a row.
    """
    distances = [
        row_norm(_pooled(_squares(old)) - _pooled(_squares(new))) for old, new in zip(previous, current, strict=True)
    ]
    return torch.stack([distance.mean() for distance in distances]).mean()


def pod_spatial_paper(previous: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor:
    """POD-width + POD-height as the paper writes them: absolute differences of the summed maps, summed over levels."""
    total = current[0].new_zeros(())
    for old, new in zip(previous, current, strict=True):
        for dim in (3, 2):
            difference = old.sum(dim=dim) - new.sum(dim=dim)
            total = total + difference.abs().flatten(1).sum(dim=1).mean()
    return total


def weighted_discrepancy(previous: Sequence[Tensor], current: Sequence[Tensor], importance: Sequence[Tensor]) -> Tensor:
    """AFC's loss as published code computes it: mean over levels, rows and channels of I_c || u(A'_c) - u(A_c) ||_2.

    u squares a channel of a row and normalises it over its positions; `importance` has one value per channel, by level.
    """
    distances = [
        (weights * row_norm(_unit_channels(old) - _unit_channels(new))).mean()
        for old, new, weights in zip(previous, current, importance, strict=True)
    ]
    return torch.stack(distances).mean()


def weighted_discrepancy_paper(
    previous: Sequence[Tensor], current: Sequence[Tensor], importance: Sequence[Tensor]
) -> Tensor:
    """AFC's loss as the paper writes it: sum over levels and channels of I_c || A'_c - A_c ||_F^2, mean over rows."""
    total = current[0].new_zeros((), dtype=importance[0].dtype)
    for old, new, weights in zip(previous, current, importance, strict=True):
        squares = (old - new).to(weights.dtype).square().sum(dim=(2, 3))
        total = total + (weights * squares).sum(dim=1).mean()
    return total


def cosine_distance(previous: Tensor, current: Tensor) -> Tensor:
    """1 - cos, averaged over rows: POD-flat and UCIR's less-forget loss as published code computes them."""
    return (1 - F.cosine_similarity(previous, current)).mean()


def squared_distance(previous: Tensor, current: Tensor) -> Tensor:
    """||h' - h||^2, averaged over rows: POD-flat as the paper writes it."""
    return (previous - current).square().sum(dim=1).mean()


def geodesic_distance(previous: Tensor, current: Tensor) -> Tensor:
    """GeoDL's as published code computes it: (f' - f)^T G (f' - f) for unit rows f' and f, averaged over rows."""
    previous, current = F.normalize(previous), F.normalize(current)
    root = geodesic_flow(previous, current)
    return ((previous - current) @ root).square().sum(dim=1).mean()


def geodesic_cosine_distance(previous: Tensor, current: Tensor) -> Tensor:
    """GeoDL's as the paper writes it: 1 - f'^T G f / sqrt(f'^T G f' f^T G f) for unit rows f' and f, averaged."""
    previous, current = F.normalize(previous), F.normalize(current)
    root = geodesic_flow(previous, current)
    return cosine_distance(previous @ root, current @ root)


@torch.no_grad()
def geodesic_flow(previous: Tensor, current: Tensor) -> Tensor:
    """A root K of the geodesic flow kernel G = K K^T: the mean projection on the way between two subspaces of rows.

    The subspaces meet in principal vectors a, b at angles t. On the way from a to b, the mean projection onto the
    vector in between is (1 + sin t / t) / 2 along a + b, and (1 - sin t / t) / 2 along b - a.
    """
    if min(previous.shape) < 3:  # no dimension is left, see `_subspace`
        return torch.eye(previous.shape[1], dtype=previous.dtype, device=previous.device)
    start, end = _subspace(previous), _subspace(current)  # (D, k)
    left, cosines, right = torch.linalg.svd(start.mT @ end)
    cosines = cosines.clamp(max=1)
    a, b = start @ left, end @ right.mT
    share = torch.sinc(cosines.arccos() / math.pi)  # sin t / t
    along = ((1 + share) / (4 * (1 + cosines))).sqrt()  # |a + b|^2 = 2 + 2 cos t
    across = ((1 - share) / (4 * (1 - cosines)).clamp(min=torch.finfo(share.dtype).tiny)).sqrt()
    return torch.cat([(a + b) * along, (b - a) * across], dim=1).to(previous.dtype)


def _subspace(rows: Tensor) -> Tensor:
    """An orthonormal basis (D, k) of the main directions of rows (N, D), each less its own mean as in GeoDL's code.

    k = min(N, D) - 2. Columns are zero if there are fewer directions, for example where images repeat.
    """
    # If training diverges the loss says so, not the decomposition.
    centred = (rows - rows.mean(dim=1, keepdim=True)).double().nan_to_num(0, 0, 0)
    squares, vectors = torch.linalg.eigh(centred @ centred.mT)  # ascending
    first = len(rows) - (min(rows.shape) - 2)
    squares, vectors = squares[first:], vectors[:, first:]
    lengths = torch.where(squares > 1e-10 * squares[-1], squares, math.inf).sqrt()
    basis: Tensor = centred.mT @ vectors / lengths
    return basis


def frobenius_distance(previous: Tensor, current: Tensor, weights: Tensor) -> Tensor:
    """IL2A's: || diag(weights) (current - previous) ||_F over the whole batch, neither squared nor averaged."""
    distance: Tensor = torch.linalg.vector_norm(weights[:, None] * (current - previous))
    return distance


def softened_cross_entropy(previous: Tensor, current: Tensor, temperature: float) -> Tensor:
    """BiC's: -sum_c softmax(o'/T)_c log softmax(o/T)_c over old classes, averaged over rows, without a factor T^2."""
    targets = (previous / temperature).softmax(dim=1)
    return -(targets * (current / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def balanced_distillation(teacher: Tensor, student: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """FOSTER's: the same over all classes, where the teacher's probabilities are multiplied by weights of the classes.

    They are divided by their sum again.
    """
    targets = weights * (teacher / temperature).softmax(dim=1)
    targets = targets / targets.sum(dim=1, keepdim=True)
    return -(targets * (student / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """Weights of classes with n images, (1 - beta) / (1 - beta^n), scaled to a mean of 1 (Cui et al., CVPR 2019)."""
    weights = (1 - beta) / (1 - beta**counts)
    return weights / weights.mean()


def softened_sigmoids(previous: Tensor, current: Tensor, temperature: float) -> Tensor:
    """inclearn's for BiC: binary cross-entropy of sigmoid(o/T) to sigmoid(o'/T), averaged over rows and old classes."""
    return F.binary_cross_entropy_with_logits(current / temperature, (previous / temperature).sigmoid())


def sigmoids_for_labels(previous: Tensor, current: Tensor, targets: Tensor, share: Tensor) -> Tensor:
    """iCaRL's: old classes' BCE to the previous sigmoids, less `share` of that to the labels; one sum per row."""
    distilled = F.binary_cross_entropy_with_logits(current, previous.sigmoid(), reduction="none")
    labelled = F.binary_cross_entropy_with_logits(current, targets, reduction="none")
    return (distilled - share * labelled).sum(dim=1)


def row_norm(difference: Tensor) -> Tensor:
    """The L2 norm of each row (last dimension), with gradient 0, not NaN, where it is zero."""
    squares = difference.square().sum(dim=-1)
    positive = squares > 0
    # The inner `where` keeps sqrt away from 0, whose gradient is infinite even when its value is not used.
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def _squares(maps: Tensor) -> Tensor:
    """The squared maps, in float32 or better: sums over 16-bit squares would lose what they compare."""
    return maps.to(torch.promote_types(maps.dtype, torch.float32)).square()


def _pooled(maps: Tensor) -> Tensor:
    """Sums over the width and over the height, concatenated and normalised as one vector per row."""
    strips = torch.cat([maps.sum(dim=3).flatten(1), maps.sum(dim=2).flatten(1)], dim=1)
    return F.normalize(strips)


def _unit_channels(maps: Tensor) -> Tensor:
    """The squared map of each channel as a unit vector (B, C, positions), in single precision at least."""
    squares = _squares(maps)
    return F.normalize(squares.flatten(2), dim=2)
