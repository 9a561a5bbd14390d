"""Classification criteria l_cls: one value a row, from logits already multiplied by the head's scale eta."""

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
    """iCaRL's: one sigmoid a class against the one-hot label, averaged over classes."""
    targets = (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).to(logits)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)


def _at_label(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels[:, None]).squeeze(1)


def _without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits with minus infinity at the label."""
    return logits.scatter(1, labels[:, None], float("-inf"))
