"""GeoDL: Simon, Koniusz and Harandi, "On Learning the Geodesic Path for Incremental Learning", CVPR 2021."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ccfa.errors import choose
from ccfa.losses import geodesic_cosine_distance, geodesic_distance
from ccfa.methods.method import Method, register_method
from ccfa.methods.parts import EmbeddingDistillation, old_to_new
from ccfa.methods.ucir import MarginRanking, without_distillation
from ccfa.models import Features


@register_method("geodl", without_distillation)
def geodl(
    method: Method,
    *,
    lambda_base: float = 5.0,
    distance: Literal["code", "paper"] = "code",
    margin_ranking: bool = False,
) -> Method:
    """GeoDL: UCIR, distilled along geodesics of subspaces.

    It has UCIR's head and training, and distills along the geodesic from the old to the new subspace of features.

    Args:
        lambda_base: The weight of the distillation before it is adapted to the number of classes.
        distance: The squared distance of the published code, or the paper's cosine.
        margin_ranking: Add UCIR's margin ranking, which the published command does not use.
    """
    loss = choose("distance", distance, {"code": geodesic_distance, "paper": geodesic_cosine_distance})
    terms = (partial(GeodesicDistillation, "geodesic", lambda_base, old_to_new, loss),)
    return replace(method, terms=(*terms, partial(MarginRanking, 0.5, 2)) if margin_ranking else terms)


class GeodesicDistillation(EmbeddingDistillation):
    """weight * factor(stage) * loss(last maps of f_{k-1}, last maps of f_k), where the maps are pooled to 2 x 2."""

    is_row_mean = False  # the subspaces are those of the whole batch
    can_be_captured = False  # matrix decompositions report to the host whether they converged

    def fuse(self, fused: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Nothing is gained by it: the decompositions take the time."""

    def distance(self, previous: Features, current: Features) -> Tensor:
        return self.loss(_quarters(previous.maps[-1]), _quarters(current.maps[-1]))


def _quarters(maps: Tensor) -> Tensor:
    """The means of the four quarters of each map (B, 4 C), in single precision at least."""
    return F.adaptive_avg_pool2d(maps.to(torch.promote_types(maps.dtype, torch.float32)), 2).flatten(1)
