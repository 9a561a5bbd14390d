"""The data sets without a download: the digits that come with scikit-learn, and letters and digits drawn by Pillow."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ccfa.data.images import ImageSet
from ccfa.data.registry import register_data
from ccfa.data.transforms import Transforms
from ccfa.errors import ResourceError

if TYPE_CHECKING:
    from PIL.Image import Image

DIGITS = Transforms((0.3063,), (0.3766,), padding=1)  # no flip: a mirrored character is not that character
GLYPHS = Transforms((0.1619,), (0.2514,), padding=1)

_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SIDE = 12  # pixels of a glyph
_CANVAS = 48  # the side of the drawing that is reduced to an image
_FONT_SIZE = 42
_STROKES = range(4)  # pixels of the canvas that are added around the font's own lines
_WITHOUT_MEMORY = {"batch_size": 64, "lr": 3e-3}


def _foster_betas(memory: int) -> dict[str, float]:
    """Betas that weigh classes of so many exemplars as the published ones, 0.94 and 0.97, weigh those of 20."""
    return {"beta_boosting": 0.94 ** (20 / memory), "beta_compression": 0.97 ** (20 / memory)}


@register_data(
    "digits",
    scenario="B5-inc1",
    options={"backbone": "small", "transforms": DIGITS, "epochs": 20, "batch_size": 16, "memory": 4},
    method_options={
        "podnet": {"balanced_epochs": 20},
        "afc": {"balanced_epochs": 20},
        "aanet": {"epochs": 12, "balanced_epochs": 20},
        "aanet-ucir": {"epochs": 12},
        "aanet-afc": {"epochs": 12, "balanced_epochs": 20},
        "der": {"warmup_epochs": 2, "balanced_epochs": 20, "balanced_lr": 0.5},  # few steps
        "foster": {"boosting_epochs": 20, "compression_epochs": 20, **_foster_betas(4)},
        "icarl": {"lr": 0.5},
        "bic": {"correction_epochs": 40},
        "gdumb": {"epochs": 16},  # cycles of the rate end at powers of 2
        "il2a": {**_WITHOUT_MEMORY, "epochs": 10, "mixing_rounds": 2},
        "pass": {**_WITHOUT_MEMORY, "epochs": 10},
        "ranpac": {"projection": 1000},
        "acil": {"projection": 1000},
        "fetril": {"head_epochs": 10},
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


@register_data(
    "glyphs",
    scenario="B18-inc6",
    options={"backbone": "small", "transforms": GLYPHS, "epochs": 12, "batch_size": 16, "memory": 1},
    method_options={
        "podnet": {"balanced_epochs": 12},
        "afc": {"balanced_epochs": 12},
        "aanet": {"balanced_epochs": 12},
        "aanet-afc": {"balanced_epochs": 12},
        "der": {"warmup_epochs": 2, "balanced_epochs": 60, "balanced_lr": 0.5},
        "foster": {"boosting_epochs": 12, "compression_epochs": 12, **_foster_betas(1)},
        "icarl": {"lr": 0.5},
        "bic": {"memory": 2, "correction_epochs": 24},  # one of the two is held out
        "gdumb": {"epochs": 16},
        "il2a": {**_WITHOUT_MEMORY, "mixing_rounds": 2},
        "pass": _WITHOUT_MEMORY,
        "ranpac": {"projection": 1000},
        "acil": {"projection": 1000},
        "fetril": {"head_epochs": 10},
        "ccfa": {"count": 1},
    },
)
@cache
def load_glyphs() -> tuple[ImageSet, ImageSet]:
    """3,960 drawn letters and digits, 36 classes, 1 x 12 x 12; drawn by Pillow when they are loaded

    There are 60 training and 50 test images per class. Each image is a character of Pillow's built-in font with a
    random line width, size, rotation, shear, shift, brightness and noise. The same Pillow draws the same images each
    time, and draws them once per process.
    """
    from PIL import features

    if not features.check("freetype2"):
        raise ResourceError(
            "The glyphs are drawn with Pillow's scalable font, and this Pillow was built without FreeType. "
            "Install a Pillow from PyPI (pip install --force-reinstall pillow), or use --data digits."
        )
    return _draw_set(60, seed=0), _draw_set(50, seed=1)


def _draw_set(num_per_class: int, seed: int) -> ImageSet:
    generator = np.random.default_rng([seed, _SIDE])
    pictures = [
        _picture(templates[generator.integers(len(templates))], generator)
        for templates in map(_templates, _CHARACTERS)
        for _ in range(num_per_class)
    ]
    labels = np.repeat(np.arange(len(_CHARACTERS)), num_per_class)
    return ImageSet(np.stack(pictures)[:, None], labels, list(_CHARACTERS))


def _templates(character: str) -> list[Image]:
    """A character in the middle of the canvas, white on black, with lines of several widths."""
    from PIL import Image, ImageDraw, ImageFont

    font, drawn = ImageFont.load_default(_FONT_SIZE), []
    for stroke in _STROKES:
        canvas = Image.new("L", (_CANVAS, _CANVAS))
        left, top, right, bottom = font.getbbox(character, stroke_width=stroke)
        corner = ((_CANVAS - left - right) / 2, (_CANVAS - top - bottom) / 2)
        ImageDraw.Draw(canvas).text(corner, character, fill=255, font=font, stroke_width=stroke)
        drawn.append(canvas)
    return drawn


def _picture(template: Image, generator: np.random.Generator) -> NDArray[np.uint8]:
    """A template scaled, turned, sheared and shifted at random, then reduced to an image with noise."""
    from PIL.Image import Resampling, Transform

    angle, shear = generator.uniform(-0.35, 0.35, 2)  # radians; columns per row
    scale = generator.uniform(0.7, 1.15, 2)
    shift = generator.uniform(-5, 5, 2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = np.diag(1 / scale) @ np.array([[1, shear], [0, 1]]) @ turn  # from the picture to the template
    offset = _CANVAS / 2 - matrix @ (_CANVAS / 2 + shift)
    coefficients = (*matrix[0], offset[0], *matrix[1], offset[1])
    moved = template.transform(template.size, Transform.AFFINE, coefficients, Resampling.BILINEAR)
    reduced = np.asarray(moved.resize((_SIDE, _SIDE), Resampling.BOX), np.float64)
    noisy: NDArray[np.float64] = reduced * generator.uniform(0.6, 1) + generator.normal(0, 25, reduced.shape)
    return np.rint(np.clip(noisy, 0, 255)).astype(np.uint8)
