"""The paper's figure 4: how far the maps of each level have moved from those of the first stage."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from numpy.random import RandomState
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.evaluation.similarity import Estimator, aligned, centred, gram
from ccfa.experiments.analyses import learner_after, reopen
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.learning.learner import EVALUATION_BATCH
from ccfa.models import Features

NUM_IMAGES = 5000
BYTES_OF_MAPS = 2**30  # held at a time


class Similarities(NamedTuple):
    """Linear CKA with the first stage: a list for each later stage, of a value for each level."""

    values: list[list[float]]
    num_images: int


class _Channels(NamedTuple):
    level: int
    first: int
    last: int
    completes: bool  # whether the level ends here


def map_similarities(
    directory: Run,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    num_images: int = NUM_IMAGES,
    seed: int = 0,
    estimator: Estimator = "biased",
) -> Similarities:
    """Linear CKA between the maps of the first and of each later stage's network, level by level.

    On the test images of the first stage's classes: all of them or, where there are more, `num_images` at random.
    """
    resolved, device = reopen(directory, data_dir), device or torch.device("cpu")
    first, *later = resolved.stages
    if not later:
        raise UsageError(f"{directory.path} has a single stage: there is no later network to compare the first with.")
    rows = resolved.test.rows(0, first.num_seen)
    rows = torch.from_numpy(RandomState(seed).permutation(rows.numpy())[:num_images]).sort().values
    images = resolved.test.images[rows].to(device)

    def grams(stage: Stage) -> Iterator[Tensor]:
        for matrix in level_grams(learner_after(stage, directory, resolved, device), images):
            yield centred(matrix, estimator)

    before = list(grams(first))
    values = [[aligned(*pair) for pair in zip(before, grams(stage), strict=True)] for stage in later]
    return Similarities(values, len(images))


def level_grams(learner: Learner, images: Tensor) -> Iterator[Tensor]:
    """The Gram matrix of each level's flattened maps; those too large to be held come in parts of their channels."""
    shapes = [maps.shape[1:] for maps in _maps(learner, images[:1])]
    total = torch.empty(0)
    for parts in _passes(shapes, len(images)):
        held = [
            images.new_empty(len(images), part.last - part.first, *shapes[part.level][1:], dtype=torch.float32)
            for part in parts
        ]
        for batch in torch.arange(len(images), device=images.device).split(EVALUATION_BATCH):
            maps = _maps(learner, images[batch])
            for features, part in zip(held, parts, strict=True):
                features[batch] = maps[part.level][:, part.first : part.last]
        for part in parts:
            matrix = gram(held.pop(0))
            total = total.add_(matrix) if part.first else matrix
            if part.completes:
                yield total


@torch.no_grad()
def _maps(learner: Learner, images: Tensor) -> tuple[Tensor, ...]:
    """The maps of uint8 images, in evaluation mode."""
    features: Features = learner.network.eval().backbone(learner.method.transforms.test(images))
    return features.maps


def _passes(shapes: Sequence[Sequence[int]], num_images: int) -> Iterator[list[_Channels]]:
    """The channels of all levels in order, as many in each pass over the images as can be held together."""
    together: list[_Channels] = []
    room = BYTES_OF_MAPS
    for level, (channels, height, width) in enumerate(shapes):
        size = 4 * num_images * height * width
        step = max(1, min(channels, BYTES_OF_MAPS // size))
        for first in range(0, channels, step):
            last = min(first + step, channels)
            if together and (last - first) * size > room:
                yield together
                together, room = [], BYTES_OF_MAPS
            together.append(_Channels(level, first, last, completes=last == channels))
            room -= (last - first) * size
    yield together
