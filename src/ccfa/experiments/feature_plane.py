"""The paper's figure 3: memory features, augmented features and features of training images in one plane."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.random import RandomState
from torch import Tensor

from ccfa.augmentation import CCFA, Samples
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.evaluation.projection import perplexity_for, tsne
from ccfa.experiments.analyses import exemplars_after, learner_after, reopen, with_ccfa
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.learning.batches import named_generator
from ccfa.learning.memory import joined
from ccfa.methods import Method

NUM_CLASSES = 10
NUM_FEATURES = 1000
KINDS = ("memory", "augmented", "training")


class Plane(NamedTuple):
    """Features of the three kinds as points, and what they depend on."""

    points: list[dict[str, Any]]  # kind, class, class_name, row (of an augmented feature: where it started), x, y
    class_names: dict[int, str]
    perplexity: float
    ccfa: CCFA
    step_size: tuple[float, float]  # the range of alpha


class _Labelled(NamedTuple):
    features: Tensor  # (n, dim), in the head's space
    labels: Tensor
    rows: Tensor

    def at(self, positions: Tensor) -> "_Labelled":
        return _Labelled(*(part[positions] for part in self))


def feature_plane(
    directory: Run,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    num_features: int = NUM_FEATURES,
    seed: int = 0,
) -> Plane:
    """t-SNE of 10 random classes of the first stage, as its network sees them.

    Memory features are those of the classes' exemplars. Training features are those of `num_features` random training
    images of the same classes, most of which later stages have no access to. Augmented features are as many random
    ones of all that CCFA makes from what the next stage trains on (its new images and the exemplars) and labels as one
    of the classes. All are in the space of the head and of images without random transforms.
    """
    resolved = with_ccfa(reopen(directory, data_dir))
    first, *later = resolved.stages
    if not later:
        raise UsageError(
            f"{directory.path} has a single stage: there is no next one whose images CCFA could start from."
        )
    if not resolved.method.memory.quota(first.num_seen):
        raise UsageError(f"{directory.path}: {resolved.method.name} keeps no exemplars, so it has no memory features.")
    if not _ccfa(resolved.method).count:
        raise UsageError(f"{directory.path}: {_ccfa(resolved.method)} makes no features, so there are none to show.")
    learner = learner_after(first, directory, resolved, device or torch.device("cpu"))
    exemplars = exemplars_after(directory, learner)

    random = RandomState(seed)
    classes = sorted(random.permutation(first.num_seen)[:NUM_CLASSES].tolist())
    training = joined([learner.train.rows(label, label + 1) for label in classes], learner.device)
    augmented = _augmented(learner, exemplars, later[0], classes, seed)
    parts = (
        _labelled(learner, joined([exemplars[label] for label in classes], learner.device)),
        augmented.at(_drawn(len(augmented.rows), num_features, random)),
        _labelled(learner, training[_drawn(len(training), num_features, random)]),
    )
    features = torch.cat([part.features for part in parts]).cpu().numpy()
    perplexity = perplexity_for(len(features))
    positions = tsne(features, perplexity, seed)
    names = learner.train.class_names
    points = [
        {"kind": kind, "class": label, "class_name": names[label], "row": row}
        for kind, part in zip(KINDS, parts, strict=True)
        for label, row in zip(part.labels.tolist(), part.rows.tolist(), strict=True)
    ]
    points = [{**point, "x": x, "y": y} for point, (x, y) in zip(points, positions.tolist(), strict=True)]
    ccfa = _ccfa(learner.method)
    step_size = ccfa.step_size_for(features.shape[1])
    return Plane(points, {label: names[label] for label in classes}, perplexity, ccfa, step_size)


def _ccfa(method: Method) -> CCFA:
    return next(part for part in method.feature_augmentations if isinstance(part, CCFA))


def _labelled(learner: Learner, rows: Tensor) -> _Labelled:
    """The features of training images, as feature augmentations see them."""
    with torch.no_grad():
        return _Labelled(learner.network.head.embed(learner.embeddings(rows)), learner.train.labels[rows], rows)


def _augmented(learner: Learner, exemplars: list[Tensor], following: Stage, classes: list[int], seed: int) -> _Labelled:
    """What CCFA makes of the next stage's training images as the stage begins, as far as labelled with the classes.

    At that moment the network is still the first stage's: its head chooses the targets and is attacked.
    """
    ccfa, head = _ccfa(learner.method), learner.network.head
    generator = named_generator(learner.device, seed, "augmented features")
    new = learner.train.rows(following.num_old, following.num_seen)
    rows = joined([new, *exemplars], learner.device)
    rows = rows[torch.randperm(len(rows), generator=generator, device=learner.device)]
    sources = _labelled(learner, rows)
    batch_size = learner.method.phases(following)[0].batch_size
    made = []
    for batch in torch.arange(len(rows), device=learner.device).split(batch_size):
        part = sources.at(batch)
        samples = Samples.of(part.features, part.labels)
        _, added = ccfa(samples, head, head, learner.method.criterion, generator).parted(len(batch))
        wanted = torch.isin(added.labels[:, 0], torch.tensor(classes, device=learner.device))
        wanted &= added.weights[:, 0] > 0
        copies = part.rows.repeat(ccfa.count)
        made.append(_Labelled(added.features, added.labels[:, 0], copies).at(wanted))
    features, labels, rows = (torch.cat(parts) for parts in zip(*made, strict=True))
    if not len(rows):
        raise UsageError("CCFA labels none of its features as one of these classes. Draw others with --seed.")
    return _Labelled(features.detach(), labels, rows)


def _drawn(num: int, wanted: int, random: RandomState) -> Tensor:
    """Positions of at most so many of `num` things, at random."""
    return torch.from_numpy(random.permutation(num)[:wanted])
