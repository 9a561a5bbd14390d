"""UCIR's inter-class separation."""

from torch import Tensor
from torch.nn import functional as F


def margin_ranking(
    similarities: Tensor, labels: Tensor, num_old: int, margin: float = 0.5, num_negatives: int = 2
) -> Tensor:
    """Mean over old-class rows and their hardest new classes m of [margin - s_y + s_m]_+ ; 0 without old rows.

    Published code asks for `num_negatives` new classes and fails on a stage that has fewer; here they are all taken.
    """
    hardest = similarities[:, num_old:].topk(min(num_negatives, similarities.shape[1] - num_old)).values
    own = similarities.gather(1, labels[:, None])
    is_old = (labels < num_old).to(similarities)
    losses = F.relu(margin - own + hardest).mean(dim=1)
    return (is_old * losses).sum() / is_old.sum().clamp(min=1)
