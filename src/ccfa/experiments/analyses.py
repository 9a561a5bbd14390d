"""Analyses of a run: features in a plane (the paper's figure 3) and the CKA of its networks' maps (figure 4)."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.random import RandomState
from torch import Tensor

from ccfa.augmentation import CCFA, Samples
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.evaluation.features import Estimator, aligned, centred, gram, perplexity_for, tsne
from ccfa.experiments.experiment import Resolved, experiment_method
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import resolve_again
from ccfa.learning import Learner
from ccfa.learning.learner import evaluation_batch, joined
from ccfa.learning.loop import named_generator
from ccfa.learning.state import network_of

NUM_CLASSES = 10  # of a plane
NUM_FEATURES = 1000
NUM_IMAGES = 5000  # of CKA
KINDS = ("memory", "augmented", "training")


def learner_after(stage: Stage, run: Run, resolved: Resolved, device: torch.device) -> Learner:
    """Return a learner with the network that the run had after a stage, and nothing else of its state."""
    given = resolved.experiment
    learner = Learner(resolved.method, resolved.train, seed=given.seed, batch_seed=given.batch_seed, device=device)
    network = network_of(resolved.method, resolved.train.shape[0], stage.index, run.network_weights(stage.index))
    learner.stage, learner.network = stage, learner.acceleration.place(network, learner.device)
    return learner


def map_similarities(
    run: Run,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    num_images: int = NUM_IMAGES,
    seed: int = 0,
    estimator: Estimator = "biased",
) -> tuple[list[list[float]], int]:
    """Compute linear CKA between the maps of the first and of each later stage's network.

    The images are the test images of the first stage's classes: all of them or, where there are more, `num_images` at
    random. Returns one list per later stage, with one value per level, and the number of images.
    """
    resolved, device = resolve_again(run, data_dir, same_method=False), device or torch.device("cpu")
    first, *later = resolved.stages
    if not later:
        raise UsageError(f"{run.path} has a single stage: there is no later network to compare the first with.")
    rows = resolved.test.rows(0, first.num_seen)
    rows = torch.from_numpy(RandomState(seed).permutation(rows.numpy())[:num_images]).sort().values
    images = resolved.test.images[rows].to(device)

    @torch.no_grad()
    def grams(stage: Stage) -> list[Tensor]:
        network = learner_after(stage, run, resolved, device).network.eval()
        transform = resolved.method.transforms.test
        parts = images.split(evaluation_batch(images.shape))
        batches = [network.backbone(transform(batch)).maps for batch in parts]
        return [centred(gram(torch.cat(maps)), estimator) for maps in zip(*batches, strict=True)]

    before = grams(first)
    values = [[aligned(*pair) for pair in zip(before, grams(stage), strict=True)] for stage in later]
    return values, len(images)


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
    run: Run,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    num_features: int = NUM_FEATURES,
    seed: int = 0,
) -> Plane:
    """Project features of 10 random classes of the first stage, as its network sees them, into a plane with t-SNE.

    Memory features are those of the classes' exemplars. Training features are those of `num_features` random training
    images of the same classes, most of which later stages have no access to. Augmented features are as many random
    ones of all that CCFA makes from what the next stage trains on (its new images and the exemplars) and labels as one
    of the classes. CCFA has the run's options or, for a run without it, the data set's. All features are in the space
    of the head and of images without random transforms.
    """
    resolved = resolve_again(run, data_dir, same_method=False)
    method = experiment_method(replace(resolved.experiment, ccfa=True))
    ccfa = next(part for part in method.feature_augmentations if isinstance(part, CCFA))
    first, *later = resolved.stages
    if not later:
        raise UsageError(f"{run.path} has a single stage: there is no next one whose images CCFA could start from.")
    if not method.memory.quota(first.num_seen):
        raise UsageError(f"{run.path}: {method.name} keeps no exemplars, so it has no memory features.")
    if not ccfa.count:
        raise UsageError(f"{run.path}: {ccfa} makes no features, so there are none to show.")
    learner = learner_after(first, run, resolved._replace(method=method), device or torch.device("cpu"))
    exemplars = [torch.tensor(rows, dtype=torch.int64, device=learner.device) for rows in run.read_exemplars(0)]

    random = RandomState(seed)
    classes = sorted(random.permutation(first.num_seen)[:NUM_CLASSES].tolist())
    augmented = _augmented(learner, ccfa, exemplars, later[0], classes, seed)
    augmented = augmented.at(torch.from_numpy(random.permutation(len(augmented.rows))[:num_features]))
    training = joined([learner.train.rows(label, label + 1) for label in classes], learner.device)
    training = training[torch.from_numpy(random.permutation(len(training))[:num_features])]
    memory = joined([exemplars[label] for label in classes], learner.device)
    parts = (_labelled(learner, memory), augmented, _labelled(learner, training))

    joint = _Labelled(*map(torch.cat, zip(*parts, strict=True)))
    features = joint.features.cpu().numpy()
    perplexity = perplexity_for(len(features))
    positions = tsne(features, perplexity, seed).tolist()
    kinds = [kind for kind, part in zip(KINDS, parts, strict=True) for _ in part.rows]
    names = learner.train.class_names
    points = [
        {"kind": kind, "class": label, "class_name": names[label], "row": row, "x": x, "y": y}
        for kind, label, row, (x, y) in zip(kinds, joint.labels.tolist(), joint.rows.tolist(), positions, strict=True)
    ]
    step_size = ccfa.step_size_for(features.shape[1])
    return Plane(points, {label: names[label] for label in classes}, perplexity, ccfa, step_size)


def _labelled(learner: Learner, rows: Tensor) -> _Labelled:
    with torch.no_grad():
        return _Labelled(learner.network.head.embed(learner.embeddings(rows)), learner.train.labels[rows], rows)


def _augmented(
    learner: Learner, ccfa: CCFA, exemplars: list[Tensor], following: Stage, classes: list[int], seed: int
) -> _Labelled:
    """Apply CCFA to the next stage's training images as that stage begins; keep what it labels as one of the classes.

    At that moment the network is still the first stage's: its head chooses the targets and is attacked.
    """
    head = learner.network.head
    generator = named_generator(learner.device, seed, "augmented features")
    new = learner.train.rows(following.num_old, following.num_seen)
    rows = joined([new, *exemplars], learner.device)
    rows = rows[torch.randperm(len(rows), generator=generator, device=learner.device)]
    sources = _labelled(learner, rows)
    made = []
    for batch in torch.arange(len(rows), device=learner.device).split(learner.method.phases(following)[0].batch_size):
        part = sources.at(batch)
        samples = Samples.of(part.features, part.labels)
        _, added = ccfa(samples, head, head, learner.method.criterion, generator).parted(len(batch))
        wanted = torch.isin(added.labels[:, 0], torch.tensor(classes, device=learner.device))
        wanted &= added.weights[:, 0] > 0
        made.append(_Labelled(added.features.detach(), added.labels[:, 0], part.rows.repeat(ccfa.count)).at(wanted))
    joint = _Labelled(*map(torch.cat, zip(*made, strict=True)))
    if not len(joint.rows):
        raise UsageError("CCFA labels none of its features as one of these classes. Draw others with --seed.")
    return joint
