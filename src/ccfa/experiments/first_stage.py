"""The first stage, trained once and reused by every run that shares it."""

import functools
import hashlib
import json
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ccfa
from ccfa.data import Stage
from ccfa.errors import ModelError, Notice, ResourceError
from ccfa.experiments.experiment import Resolved, describe
from ccfa.files import make_folder, read_tensors, write_tensors
from ccfa.kernels import are_left_out
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.progress import WAITING
from ccfa.learning.state import take_over
from ccfa.methods.frozen import trained_network
from ccfa.methods.method import new_and_exemplars
from ccfa.models.pretrained import timm_version
from ccfa.plugins import plugins_digest

# The layers whose code decides a first stage.
LAYERS = ("data", "kernels", "models", "losses", "augmentation", "methods", "learning")

_turns: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_taken: dict[int, Path] = {}  # the first stage that each thread has the turn for


def take_turn(path: Path) -> None:
    """Let this thread be the one that learns a first stage, unless another thread is."""
    if _turns[path].acquire(blocking=False):
        _taken[threading.get_ident()] = path


def leave_turn() -> None:
    """Let another thread learn the first stage that this one had the turn for."""
    if path := _taken.pop(threading.get_ident(), None):
        _turns[path].release()


def learn_first_stage(
    learner: Learner,
    stage: Stage,
    path: Path,
    on_learned: Callable[[], None] = lambda: None,
    spent: Callable[[], float] = lambda: 0.0,
    leave_out: Callable[[float], None] = lambda seconds: None,
) -> None:
    """Learn the first stage, or take the weights of a run that has learned it and stored them at this path.

    Of several runs in this process, one trains and the others wait. `on_learned` is called before the weights are
    stored. It writes the run's own checkpoint: a run that is killed in between would otherwise take its own weights and
    lose the epochs that it has logged.

    `spent` returns the seconds that this run has spent on the stage, and `leave_out` takes seconds away from them:
    those of waiting. A run that takes the weights adds the seconds of their training, so that costs can be compared.
    """
    began, me = time.monotonic(), threading.get_ident()
    if _taken.get(me) != path:
        if _turns[path].locked():
            learner.observer.on_activity(stage, WAITING)
        _turns[path].acquire()
        _taken[me] = path
    try:
        leave_out(time.monotonic() - began)
        learner.on_pause()  # the runs may have been stopped meanwhile
        learner.begin(stage)
        if not path.exists():
            learner.optimise()
            facts = {"first_stage": path.stem, "seconds": round(spent(), 2)}
            # A copy, since concluding may change it: AFC's forward passes do.
            trained = trained_network(learner.network).frozen_copy()
            learner.conclude()
            on_learned()
            try:
                make_folder(path.parent)
                write_tensors(path, trained.state_dict(), facts)
            except ResourceError as error:  # the run itself does not need the file
                warnings.warn(Notice(f"{error} This first stage is not kept for other runs."), stacklevel=2)
            return
        weights, seconds = _stored(path)
        learner.interrupted.clear()  # another run has finished what was begun here
        learner.network.head.drop_auxiliary()
        learner.method.reduce_network(learner.network)
        take_over(trained_network(learner.network), weights)
        leave_out(spent() - seconds)  # also what this run itself had trained of it
    finally:
        leave_turn()
    learner.conclude()
    on_learned()


def _stored(path: Path) -> tuple[Mapping[str, Tensor], float]:
    """Return the weights, and the seconds that their training took."""
    try:
        weights, facts = read_tensors(path)
        if facts.get("first_stage") != path.stem:
            raise ModelError(f"{path} is another first stage.")
    except ModelError as error:
        raise ModelError(f"{error} Remove it to train that first stage again.") from error
    return weights, float(facts.get("seconds", 0))


def stored_at(folder: Path, key: str) -> Path:
    """Return the file of a first stage."""
    return folder / f"{key}.safetensors"


def first_stage_key(resolved: Resolved, acceleration: Acceleration, device: torch.device) -> str:
    """Return a digest of everything the first stage reads: parts of the method, data, seeds, precision, code."""
    method, stage = resolved.method, resolved.stages[0]
    first = method.first or method  # whose head is trained
    known_by_name: list[Any] = []
    read: dict[str, Any] = {
        "data": resolved.train.fingerprint,  # hashed once for all runs on these images
        "classes": resolved.train.class_names[: stage.num_seen],
        "parts": [
            describe(part, known_by_name)
            for part in (
                method.transforms,
                method.backbone,
                first.head,
                method.criterion,
                method.phases(stage),
                first.prepare,
                method.shape_network,
                method.reduce_network,
                method.auxiliary_classes(stage),
                method.classification_weight(stage),
                # Feature augmentations that need an old head do nothing in the first stage.
                [part for part in method.feature_augmentations if not part.needs_old_head],
                method.image_augmentation,
                # Exemplars are chosen after training, unless a phase asks for them.
                None if all(phase.rows is new_and_exemplars for phase in method.phases(stage)) else method.memory,
            )
        ],
        "seeds": [resolved.experiment.seed, resolved.experiment.batch_seed],
        "precision": describe(acceleration),
        **({"kernels": "off"} if are_left_out() else {}),
        "device": device.type,
        "torch": str(torch.__version__),
        "timm": timm_version(method.backbone),
        "code": _code_digest(Path(ccfa.__file__).parent) + plugins_digest(),
    }
    if known_by_name:  # they may hold any option; those of CCFA have no effect before there is an old head
        options = resolved.experiment.options
        read["options"] = {name: text for name, text in options.items() if not name.startswith("ccfa.")}
    return hashlib.sha256(json.dumps(read, sort_keys=True, default=repr).encode()).hexdigest()[:32]


@functools.cache
def _code_digest(package: Path) -> str:
    """Return a digest of the layers that train; commands and reports may change without another first stage."""
    digest = hashlib.sha256()
    layers = {
        path: path.relative_to(package).parts[0].removesuffix(".py")
        for path in package.rglob("*")
        if path.suffix in (".py", ".cu")
    }
    layers.pop(package / "learning" / "progress.py", None)  # it only watches
    for path in sorted(path for path, layer in layers.items() if layer in LAYERS):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
