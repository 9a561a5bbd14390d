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

import torch
from torch import Tensor

import ccfa
from ccfa.data import Stage
from ccfa.errors import ModelError, Notice, ResourceError
from ccfa.experiments.experiment import Resolved, describe
from ccfa.files import make_folder, read_tensors, require_place, write_tensors
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.state import take_over
from ccfa.methods.parts import new_and_exemplars
from ccfa.plugins import plugins_digest

# The layers whose code decides a first stage.
LAYERS = ("data", "kernels", "models", "losses", "augmentation", "methods", "learning")


class FirstStages:
    """A folder of networks after the first stage's training, each under the digest of everything it was made from."""

    def __init__(self, folder: Path) -> None:
        require_place(folder)
        self.folder = folder
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def learn(
        self, learner: Learner, stage: Stage, key: str, on_turn: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """Learn the first stage, or take the weights of a run that has learned it.

        `on_turn` receives the seconds for which this run waited while another run of the process trained.
        """
        began = time.monotonic()
        with self._locks[key]:  # of several runs in this process, one trains and the others wait
            on_turn(time.monotonic() - began)
            learner.on_pause()  # the runs may have been stopped meanwhile
            learner.begin(stage)
            trained = self.load(key)
            if trained is None:
                learner.optimise()
                try:
                    self.store(key, learner.network)
                except ResourceError as error:  # the run itself does not need the file
                    warnings.warn(Notice(f"{error} This first stage is not kept for other runs."), stacklevel=2)
            else:
                learner.interrupted.clear()  # another run has finished what was begun here
                learner.network.head.drop_auxiliary()
                take_over(learner.network, trained)
        learner.conclude()

    def path(self, key: str) -> Path:
        """Return where the network of a key is."""
        return self.folder / f"{key}.safetensors"

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        """Return the weights of a key, or None if no run has trained them yet."""
        if not self.path(key).exists():
            return None
        try:
            weights, facts = read_tensors(self.path(key))
            if facts != {"first_stage": key}:
                raise ModelError(f"{self.path(key)} is another first stage.")
        except ModelError as error:
            raise ModelError(f"{error} Remove it to train that first stage again.") from error
        return weights

    def store(self, key: str, network: torch.nn.Module) -> None:
        """Keep a network for other runs."""
        make_folder(self.folder)
        write_tensors(self.path(key), network.state_dict(), {"first_stage": key})


def first_stage_key(resolved: Resolved, acceleration: Acceleration, device: torch.device) -> str:
    """Return a digest of everything the first stage reads: parts of the method, data, seeds, precision, code."""
    method, stage = resolved.method, resolved.stages[0]
    read = {
        "data": resolved.train.fingerprint,  # hashed once for all runs on these images
        "classes": resolved.train.class_names[: stage.num_seen],
        "parts": [
            describe(part)
            for part in (
                method.transforms,
                method.backbone,
                method.head,
                method.criterion,
                method.phases(stage),
                method.prepare,
                method.shape_network,
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
        "device": device.type,
        "torch": str(torch.__version__),
        "code": _code_digest(Path(ccfa.__file__).parent) + plugins_digest(),
    }
    return hashlib.sha256(json.dumps(read, sort_keys=True, default=repr).encode()).hexdigest()[:32]


@functools.cache
def _code_digest(package: Path) -> str:
    """Return a digest of the layers that train; commands and reports may change without another first stage."""
    digest = hashlib.sha256()
    for path in sorted(path for layer in LAYERS for path in (package / layer).rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
