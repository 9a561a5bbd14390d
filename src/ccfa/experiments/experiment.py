"""From an experiment to what a run needs: its options, its method, its data and its stages."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import ccfa
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import (
    Framing,
    ImageSet,
    Loader,
    Stage,
    Transforms,
    class_order,
    data_set,
    described_list,
    load_parts,
    parse_scenario,
    read_order,
    recognise_imagenet,
)
from ccfa.data.images import require_images
from ccfa.errors import DataError, ModelError, UsageError, choose, chosen_name, matching, unknown
from ccfa.learning.state import new_network
from ccfa.methods import METHODS, Budget, Method, with_augmentation, with_image_augmentation, with_memory
from ccfa.methods.method import EVERYTHING, missing_phases, phase_names
from ccfa.methods.parts import learns_one_class
from ccfa.models.backbone import BACKBONES, backbone_builder
from ccfa.models.pretrained import PretrainedConfig, timm_model, untrained, with_weights
from ccfa.options import decode_options, schema
from ccfa.plugins import loaded_plugins
from ccfa.settings import Experiment

SCENARIOS: dict[str, str] = {
    "B50-inc10": "half of CIFAR-100 first, then 5 stages of 10 classes (the paper's '5 tasks')",
    "B50-inc5": "the paper's '10 tasks'",
    "B50-inc2": "the paper's '25 tasks'",
    "B50-inc1": "the paper's '50 tasks'",
    "B20-inc1": "a small first stage: the paper's table of initial task sizes (also B30, B40)",
    "B0-inc5": "20 equal stages of 5 classes of CIFAR-100, usually with --memory-total 2000",
    "B0-inc10": "10 equal stages of 10 classes, usually with --memory-total 2000",
    "B0-inc20": "5 equal stages of 20 classes, usually with --memory-total 2000",
    "B5-inc1": "the default for digits",
    "B18-inc6": "the default for glyphs",
    "5,2,2,1": "any list of stage sizes",
}


def describe(value: Any, known_by_name: list[Any] | None = None) -> Any:
    """Return a value made of parts as JSON can show it: records field by field, functions and classes by name.

    The name of an inner function, or of an object that is no record, does not tell what it holds. Such parts are added
    to `known_by_name`.
    """
    told = functools.partial(describe, known_by_name=known_by_name)
    if isinstance(value, functools.partial):
        return {"part": told(value.func), "arguments": told(value.args), **told(value.keywords)}
    if is_dataclass(value) and not isinstance(value, type):
        shown = {one.name: told(getattr(value, one.name)) for one in fields(value) if one.repr}
        if known_by_name is not None and len(shown) < len(fields(value)):
            known_by_name.append(value)
        return {"part": type(value).__name__} | shown
    if isinstance(value, Mapping):
        return {str(key): told(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [told(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if known_by_name is not None and _holds_more(value):
        known_by_name.append(value)
    return getattr(value, "__name__", type(value).__name__)  # of somebody's own part only the kind is known


def _holds_more(part: Any) -> bool:
    """Tell whether a name says too little: of an inner function, a method of an object, an object that is no record."""
    is_inner = "<" in getattr(part, "__qualname__", "<object>") or getattr(part, "__closure__", None)
    return bool(is_inner) or hasattr(part, "__wrapped__") or inspect.ismethod(part)


# The method: the data set's values, the options, the memory, and what is plugged in.


def build_method(name: str, data: str = "cifar100", **options: Any) -> Method:
    """Build a method with the published values for a data set, and options of your own on top.

    Args:
        name: The name of a method, as in `METHODS`.
        data: The name of a data set, or the path of an image folder.
        options: Other values for options of the method, of the types that `ccfa list options` shows.

    Returns:
        The method, for `Learner`.

    With a backbone of timm, images are normalised as the model's own configuration says, unless `transforms` are given.

    >>> build_method("podnet", "digits", memory=2).memory.per_class
    2
    """
    folder = data_set(data).folder
    if folder and not os.path.exists(folder):
        raise DataError(f"{folder} does not exist. Name a data set or the folder of your images.")
    return _built(name, data, options)


def _built(name: str, data: str, options: Mapping[str, Any]) -> Method:
    """Build a method; the photos may be gone, as they are when a stored model is read."""
    return choose("method", name, METHODS)(**chosen_options(name, data, options))


def chosen_options(name: str, data: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method that are given or that a data set decides. The others have their defaults.

    >>> chosen_options("podnet", "digits", {"epochs": 3})["epochs"]
    3
    """
    factory = choose("method", name, METHODS)
    chosen = {**preset(name, data), **_preset_of_first(options.get("first"), factory, data), **options}
    timm = timm_model(backbone_builder(chosen["backbone"])) if "backbone" in chosen else None
    if timm and "transforms" not in options and "transforms" in schema(factory):
        kept = chosen.get("transforms", inspect.signature(factory).parameters["transforms"].default)
        chosen["transforms"] = _suited(kept, timm.config)
    return chosen


