"""From an experiment to what a run needs: its data, its method, its stages."""

from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import ccfa
from ccfa import data as datasets
from ccfa.data import ImageSet, Loader, Stage, load_parts, recognise_imagenet
from ccfa.errors import DataError, ModelError, UsageError, unknown
from ccfa.experiments.building import experiment_method
from ccfa.experiments.options import describe, plain
from ccfa.methods import Method
from ccfa.methods.method import EVERYTHING
from ccfa.plugins import loaded_plugins
from ccfa.settings import Experiment


def experiment_of(config: dict[str, Any]) -> Experiment:
    """Return the experiment that a config.json describes."""
    stored = config.get("experiment")
    if not isinstance(stored, dict) or "method" not in stored:
        raise ModelError("The configuration holds no experiment; config.json is damaged or not of a run.")
    known = get_type_hints(Experiment)
    if surplus := sorted(set(stored) - known.keys()):
        raise ModelError(
            f"The configuration holds {', '.join(surplus)}, which ccfa {ccfa.__version__} does not know: "
            f"it was written by another version."
        )
    for name, value in stored.items():
        if not _fits(value, known[name]):
            raise ModelError(f"The {name} {value!r:.60} in config.json cannot be right: the file is damaged.")
    return Experiment(**stored)


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether a value from JSON has the type of a field."""
    if get_origin(kind) in (UnionType, Union):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if isinstance(value, bool):  # which Python takes for a number
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


class Resolved(NamedTuple):
    """An experiment with its data and its method at hand."""

    experiment: Experiment
    method: Method
    train: ImageSet
    test: ImageSet
    stages: tuple[Stage, ...]
    scenario: str
    order: tuple[int, ...]
    notes: tuple[str, ...]  # what the user should know and did not ask for

    @property
    def config(self) -> dict[str, Any]:
        """What config.json holds: the experiment, which repeats the run, and what it came to."""
        plugins = loaded_plugins()
        return {
            "experiment": plain(self.experiment),
            **({"plugins": plugins} if plugins else {}),
            "resolved": {
                "method": describe(self.method),
                "stage_sizes": [stage.num_new for stage in self.stages],
                "class_order": list(self.order),
                "class_names": list(self.train.class_names),
                "num_training_images": len(self.train),
                "num_test_images": len(self.test),
                "fingerprints": {"train": self.train.fingerprint, "test": self.test.fingerprint},
            },
        }

    @property
    def headline(self) -> str:
        """One line that says what runs."""
        plugged = [self.method.image_augmentation] if self.experiment.mix else []
        augmentations = [type(plug_in).__name__ for plug_in in (*plugged, *self.method.feature_augmentations)]
        sizes = [stage.num_new for stage in self.stages]
        return (
            f"{' + '.join([self.method.name, *augmentations])} · {self.experiment.data} · "
            f"{self.train.num_classes} classes in {len(sizes)} stages ({_shortened(sizes)})"
        )


def _shortened(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes if len(sizes) <= 8 else [*sizes[:3], "...", sizes[-1]]))


def resolve(experiment: Experiment, data_dir: Path | None = None, load: Loader = load_parts) -> Resolved:
    """Load the data and build the method; everything that can be wrong is found here, before training.

    Experiments resolved with one `functools.cache(load_parts)` share their images in memory.
    """
    method = experiment_method(experiment)
    for seed in (experiment.seed, experiment.batch_seed or 0):
        if not 0 <= seed < 2**63:
            raise UsageError(f"The seed must be from 0 to 2^63 - 1, got {seed}.")
    train, test = load(experiment.data, data_dir, experiment.image_size, experiment.skip_bad, experiment.validation)
    notes = []
    if experiment.validation:
        notes.append(f"Accuracies are on {len(test)} images held out from training, not on the test set.")
    if train.num_classes == 1:
        notes.append("There is one class only, so every prediction is right and nothing can be forgotten.")
    data_set = datasets.data_set(experiment.data)
    order = datasets.class_order(
        experiment.order or data_set.order,
        train.num_classes,
        recognise_imagenet(train.class_names) or experiment.data,
    )
    scenario = experiment.scenario or data_set.default_scenario(train.num_classes)
    stages = datasets.parse_scenario(scenario, train.num_classes)
    _require_phases(method, stages)
    counts = train.labels.bincount()
    smallest = int(counts.min())
    if smallest < method.needs_memory:
        raise DataError(
            f"{method.name} needs at least {method.needs_memory} images of each class, and class "
            f"{train.class_names[int(counts.argmin())]!r} has {smallest}. Add images or leave the class out."
        )
    if experiment.memory is not None and experiment.memory > smallest:
        raise UsageError(
            f"A memory of {experiment.memory} images per class is larger than the smallest class ({smallest} images). "
            f"Use --memory {smallest} or less, or the method joint to keep every image."
        )
    needed = max(method.needs_memory, 1)
    if method.memory.total is not None and method.memory.total < needed * train.num_classes:
        raise UsageError(
            f"A memory of {method.memory.total} images in total is less than {needed:d} for each of "
            f"{train.num_classes} classes. Use --memory-total {needed * train.num_classes} or more."
        )
    wanted = method.memory.quota(train.num_classes)
    if "0" in (str(experiment.memory), experiment.options.get("memory")):
        notes.append(f"With a memory of 0 {method.name} sees no image of an old class again.")
    if method.memory != EVERYTHING and wanted > smallest:
        notes.append(f"The smallest class has {smallest} images, fewer than {wanted}: all of them are kept.")
    return Resolved(
        experiment, method, train.reorder(order), test.reorder(order), stages, scenario, order, tuple(notes)
    )


def _require_phases(method: Method, stages: tuple[Stage, ...]) -> None:
    """Refuse a plug-in that names a phase which no method has: it would silently never act."""
    known = {"main", "balanced"} | {phase.name for stage in stages for phase in method.phases(stage)}
    names = [name for augmentation in method.feature_augmentations for name in augmentation.phases]
    names += method.image_augmentation.phases if method.image_augmentation else ()
    for name in names:
        if name not in known:
            raise unknown("phase", name, known)
