"""The handwritten digits that come with scikit-learn: small enough to learn from in seconds."""

import numpy as np

from ccfa.data.images import ImageSet

_HELD_OUT = 0.25
_SPLIT_SEED = 0


def load_digits_images() -> tuple[ImageSet, ImageSet]:
    """Train and test sets of the 1,797 digits, 1 x 8 x 8, always split the same way."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    scaled = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # the source counts 0 to 16
    everything = ImageSet(scaled[:, None], digits.target.astype(np.int64), [str(digit) for digit in range(10)])
    return everything.hold_out(_HELD_OUT, _SPLIT_SEED)
