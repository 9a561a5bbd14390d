"""Backbones, heads, and the network they make together."""

from ccfa.models.backbone import (
    BACKBONES,
    Backbone,
    BackboneBuilder,
    Branches,
    ChainBackbone,
    Features,
    backbone_builder,
    register_backbone,
    wrap,
)
from ccfa.models.heads import CosineHead, Head, LinearHead, LocalSimilarityHead, Network, flattened
from ccfa.models.pretrained import Timm, load_weights, pretrained_config, with_weights
from ccfa.models.resnet import ResNet

__all__ = [
    "BACKBONES",
    "Backbone",
    "BackboneBuilder",
    "Branches",
    "ChainBackbone",
    "CosineHead",
    "Features",
    "Head",
    "LinearHead",
    "LocalSimilarityHead",
    "Network",
    "ResNet",
    "Timm",
    "backbone_builder",
    "flattened",
    "load_weights",
    "pretrained_config",
    "register_backbone",
    "with_weights",
    "wrap",
]
