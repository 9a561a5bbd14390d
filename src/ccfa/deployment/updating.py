"""How a model learns from a folder of photos: what was found, what will happen, and the new state that comes of it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ccfa
from ccfa.data import Framing, ImageSet, Photos, Stage, cache_folder, image_digests, read_photos
from ccfa.data.images import require_images, some
from ccfa.deployment.card import model_card
from ccfa.deployment.folder import Images, ModelFolder, State
from ccfa.deployment.model import RULES, Model
from ccfa.deployment.scoring import Classifier, calibrate, embed, read
from ccfa.errors import LockedError, UsageError, chosen_name
from ccfa.evaluation import rule_name
from ccfa.experiments.experiment import describe, experiment_method, framing_of, longer_phases
from ccfa.experiments.running import DEFAULTS, acceleration_of
from ccfa.learning import Learner, Observer
from ccfa.learning.loop import num_batches, prepare_phase
from ccfa.learning.state import restore, state_of
from ccfa.methods import METHODS, Budget, Method, Phase, with_memory
from ccfa.methods.frozen import ReadOut
from ccfa.methods.parts import balanced_exemplars, is_frozen, learns_one_class, start_afresh
from ccfa.models import BACKBONES
from ccfa.models.pretrained import FromFile, FromTensors, timm_model, untrained
from ccfa.options import schema
from ccfa.plugins import load_plugin, loaded_plugins
from ccfa.settings import Experiment, Learning, Running

DEFAULT_METHOD = "ranpac"  # chosen by benchmarks/photos.py; it keeps no photos
PHOTOS = "./photos"  # the data set of a model's experiment: any folder, whose defaults it takes
HELD_OUT_SHARE = 4  # of the images that are kept, one in so many more is kept to measure with
DIGEST_SIZE = 16  # bytes, of a photo
WORTH_COMPILING = 20_000  # steps: on a GPU, compiling takes a minute and then saves milliseconds per step
OWN_TENSORS = ("held_out.", "photos", "photo_labels", "start.")  # of the model, not of its learner


@dataclass(frozen=True)
class Plan:
    """What `learn` is about to do, found out before anything is trained or written.

    Args:
        folder: The model's folder.
        before: The model as it is, or None for a new one.
        experiment: The method with its options.
        method: The method.
        framing: How photos become the model's images.
        new: The classes that the model will learn.
        more: The known classes of which it will learn more photos.
        left_out: The known classes whose photos are not used.
        train: The images to learn from: those of the memory first, then the photos.
        held_out: The images to measure with.
        stage: The stage to learn.
        photos: The digests (photos, 16) of the photos that are learned or held out, by which they are recognised
            later, and their labels (photos,).
        notes: What was found, and what else the user should know.
        keep: How many earlier states stay.
    """

    folder: ModelFolder
    before: Model | None
    experiment: Experiment
    method: Method
    framing: Framing
    new: tuple[str, ...]
    more: tuple[str, ...]
    left_out: tuple[str, ...]
    train: ImageSet
    held_out: ImageSet | None
    stage: Stage
    photos: dict[str, Tensor]
    notes: tuple[str, ...]
    keep: int

    @property
    def num_kept(self) -> int:
        """How many images the model has in its memory."""
        return len(self.before.state.memory.labels) if self.before and self.before.state.memory else 0

    @property
    def num_measured(self) -> int:
        """How many held-out images the model will be measured on, with those of which it has kept the features."""
        features = len(self.before.state.learner.get("held_out.labels", ())) if self.before else 0
        images = len(self.held_out or ())
        return features + images - self.num_held_before if features else images

    @property
    def num_held_before(self) -> int:
        """How many of the held-out images the model has kept from earlier updates."""
        return len(self.before.state.held_out.labels) if self.before and self.before.state.held_out else 0

    def require_current(self) -> None:
        """Refuse the plan if the model is not the one that it was made for."""
        present = self.folder.read_config() if self.folder.holds_model() else None
        if present != (self.before.config if self.before else None):
            raise LockedError(f"{self.folder.path} was changed by another process meanwhile. Try again.")


def learn(
    path: Path | str,
    folder: Path | str,
    asked: Learning | None = None,
    running: Running = DEFAULTS,
    observer: Observer | None = None,
) -> Model:
    """Make a model from a folder of photos, or teach an existing one the folder's new classes.

    An existing model learns from the new photos and from the images in its own memory. Its folder changes in one step
    when everything is learned; if learning fails or is killed, the model is as before.

    Args:
        path: The model's folder; a new one is created.
        folder: A folder with one subfolder per class.
        asked: Method, backbone, memory and so on.
        running: The device, the precision and plug-ins.
        observer: Its methods are called after each batch, each epoch, and when something else begins.

    Returns:
        The model as it is now.
    """
    with ModelFolder(path).held():  # from the start: a plan holds for the model that it was made for
        return carry_out(plan_update(path, folder, asked or Learning(), running), running, observer)


def plan_update(path: Path | str, folder: Path | str, asked: Learning, running: Running = DEFAULTS) -> Plan:
    """Look at the model and at the photos, and return what there is to do; nothing is changed."""
    _require_sound(asked)
    for plugin in running.plugin:
        load_plugin(plugin)
    place, before = ModelFolder(path), None
    if place.path.resolve().is_relative_to(Path(folder).resolve()):
        raise UsageError(f"{path} is inside {folder}, where every folder is a class. Name a folder elsewhere.")
    if place.holds_model():
        before = Model(place.path, place.read(), acceleration_of(running)[0])
        _require_same(before, asked)
    else:
        place.require_unused()
    experiment = before.experiment if before else _new_experiment(asked)
    method = experiment_method(experiment)
    require_rule(method)
    if before and (start := _start_of(before.state)):
        method = replace(method, backbone=FromTensors(method.backbone, start))
    framing = before.framing if before else framing_of(experiment, method)
    photos = read_photos(Path(folder), framing, recursive=asked.recursive, cache=cache_folder())
    known = before.class_names if before else ()
    found = photos.images.class_names
    new = tuple(name for name in found if name not in known)
    old = tuple(name for name in found if name in known)
    if not new and not asked.more:
        raise UsageError(
            f"There is nothing to learn: the model knows every class of {folder} already. Use --more (more=True) to "
            f"learn from more photos of them."
        )
    notes = list(photos.findings())
    chosen = _chosen_photos(photos, before, asked, experiment.seed)
    if chosen.known:
        notes.append(f"{len(chosen.known)} of these photos have been learned or held out before. They are left out.")
    if moved := [f"{path} as {name!r}" for path, own, name in chosen.known if name != own]:
        notes.append(f"Some photos were learned as another class: {some(moved)}. `ccfa undo` unlearns an update.")
    used = {found[label] for label in photos.images.labels[chosen.train + chosen.held_out].tolist()}
    if empty := [name for name in new if name not in used]:
        notes.append(f"{some(empty)}: left out, since all photos have been learned before, of other classes.")
    new, more = tuple(filter(used.__contains__, new)), tuple(filter(used.__contains__, old))
    if not new and not more:
        of_known = "" if asked.more or not old else f" but those of known classes ({some(old)}, see --more)"
        before_now = f", such as {some(moved)}" if moved else ""
        raise UsageError(
            f"There is nothing to learn: all photos of {folder}{of_known} have been learned before{before_now}."
        )
    if before and len(new) == 1 and not learns_one_class(method):
        raise UsageError(
            f"{method.name} learns nothing from a single new class, here {new[0]!r}. Give it two or more at once, or "
            f"make a model with another method (see `ccfa list methods`)."
        )
    if more and not new and not _learns_more(method):
        raise UsageError(f"{method.name} learns from more photos of known classes only together with a new class.")
    index = int(before.config["learner"]["stage"][0]) + 1 if before else 0
    stage = Stage(index if new else index - 1, len(known), len(known) + len(new))
    phases = method.phases(stage)
    if more and phases and all(phase.rows is balanced_exemplars for phase in phases):
        raise UsageError(f"{method.name} learns from its exemplars alone, not from more photos of known classes.")
    method = _with_budget(method, asked, before, framing, len(known) + len(new))
    names, rows = (*known, *new), chosen.train + chosen.held_out
    numbers = torch.tensor([names.index(name) if name in names else -1 for name in found])
    labels = numbers[photos.images.labels]
    train, held_out = _image_sets(photos, before, names, labels, chosen)
    assert train  # a class has at least one photo to learn from
    if new:
        require_images(train, len(known), len(names), method.needs_memory, method.name)
    if not before and weights_name(method) == "none":
        notes.append(
            "The backbone starts from random weights. A pretrained one, such as --backbone timm:resnet18.a1_in1k, "
            "recognises far more of a small folder (see docs/photos.md)."
        )
    folded = {name.casefold(): name for name in known}
    notes += [
        f"{name!r} is a new class, beside {folded[name.casefold()]!r}, which the model knows. Is it the same?"
        for name in new
        if name.casefold() in folded
    ]
    if not before:
        notes += longer_phases(experiment, method, (stage, Stage(1, stage.num_seen, stage.num_seen + 1)))
    if stage.num_seen == 1:
        notes.append("There is one class only, so every prediction is right. Learn a second one.")
    return Plan(
        folder=place,
        before=before,
        experiment=experiment,
        method=method,
        framing=framing,
        new=new,
        more=more,
        left_out=() if asked.more else old,
        train=train,
        held_out=held_out,
        stage=stage,
        photos=photo_tensors((photos.images.images[rows], labels[rows])),
        notes=tuple(notes),
        keep=asked.keep,
    )


def require_rule(method: Method) -> None:
    """Refuse a method whose rule of prediction a model folder cannot hold."""
    if rule_name(method.predict) not in RULES:
        raise UsageError(f"{method.name} predicts by a rule of its own, which a model folder cannot hold.")


def _start_of(state: State) -> dict[str, Tensor]:
    """The weights from which a method that starts afresh begins each time; nothing if they are random."""
    return {name.removeprefix("start."): part for name, part in state.learner.items() if name.startswith("start.")}


def _require_sound(asked: Learning) -> None:
    """Refuse values that have no meaning."""
    wrong = {
        "--held-out must be a fraction from 0 to below 1": not 0 <= asked.held_out < 1,
        "--keep must be 0 or more": asked.keep < 0,
        "--memory must be 0 or more images": asked.memory is not None and asked.memory < 0,
        "--memory-mb must be above 0": asked.memory_mb is not None and not 0 < asked.memory_mb < math.inf,
        "--seed must be from 0 to 2^32 - 1": asked.seed is not None and not 0 <= asked.seed < 2**32,
        "--image-size must be at least 1": asked.image_size is not None and asked.image_size < 1,
    }
    if found := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise UsageError(f"{found[0]}.")


def _learns_more(method: Method) -> bool:
    """Whether more photos of known classes are learned without a new stage."""
    return any(isinstance(term(), ReadOut) for term in method.terms)


def _new_experiment(asked: Learning) -> Experiment:
    """The method and its options. A pretrained backbone that will be frozen stays as it is, unless epochs are given."""
    options, method = dict(asked.options), chosen_name("method", asked.method or DEFAULT_METHOD, METHODS)
    is_timm = (asked.backbone or options.get("backbone", "")).startswith("timm:")
    weights = asked.weights or ("pretrained" if is_timm else "none")
    factory = METHODS[method]
    if "balanced" in schema(factory):
        options.setdefault("balanced", "true")  # folders have classes of any size
    if weights != "none" and "epochs" in schema(factory) and is_frozen(factory(), Stage(0, 0, 1)):
        options.setdefault("epochs", "0")
    return Experiment(
        method,
        ccfa=asked.ccfa,
        data=PHOTOS,
        seed=asked.seed or 0,
        memory=asked.memory,
        backbone=asked.backbone,
        weights=asked.weights,
        image_size=asked.image_size,
        options=options,
    )


def _require_same(model: Model, asked: Learning) -> None:
    """Refuse options that would make another model of an existing one."""
    is_ = model.experiment
    if asked.weights is not None:
        raise UsageError("--weights are what a new model starts from; this model has learned its own.")
    changes: dict[str, tuple[object, Experiment]] = {
        "--seed": (asked.seed, replace(is_, seed=is_.seed if asked.seed is None else asked.seed)),
        "--image-size": (asked.image_size, replace(is_, image_size=asked.image_size or is_.image_size)),
        "--method": (asked.method, replace(is_, method=asked.method or is_.method)),
        "--ccfa": (asked.ccfa, replace(is_, ccfa=asked.ccfa or is_.ccfa)),
    }
    given = asked.options | ({"backbone": asked.backbone} if asked.backbone else {})
    changes |= {
        f"The option {name}": (text, replace(is_, options={**is_.options, name: text})) for name, text in given.items()
    }
    for name, (wanted, other) in changes.items():
        if other != is_ and _decided(other) != _decided(is_):
            raise UsageError(
                f"{name} is chosen when a model is made and stays. {wanted} would make another model of it."
            )


def _decided(experiment: Experiment) -> tuple[object, ...]:
    """What decides a model's learning, whether it was said or is the default."""
    return experiment.seed, experiment.image_size, describe(experiment_method(experiment))