def _preset_of_first(first: Any, factory: Callable[..., Any], data: str) -> dict[str, Any]:
    """Return the values for a method's option `first` that names another method, whose first stage it has."""
    found = preset(first, data) if first in METHODS else {}
    return {name: value for name, value in found.items() if name in schema(factory)}


def _suited(transforms: Transforms, config: PretrainedConfig) -> Transforms:
    """Return the transforms with the mean and std of a pretrained model; a gray image has those of all colours.

    Transforms that take the centre of test images take as much of it as the model's own.
    """
    mean, std = config.mean, config.std
    if len(transforms.mean) == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    return replace(transforms, mean=mean, std=std, centre=config.crop if transforms.centre < 1 else 1.0)


def preset(method: str, data: str) -> dict[str, Any]:
    """Return the options of a method on a data set: those for all methods that have them, then its own.

    A method for which the data set has none takes those of the method it is built on, as far as it has such options.
    """
    method, found = chosen_name("method", method, METHODS), data_set(data)
    factory = METHODS[method]
    known = schema(factory)
    own = found.method_options.get(method)
    if own is None:
        base = found.method_options.get(getattr(factory, "built_on", None) or "finetune", {})
        own = {name: value for name, value in base.items() if name in known}
    for name in own:
        if name not in known:
            raise unknown(f"option of {method} in the data set {data!r}", name, known)
    if others := [name for name in found.options if name not in known]:
        of_any = {name for one in METHODS.values() for name in schema(one)}
        for name in others:
            if name not in of_any:
                raise unknown(f"option in the data set {data!r}", name, of_any)
    return {name: value for name, value in found.options.items() if name in known} | dict(own)


def experiment_method(experiment: Experiment) -> Method:
    """Return the method of an experiment: preset, options, memory, augmentation."""
    of_mix, of_ccfa = (_prefixed(experiment.options, prefix) for prefix in ("mix.", "ccfa."))
    own = {name: text for name, text in experiment.options.items() if not name.startswith(("mix.", "ccfa."))}
    factory = choose("method", experiment.method, METHODS)
    decoded = decode_options(own, factory, experiment.method)
    option = inspect.signature(factory).parameters.get("backbone")
    if option and (experiment.weights or experiment.image_size):
        default = preset(experiment.method, experiment.data).get("backbone", option.default)
        choice = decoded.get("backbone", default)
        decoded["backbone"] = with_weights(choice, experiment.weights, experiment.image_size)
    elif experiment.weights:
        raise UsageError(f"{experiment.method} has no option backbone, so --weights has no meaning for it.")
    method = _built(experiment.method, experiment.data, decoded)
    if experiment.memory is not None or experiment.memory_total is not None:
        method = with_memory(method, Budget(experiment.memory, experiment.memory_total))
    if experiment.mix:
        kind = choose("mixing", experiment.mix, MIXES)
        method = with_image_augmentation(method, kind(**decode_options(of_mix, kind, "mix")))
    elif of_mix:
        raise UsageError(f"Options mix.{', mix.'.join(of_mix)} need --mix.")
    if experiment.ccfa:
        for plug_in in _ccfa(experiment.data, of_ccfa):
            method = with_augmentation(method, plug_in)
    elif of_ccfa:
        raise UsageError(f"Options ccfa.{', ccfa.'.join(of_ccfa)} need --ccfa.")
    return method


def _prefixed(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): text for name, text in options.items() if name.startswith(prefix)}


def _ccfa(data: str, given: Mapping[str, str]) -> list[CCFA]:
    """CCFA as asked for; options with the prefix balanced. are those of the balanced phase alone."""
    balanced = _prefixed(given, "balanced.")
    if "phases" in balanced:
        raise UsageError("ccfa.balanced.phases has no meaning: these options are those of the balanced phase.")
    everywhere = {name: text for name, text in given.items() if not name.startswith("balanced.")}
    defaults = dict(data_set(data).method_options.get("ccfa", {}))
    plug_in = CCFA(**defaults | decode_options(everywhere, CCFA, "ccfa"))
    if not balanced:
        return [plug_in]
    others = tuple(name for name in plug_in.phases if name != "balanced")
    if others == plug_in.phases:
        raise UsageError(f"Options ccfa.balanced. need the balanced phase, but CCFA acts in {', '.join(others)} only.")
    there = replace(plug_in, phases=("balanced",), **decode_options(balanced, CCFA, "ccfa.balanced"))
    return [replace(plug_in, phases=others), there]


# The experiment, with its data.


def canonical(experiment: Experiment) -> Experiment:
    """Return the experiment with names as they are registered, and with the classes that a file of its order lists.

    >>> canonical(Experiment("PODNet", data="Digits", order="Natural")).name
    'digits-natural-podnet-seed0'
    """
    options = dict(experiment.options)
    if known := matching(options.get("backbone", ""), BACKBONES):
        options["backbone"] = known
    return replace(
        experiment,
        method=chosen_name("method", experiment.method, METHODS),
        data=data_set(experiment.data).name,
        order=experiment.order and read_order(experiment.order),
        options=options,
    )


