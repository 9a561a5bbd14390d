"""An experiment: everything that decides a run's numbers, as one record, and what it resolves to."""

import dataclasses
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import ccfa
from ccfa import data as datasets
from ccfa.data import ImageSet, Loader, Stage, load_parts
from ccfa.errors import DataError, ModelError, UsageError, unknown
from ccfa.experiments.building import experiment_method
from ccfa.experiments.options import describe, plain
from ccfa.experiments.presets import default_scenario
from ccfa.methods import Method
from ccfa.methods.method import EVERYTHING


@dataclass(frozen=True)
class Experiment:
    """What to run. Options are given as text, as on the command line, and decoded against the factory's signature."""

    method: str
    ccfa: bool = False
    mix: str | None = None
    data: str = "digits"
    scenario: str | None = None
    order: str | None = None
    memory: int | None = None
    memory_total: int | None = None
    validation: float = 0.0
    image_size: int = 64
    skip_bad: bool = False
    seed: int = 0
    batch_seed: int | None = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A directory name that tells runs apart: whatever differs from the defaults, a digest of it where long."""
        parts = [Path(self.data).name, self.scenario, self.order, self.method, self.mix, "ccfa" if self.ccfa else None]
        named = {
            "m": self.memory,
            "total": self.memory_total,
            "val": self.validation or None,
            "size": self.image_size if self.image_size != 64 else None,
            "skip-bad": "" if self.skip_bad else None,
            "seed": self.seed,
            "batches": self.batch_seed,
        }
        parts += [f"{name}{value}" for name, value in named.items() if value is not None]
        parts += [f"{name}={text}" for name, text in sorted(self.options.items())]
        text = re.sub(r"[^\w.=+-]+", "_", "-".join(part for part in parts if part))
        whole = text.encode()
        if len(whole) <= 150:
            return text
        return f"{whole[:141].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"

    def arguments(self) -> list[str]:
        """What `ccfa run` is given to run this: the method, the data and the seed, and what differs from the defaults.

        >>> Experiment("podnet", ccfa=True, options={"epochs": "10"}).arguments()
        ['podnet', '--data', 'digits', '--seed', '0', '--ccfa', '--set', 'epochs=10']
        """
        words = [self.method, "--data", self.data, "--seed", str(self.seed)]
        for part in dataclasses.fields(self):
            value, option = getattr(self, part.name), "--" + part.name.replace("_", "-")
            if part.name in ("method", "data", "seed", "options") or value == part.default:
                continue
            words += [option] if value is True else [option, str(value)]
        return [*words, "--set", *(f"{name}={text}" for name, text in self.options.items())] if self.options else words


def experiment_of(config: dict[str, Any]) -> Experiment:
    """The experiment that a config.json describes: what is run again to repeat it."""
    stored = config.get("experiment")
    if not isinstance(stored, dict) or "method" not in stored:
        raise ModelError("The configuration holds no experiment; config.json is damaged or not of a run.")
    known = {field.name: field.type for field in dataclasses.fields(Experiment)}
    if surplus := sorted(set(stored) - known.keys()):
        raise ModelError(
            f"The configuration holds {', '.join(surplus)}, which ccfa {ccfa.__version__} does not know: "
            f"it was written by another version."
        )
    for name, value in stored.items():
        if not _is_a(known[name], value):
            raise ModelError(
                f"The configuration holds the {name} {value!r:.60}, which cannot be; config.json is damaged. "
                f"Bring it back from a copy, or run the experiment again."
            )
    return Experiment(**stored)


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value from JSON fits a field's type."""
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if isinstance(value, bool):  # which Python takes for a number
        return kind is bool
    return isinstance(value, (int | float) if kind is float else kind)


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
        return {
            "experiment": plain(self.experiment),
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
    order_name = experiment.order or datasets.data_set(experiment.data).order
    order = datasets.class_order(order_name, train.num_classes, experiment.data)
    scenario = experiment.scenario or default_scenario(experiment.data, train.num_classes)
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