def _with_budget(method: Method, asked: Learning, before: Model | None, framing: Framing, num_seen: int) -> Method:
    """The method with the memory that was asked for, now or when the model was made."""
    megabytes = asked.memory_mb
    if megabytes is None and asked.memory is None:
        return replace(method, memory=Budget(**before.config["memory"])) if before else method
    if before and not (Budget(**before.config["memory"]).quota(num_seen) and asked.memory != 0):
        raise UsageError("A model that keeps images cannot stop, and one that keeps none cannot begin to.")
    if megabytes is not None:
        if asked.memory is not None:
            raise UsageError("Give --memory (images per class) or --memory-mb, not both.")
        images = int(megabytes * 1e6 / (3 * framing.size**2) * HELD_OUT_SHARE / (HELD_OUT_SHARE + 1))
        if images < max(method.needs_memory, 1) * num_seen:
            raise UsageError(
                f"{megabytes:g} MB hold {images} images of {framing.size} x {framing.size} pixels, fewer than one for "
                f"each of {num_seen} classes."
            )
        return with_memory(method, Budget(total=images))
    return with_memory(method, Budget(asked.memory))


class Chosen(NamedTuple):
    """Which photos of a folder are used, by row."""

    train: list[int]
    held_out: list[int]
    known: list[tuple[Path, str, str]]  # photos that the model has seen before: of which class now, and of which then