def experiment_of(config: dict[str, Any]) -> Experiment:
    """Return the experiment that a config.json describes."""
    stored = config.get("experiment")
    if not isinstance(stored, dict) or "method" not in stored:
        raise ModelError("The configuration holds no experiment; config.json is damaged or not of a run.")
    hints = get_type_hints(Experiment)
    known = {one.name: hints[one.name] for one in fields(Experiment)}
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
    order: tuple[int, ...]
    notes: tuple[str, ...]  # what the user should know and did not ask for

    @property
    def config(self) -> dict[str, Any]:
        """What config.json holds: the experiment, which repeats the run, and what it came to."""
        plugins, classes = loaded_plugins(), described_list(self.experiment.data, self.train.class_names)
        return {
            "experiment": asdict(self.experiment) | {"image_size": framing_of(self.experiment, self.method).size},
            **({"plugins": plugins} if plugins else {}),
            "resolved": {
                "method": describe(self.method),
                "stage_sizes": [stage.num_new for stage in self.stages],
                "class_order": list(self.order),
                "class_names": list(self.train.class_names),
                **({"class_list": classes} if classes else {}),
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
        sizes = [str(stage.num_new) for stage in self.stages]
        shown = sizes if len(sizes) <= 8 else [*sizes[:3], "...", sizes[-1]]
        return (
            f"{' + '.join([self.method.name, *augmentations])} · {self.experiment.data} · "
            f"{self.train.num_classes} classes in {len(sizes)} stages ({' + '.join(shown)})"
        )


def resolve(experiment: Experiment, data_dir: Path | None = None, load: Loader = load_parts) -> Resolved:
    """Load the data and build the method; everything that can be wrong is found here, before training.

    Experiments resolved with one `functools.cache(load_parts)` share their images in memory.
    """
    experiment = canonical(experiment)
    method = experiment_method(experiment)
    for seed in (experiment.seed, experiment.batch_seed or 0):
        if not 0 <= seed < 2**63:
            raise UsageError(f"The seed must be from 0 to 2^63 - 1, got {seed}.")
    reading = framing_of(experiment, method), experiment.skip_bad, experiment.validation, experiment.recursive
    train, test = load(experiment.data, data_dir, *reading)
    if untrained(method.backbone) != method.backbone:
        new_network(method, train.shape[0])  # weights that do not fit are found here
    notes = []
    if experiment.validation:
        notes.append(f"Accuracies are on {len(test)} images held out from training, not on the test set.")
    if train.num_classes == 1:
        notes.append("There is one class only, so every prediction is right and nothing can be forgotten.")
    defaults = data_set(experiment.data)
    order = class_order(
        experiment.order or defaults.order,
        train.num_classes,
        recognise_imagenet(train.class_names) or experiment.data,
        train.class_names,
    )
    scenario = experiment.scenario or defaults.default_scenario(train.num_classes)
    stages = parse_scenario(scenario, train.num_classes)
    if missing := missing_phases(method, stages):
        raise unknown("phase", missing[0], phase_names(method, stages))
    method.transforms.require_room(*train.shape[1:])
    if any(stage.num_new == 1 for stage in stages[1:]) and not learns_one_class(method):
        notes.append(
            f"{method.name} learns nothing from a stage of one class. Use later stages of two or more classes."
        )
    notes += longer_phases(experiment, method, stages)
    smallest = int(train.labels.bincount().min())
    require_images(train, 0, train.num_classes, method.needs_memory, method.name)
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
    return Resolved(experiment, method, train.reorder(order), test.reorder(order), stages, order, tuple(notes))


def longer_phases(experiment: Experiment, method: Method, stages: Sequence[Stage]) -> Iterator[str]:
    """Say which phases of the last stage are longer than the main phase, whose epochs were asked for."""
    if "epochs" not in experiment.options:
        return
    main = [phase.epochs for phase in method.phases(stages[0]) if phase.name == "main"]
    for phase in method.phases(stages[-1]):
        if main and phase.name != "main" and phase.epochs > max(main):
            yield (
                f"The phase {phase.name} has {phase.epochs} epochs: --epochs is for the main phase alone. See "
                f"`ccfa list options {experiment.method}`."
            )


def framing_of(experiment: Experiment, method: Method) -> Framing:
    """Return how the photos of a folder become squares: as the backbone's own, or else 64 pixels of the whole centre.

    The experiment may ask for another size.
    """
    timm = timm_model(method.backbone)
    if not timm:
        return Framing(experiment.image_size or 64)
    size, config = experiment.image_size or timm.image_size or 64, timm.config
    return Framing(size, config.crop, "bilinear" if config.interpolation == "bilinear" else "bicubic")
