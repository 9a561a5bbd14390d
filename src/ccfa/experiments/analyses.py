"""A run directory opened again, to look inside: its data, its method, and the network and exemplars of a stage."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import ModelError
from ccfa.experiments.building import experiment_method
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.experiment import Resolved, experiment_of, resolve
from ccfa.experiments.run_directory import Run
from ccfa.learning import Learner
from ccfa.learning.networks import network_of

# What must be found again for rows and labels to mean what they meant to the run.
_SAME_DATA = ("class_names", "class_order", "stage_sizes", "num_training_images", "num_test_images")


def reopen(directory: Run, data_dir: Path | None = None) -> Resolved:
    """The experiment of a run with its data and its method, as they were."""
    config = directory.read_json("config.json")
    resolved = resolve(experiment_of(config), data_dir)
    stored, now = config.get("resolved"), resolved.config["resolved"]
    if not isinstance(stored, dict):
        raise ModelError(f"{directory.path / 'config.json'} does not say what the experiment came to; it is damaged.")
    names = [*_SAME_DATA, *(["fingerprints"] if "fingerprints" in stored else [])]  # older runs have none
    if found := differences(*({name: part.get(name) for name in names} for part in (stored, now))):
        raise ModelError(
            f"{directory.path} was run on other data than those found now. Name the data of the run with --data-dir, "
            f"or put them back where they were.\n{two_columns(found)}"
        )
    return resolved


def with_ccfa(resolved: Resolved) -> Resolved:
    """The experiment with CCFA plugged in, with the run's options or, for a run without it, the data set's."""
    return resolved._replace(method=experiment_method(replace(resolved.experiment, ccfa=True)))


def learner_after(stage: Stage, directory: Run, resolved: Resolved, device: torch.device) -> Learner:
    """A learner with the network that the run had after a stage; it remembers nothing else."""
    asked = resolved.experiment
    learner = Learner(resolved.method, resolved.train, seed=asked.seed, batch_seed=asked.batch_seed, device=device)
    weights = directory.network_weights(stage.index)
    network = network_of(resolved.method, resolved.train.shape[0], stage.index, weights)
    learner.stage, learner.network = stage, learner.acceleration.place(network, learner.device)
    return learner


def exemplars_after(directory: Run, learner: Learner) -> list[Tensor]:
    """The rows kept of each class after the learner's stage; of a first stage that wrote none down, chosen again."""
    index = learner.stage.index
    if index == 0 and not (directory.path / "exemplars").exists():
        return learner.select_new_exemplars()
    kept = directory.read_exemplars(index)
    rows = [row for rows in kept for row in rows]
    num_classes = learner.stage.num_seen if learner.memory.quota(learner.stage.num_seen) else 0
    if len(kept) != num_classes or not all(0 <= row < len(learner.train) for row in rows):
        raise ModelError(
            f"The exemplars of stage {index} in {directory.path} do not fit: expected rows of the {len(learner.train)} "
            f"training images for each of {num_classes} classes. The file is damaged; run it again."
        )
    return [torch.tensor(rows, dtype=torch.int64, device=learner.device) for rows in kept]