def _chosen_photos(photos: Photos, before: Model | None, asked: Learning, seed: int) -> Chosen:
    """Choose photos to learn from and photos to measure with, each once in the life of the model.

    A photo that is in two classes is never measured with: its other copy may be learned.
    """
    left_out = set(before.class_names) if before and not asked.more else set()
    seen: dict[bytes, str] = {}
    if before:
        stored = before.state.learner
        of_classes = [before.class_names[label] for label in stored["photo_labels"].tolist()]
        seen = dict(zip(map(bytes, stored["photos"].numpy()), of_classes, strict=True))
    repeated = {path for _, path in photos.duplicates}
    unclear = {path for pair in photos.conflicts for path in pair}
    digests, labels = image_digests(photos.images.images.numpy()), photos.images.labels.numpy()
    random = np.random.RandomState(seed)
    chosen = Chosen([], [], [])
    for label, name in enumerate(photos.images.class_names):
        if name in left_out:
            continue
        rows = [row for row in np.flatnonzero(labels == label).tolist() if photos.paths[row] not in repeated]
        fresh = [row for row in rows if digests[row] not in seen]
        chosen.known.extend((photos.paths[row], name, seen[digests[row]]) for row in rows if digests[row] in seen)
        clear = random.permutation([row for row in fresh if photos.paths[row] not in unclear]).tolist()
        num_held = min(max(round(asked.held_out * len(fresh)), 1), len(fresh) - 1, len(clear)) if asked.held_out else 0
        held = sorted(clear[: max(num_held, 0)])
        chosen.held_out.extend(held)
        chosen.train.extend(sorted(set(fresh) - set(held)))
    return chosen


