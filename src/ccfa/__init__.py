"""Class-incremental learning with Cross-Class Feature Augmentation."""

__version__ = "0.1.0"
