"""A finished run as a model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ccfa.data import DATASETS, Framing
from ccfa.data.registry import FAMILIES
from ccfa.deployment.folder import ModelFolder
from ccfa.deployment.model import Model
from ccfa.deployment.scoring import class_weights
from ccfa.deployment.updating import (
    PHOTOS,
    new_state,
    now,
    phases_of,
    photo_tensors,
    require_rule,
    weights_name,
)
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.experiment import framing_of
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import DEFAULTS, acceleration_of, resolve_again
from ccfa.learning import Learner
from ccfa.learning.state import restore
from ccfa.plugins import load_plugin
from ccfa.settings import Running


def model_of_run(run: Path | str, out: Path | str, running: Running = DEFAULTS) -> Model:
    """Make a model of a finished run: its last network, and the exemplars that it chose, as images.

    Args:
        run: The run directory. Its data must be at hand.
        out: The model's folder, which is created. A folder that holds something is refused.
        running: The device, where the data are, and plug-ins.

    Returns:
        The model. Its accuracies and its calibration are those on the run's test images.
    """
    for plugin in running.plugin:
        load_plugin(plugin)
    directory, folder = Run(run), ModelFolder(out)
    if folder.holds_model():
        raise UsageError(f"{out} holds a model already. Choose another folder.")
    folder.require_unused()
    if not directory.is_finished():
        raise UsageError(f"{run} is not finished. Continue it first: ccfa resume {run}")
    resolved = resolve_again(directory, running.data_dir)
    require_rule(resolved.method)
    _, height, width = resolved.train.shape
    if height != width:
        raise UsageError(f"A model takes square images, and those of {run} have {height} x {width} pixels.")
    device, acceleration = acceleration_of(running)
    learner = Learner(
        resolved.method, resolved.train, seed=resolved.experiment.seed, device=device, acceleration=acceleration
    )
    stored = directory.load_checkpoint()
    if stored is None:
        raise ModelError(f"{run} has no checkpoint of its last stage, from which a model could be made.")
    restore(learner, stored.tensors, stored.state["learner"])
    experiment = resolved.experiment
    framing, (kind, _, file) = Framing(height), experiment.data.partition(":")
    if kind in FAMILIES:  # the place of a file or of a folder is nobody's business
        experiment = replace(experiment, data=f"{kind}:{Path(file).name}")
    elif experiment.data not in DATASETS:
        experiment = replace(experiment, data=PHOTOS)
        framing = framing_of(experiment, resolved.method)
    report, names = directory.report(), resolved.train.class_names
    counts = resolved.train.labels.bincount(minlength=len(names)).tolist()
    classes = [
        {"name": names[label], "stage": stage.index, "images": counts[label]}
        for stage in resolved.stages
        for label in range(stage.num_old, stage.num_seen)
    ]
    updates = [
        {
            "date": now(),
            "new_classes": list(names[stage.num_old : stage.num_seen]),
            "more_of": [],
            "photos": sum(counts[stage.num_old : stage.num_seen]),
            "held_out": int((resolved.test.labels < stage.num_seen).sum()),
            "measured_classes": stage.num_seen,
            "accuracy": _accuracy(directory.read_predictions(stage.index), report.own),
            "seconds": round(report.seconds / len(resolved.stages), 1),
            "device": report.environment.get("device", "unknown"),
            "phases": phases_of(resolved.method, stage),
        }
        for stage in resolved.stages
    ]
    # Photos of a folder may be given to `ccfa learn` again; images of a data set are not files.
    known = (resolved.train, resolved.test) if experiment.data == PHOTOS else ()
    state = new_state(
        learner,
        experiment,
        framing=framing,
        held_out=resolved.test,
        photos=photo_tensors(*((part.images, part.labels) for part in known)),
        classes=classes,
        updates=updates,
        plugins=directory.config.get("plugins", {}),
        weights=weights_name(resolved.method),
    )
    with folder.held():
        folder.replace(state)
    return Model(folder.path, state, device)


def _accuracy(predictions: Mapping[str, NDArray[np.int64]], rule: str) -> float:
    """The mean over classes, as models have it."""
    labels = predictions["labels"]
    return float(np.average(predictions[f"by_{rule}"] == labels, weights=class_weights(labels)))