def photo_tensors(*parts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What a model keeps of photos, given as images and labels, to recognise them later: digests and labels."""
    digests = b"".join(one for images, _ in parts for one in image_digests(images.cpu().numpy()))
    labels = torch.cat([torch.empty(0, dtype=torch.int64), *(labels.cpu() for _, labels in parts)])
    return {"photos": torch.tensor(list(digests), dtype=torch.uint8).view(-1, DIGEST_SIZE), "photo_labels": labels}


def _image_sets(
    photos: Photos, before: Model | None, names: Sequence[str], labels: Tensor, chosen: Chosen
) -> tuple[ImageSet | None, ImageSet | None]:
    """The images to learn from and those to measure with: the stored ones first, then the photos."""
    stored = (before.state.memory, before.state.held_out) if before else (None, None)
    sets: list[ImageSet | None] = []
    for rows, kept in zip((chosen.train, chosen.held_out), stored, strict=True):
        pixels, own = photos.images.images[rows], labels[rows]
        if before:
            pixels = before.gray_if_needed(pixels)
        if kept:
            pixels, own = torch.cat([kept.images, pixels]), torch.cat([kept.labels, own])
        sets.append(ImageSet(pixels, own, names) if len(own) else None)
    return sets[0], sets[1]


def estimated_seconds(plan: Plan, running: Running = DEFAULTS) -> float:
    """Estimate how long the plan takes, from one step of each phase and one pass over a batch, tried on a copy."""
    learner = _learner(plan, running, None)
    seconds = 0.0
    if plan.new:
        learner.begin(plan.stage)
        for index, phase in enumerate(plan.method.phases(plan.stage)):
            seconds += _phase_seconds(learner, phase, index)
    batch = torch.arange(min(len(plan.train), 64), device=learner.device)
    learner.embeddings(batch)  # the first time takes longer
    began = time.monotonic()
    learner.embeddings(batch)
    passes = bool(plan.method.terms) + bool(plan.method.select_exemplars)  # what terms remember, and exemplars
    images = passes * len(plan.train) + len(plan.held_out or ())
    return seconds + (time.monotonic() - began) / len(batch) * images


def _phase_seconds(learner: Learner, phase: Phase, index: int) -> float:
    rows = phase.rows(learner)
    if not phase.epochs or not len(rows):
        return 0.0
    work = prepare_phase(learner, phase, index)
    batch = work.rows[: work.batch_size]
    work.step(batch)  # the first one allocates
    began = time.monotonic()
    work.step(batch)
    steps = phase.epochs * num_batches(len(work.rows), work.batch_size)
    once = (time.monotonic() - began) * steps
    return once + (phase.epochs * _phase_seconds(learner, phase.after_epoch, index) if phase.after_epoch else 0.0)


def _learner(plan: Plan, running: Running, observer: Observer | None) -> Learner:
    """A learner that stands where the model does, with the plan's images as its training set."""
    device, acceleration = acceleration_of(running)
    acceleration = replace(acceleration, compile=acceleration.compile and _num_steps(plan) >= WORTH_COMPILING)
    learner = Learner(
        plan.method, plan.train, seed=plan.experiment.seed, device=device, acceleration=acceleration, observer=observer
    )
    if plan.before:
        state, num_old = plan.before.state, plan.stage.num_old
        stored = state.memory.labels if state.memory else torch.empty(0, dtype=torch.int64)
        kept = [one["memory"] for one in state.config["classes"]]
        if stored.bincount(minlength=num_old).tolist() != kept:
            raise UsageError(
                f"The exemplars of {plan.folder.path} were left out, and {plan.method.name} cannot learn new classes "
                f"without them. The model can predict as before."
            )
        tensors = {f"network.{name}": tensor for name, tensor in state.network.items() if name != "directions"}
        tensors |= {name: part for name, part in state.learner.items() if not name.startswith(OWN_TENSORS)}
        rows = [torch.nonzero(stored == label).flatten() for label in range(num_old)] if len(stored) else []
        tensors |= {f"memory.{label}": one for label, one in enumerate(rows)}
        restore(learner, tensors, {**state.config["learner"], "num_classes_stored": len(rows), "phases": []})
        if plan.more:
            rows = [plan.train.rows(label, label + 1) for label in _more_labels(plan)]
            added = torch.cat(rows)
            learner.additional = added[added >= len(stored)].to(learner.device)
    return learner


def _num_steps(plan: Plan) -> int:
    """How many training steps there are at most."""
    phases = plan.method.phases(plan.stage) if plan.new else ()
    return sum(phase.epochs * num_batches(len(plan.train), phase.batch_size) for phase in phases)


def _more_labels(plan: Plan) -> list[int]:
    return sorted(plan.train.class_names.index(name) for name in plan.more)


def carry_out(plan: Plan, running: Running = DEFAULTS, observer: Observer | None = None) -> Model:
    """Learn what was planned and replace the model, in one step. Hold its folder from the plan on."""
    began = time.monotonic()
    plan.require_current()
    learner = _learner(plan, running, observer)
    if plan.new:
        learner.learn(plan.stage)
    if plan.more:
        _conclude_more(learner, plan)
    state = _state(plan, learner, time.monotonic() - began)
    plan.require_current()  # also where the file system has no locks
    plan.folder.replace(state, plan.keep)
    return Model(plan.folder.path, state, learner.device)


def _conclude_more(learner: Learner, plan: Plan) -> None:
    """Add the new photos of known classes to what a read-out has learned, and choose exemplars among them."""
    for term in learner.terms:
        if isinstance(term, ReadOut):
            rows = learner.additional
            term.learn_more(learner.network.head, learner.embeddings(rows), learner.train.labels[rows])
    quota, select = plan.method.memory.quota(plan.stage.num_seen), plan.method.select_exemplars
    if select is None or not learner.memory.classes:
        return
    for label in _more_labels(plan):
        added = learner.additional[learner.train.labels[learner.additional] == label]
        rows = torch.cat([learner.memory.classes[label], added])
        chosen = select([learner.embeddings(rows)], quota, learner.generator("more", label))
        learner.memory.classes[label] = rows[chosen[0]]


def _state(plan: Plan, learner: Learner, seconds: float) -> State:
    """The model that the learner has become, with the update added to what it was."""
    config = plan.before.config if plan.before else {}
    stored = plan.before.state.memory if plan.before else None
    old = stored.labels.bincount(minlength=plan.stage.num_seen).tolist() if stored else [0] * plan.stage.num_seen
    photos = [num - kept for num, kept in zip(_counts(plan.train), old, strict=True)]
    classes = [dict(one) for one in config.get("classes", [])]
    classes += [{"name": name, "stage": plan.stage.index, "images": 0} for name in plan.new]
    for one, num in zip(classes, photos, strict=True):
        one["images"] += num
    update = {
        "date": now(),
        "new_classes": list(plan.new),
        "more_of": list(plan.more),
        "photos": sum(photos),
        "seconds": round(seconds, 1),
        "device": str(learner.device),
        "phases": phases_of(plan.method, plan.stage) if plan.new else [],
    }
    return new_state(
        learner,
        plan.experiment,
        framing=plan.framing,
        held_out=plan.held_out,
        photos=plan.photos,
        classes=classes,
        updates=[*config.get("updates", []), update],
        plugins=config.get("plugins", {}) | loaded_plugins(),
        weights=config.get("weights") or weights_name(plan.method),
        before=plan.before.state._replace(card=plan.folder.read_card()) if plan.before else None,
    )


def new_state(
    learner: Learner,
    experiment: Experiment,
    *,
    framing: Framing,
    held_out: ImageSet | None,
    photos: Mapping[str, Tensor],
    classes: list[dict[str, Any]],
    updates: list[dict[str, Any]],
    plugins: Mapping[str, str],
    weights: str,
    before: State | None = None,
) -> State:
    """The state of a model that a learner has become: what it keeps, measured on images it was not trained on.

    `classes` and `updates` are completed: the memory of each class, and the accuracies.
    """
    method, num_seen = learner.method, learner.stage.num_seen
    rule, transforms = rule_name(method.predict), method.transforms
    tensors, facts = state_of(learner)
    network = {name.removeprefix("network."): part for name, part in tensors.items() if name.startswith("network.")}
    rest = {name: part for name, part in tensors.items() if not name.startswith(("network.", "memory."))}
    directions = _directions(learner)
    if directions is not None:
        network["directions"] = directions
    classifier = Classifier(learner.network.frozen_copy(), transforms, 1.0, directions, rule == "nearest_mean")
    rest |= {name: torch.cat([before.learner[name], part]) if before else part for name, part in photos.items()}
    if method.prepare is start_afresh and weights != "none":
        start = method.backbone(learner.train.shape[0]).state_dict()
        rest |= {f"start.{name}": part for name, part in start.items()}
    embeddings, of_embeddings = _held_embeddings(classifier, held_out, before)
    (scores, familiarity), labels = read(classifier, embeddings), of_embeddings.numpy()
    if is_frozen(method, learner.stage):  # embeddings never change, so they serve later updates without the photos
        rest |= {"held_out.embeddings": embeddings, "held_out.labels": of_embeddings}
    right = scores.argmax(axis=1) == labels
    kept = [len(rows) for rows in learner.memory.classes] or [0] * num_seen
    for label, one in enumerate(classes):
        one["memory"], is_class = kept[label], labels == label
        if is_class.any():
            one |= {"held_out": int(is_class.sum()), "accuracy": float(right[is_class].mean())}
        else:
            one |= {"held_out": 0, "accuracy": None}
    found = [one["accuracy"] for one in classes if one["accuracy"] is not None]
    # Old classes may have kept fewer held-out images than new ones have, and must not count less.
    accuracy = sum(found) / len(found) if found else None
    updates[-1] |= {"held_out": len(labels), "measured_classes": len(found), "accuracy": accuracy}
    config = {
        "ccfa": ccfa.__version__,
        "state": before.config["state"] + 1 if before else 1,
        "experiment": asdict(replace(experiment, weights="none", image_size=framing_of(experiment, method).size)),
        **({"plugins": plugins} if plugins else {}),
        "backbone": _backbone_name(method),
        "weights": weights,
        "head": type(learner.network.head).__name__,
        "rule": rule,
        "preprocessing": {
            "channels": learner.train.shape[0],
            **asdict(framing),
            "mean": list(transforms.mean),
            "std": list(transforms.std),
            "centre": transforms.centre,
        },
        "memory": asdict(method.memory),
        "classes": classes,
        "calibration": calibrate(scores, familiarity, labels)._asdict(),
        "learner": {name: facts[name] for name in ("stage", "num_auxiliary")},
        "updates": updates,
    }
    memory, kept_out = _memory(learner), _kept_out(learner, held_out)
    return State(config, network, rest, model_card(config, before.card if before else ""), memory, kept_out)


def _directions(learner: Learner) -> Tensor | None:
    """The mean direction of each class: of its exemplars, or of all its images if a read-out has added them up."""
    if learner.memory.classes:
        return learner.class_means()
    sums = [term.directions for term in learner.terms if isinstance(term, ReadOut)]
    return F.normalize(sums[0]) if sums else None  # elsewhere old classes have moved, and nothing tells where to


def _held_embeddings(classifier: Classifier, held_out: ImageSet | None, before: State | None) -> tuple[Tensor, Tensor]:
    """Embeddings and labels of the held-out images. Those that earlier updates have left replace the stored images."""
    parts = [(torch.empty(0, classifier.network.backbone.dim), torch.empty(0, dtype=torch.int64))]
    first = 0
    if before and "held_out.embeddings" in before.learner:
        parts.append((before.learner["held_out.embeddings"], before.learner["held_out.labels"]))
        first = len(before.held_out.labels) if before.held_out else 0
    if held_out:
        parts.append((embed(classifier, held_out.images[first:]), held_out.labels[first:].cpu()))
    embeddings, labels = zip(*parts, strict=True)
    return torch.cat(embeddings), torch.cat(labels)


def _backbone_name(method: Method) -> str:
    builder, timm = untrained(method.backbone), timm_model(method.backbone)
    if timm:
        return f"timm:{timm.name}"
    return next((name for name, one in BACKBONES.items() if one == builder), str(describe(builder)))


def phases_of(method: Method, stage: Stage) -> list[dict[str, Any]]:
    """How a stage is trained, in plain values."""
    shown = ("name", "epochs", "batch_size", "lr", "weight_decay")
    return [{name: getattr(phase, name) for name in shown} for phase in method.phases(stage)]


def weights_name(method: Method) -> str:
    """What the backbone begins with: none, pretrained, or a file by its name and digest."""
    if isinstance(method.backbone, FromFile):
        return f"{method.backbone.path.name}, SHA-256 {method.backbone.sha256}"
    return "none" if untrained(method.backbone) == method.backbone else "pretrained"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _counts(images: ImageSet) -> list[int]:
    counts: list[int] = images.labels.bincount(minlength=images.num_classes).tolist()
    return counts


def _memory(learner: Learner) -> Images:
    """The exemplars of each class as images, best first."""
    train = learner.train
    rows = torch.cat([torch.empty(0, dtype=torch.int64, device=train.device), *learner.memory.classes])
    return Images(train.images[rows].cpu(), train.labels[rows].cpu())


def _kept_out(learner: Learner, held_out: ImageSet | None) -> Images:
    """The held-out images that the model keeps: a quarter as many of each class as it may keep to learn from."""
    num_seen = learner.stage.num_seen
    memory = learner.method.memory
    few = math.ceil((memory.per_class or 0) / HELD_OUT_SHARE)
    quota = few if memory.total is None else memory.total // HELD_OUT_SHARE // num_seen
    if held_out is None:
        shape = learner.train.images.shape[1:]
        return Images(torch.empty(0, *shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    rows = torch.cat([torch.nonzero(held_out.labels == label).flatten()[:quota] for label in range(num_seen)])
    return Images(held_out.images[rows].cpu(), held_out.labels[rows].cpu())
