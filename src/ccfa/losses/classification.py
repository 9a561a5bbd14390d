"""Losses on class scores: the criteria l_cls (one value per row of scaled logits), UCIR's ranking, IL2A's Gaussians."""

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
