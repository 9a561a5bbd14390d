"""Augmentations: Cross-Class Feature Augmentation and the samples it works on."""

from ccfa.augmentation.ccfa import CCFA, cross_class_features
from ccfa.augmentation.mixing import MIXES, CutMix, ManifoldMixup, Mixup
from ccfa.augmentation.samples import (
    Criterion,
    FeatureAugmentation,
    ImageAugmentation,
    LateAugmentation,
    MixedImages,
    Samples,
    classification_loss,
    weighing_labels,
)

__all__ = [
    "CCFA",
    "MIXES",
    "Criterion",
    "CutMix",
    "FeatureAugmentation",
    "ImageAugmentation",
    "LateAugmentation",
    "ManifoldMixup",
    "MixedImages",
    "Mixup",
    "Samples",
    "classification_loss",
    "cross_class_features",
    "weighing_labels",
]
