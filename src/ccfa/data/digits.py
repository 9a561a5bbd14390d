"""The handwritten digits that come with scikit-learn: small enough to learn from in seconds."""

import numpy as np

from ccfa.data.images import ImageSet
from ccfa.data.registry import register_data
from ccfa.data.transforms import Transforms

DIGITS = Transforms((0.3063,), (0.3766,), padding=1)  # no flip: a mirrored digit is not that digit

_BALANCED = {"balanced_epochs": 20}
_WITHOUT_MEMORY = {"epochs": 10, "batch_size": 64, "lr": 3e-3}


@register_data(
    "digits",
    scenario="B5-inc1",
    options={"backbone": "small", "transforms": DIGITS, "epochs": 20, "batch_size": 16, "memory": 4},
    method_options={
        "podnet": _BALANCED,
        "afc": _BALANCED,
        "aanet": {**_BALANCED, "epochs": 12},
        "aanet-ucir": {"epochs": 12},
        "aanet-afc": {**_BALANCED, "epochs": 12},
        "icarl": {"lr": 0.5},
        "bic": {"correction_epochs": 40},
        "gdumb": {"epochs": 16},  # cycles of the rate end at powers of 2
        "il2a": {**_WITHOUT_MEMORY, "mixing_rounds": 2},
        "pass": _WITHOUT_MEMORY,
        "ccfa": {"count": 1},  # by accuracy on held-out training images
    },
)
def load_digits_images() -> tuple[ImageSet, ImageSet]:
    """1,797 handwritten digits, 10 classes, 1 x 8 x 8; comes with scikit-learn"""
    from sklearn.datasets import load_digits

    digits = load_digits()
    scaled = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # the source counts 0 to 16
    everything = ImageSet(scaled[:, None], digits.target.astype(np.int64), [str(digit) for digit in range(10)])
    return everything.hold_out(0.25, seed=0)
