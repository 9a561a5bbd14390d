"""Backbones, heads, and the network they make together."""

from ccfa.models.adjusted import CorrectedLinearHead, KeepingLinearHead, NormalisedLinearHead
from ccfa.models.backbone import Backbone, Features
from ccfa.models.heads import CosineHead, Head, LinearHead, LocalSimilarityHead
from ccfa.models.network import Network
from ccfa.models.resnet import BACKBONES

__all__ = [
    "BACKBONES",
    "Backbone",
    "CorrectedLinearHead",
    "CosineHead",
    "Features",
    "Head",
    "KeepingLinearHead",
    "LinearHead",
    "LocalSimilarityHead",
    "Network",
    "NormalisedLinearHead",
]
