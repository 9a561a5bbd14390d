"""A finished run as a model."""

from dataclasses import replace
from pathlib import Path

import torch

from ccfa.data import DATASETS, Framing
from ccfa.data.registry import FAMILIES
from ccfa.deployment.folder import ModelFolder
from ccfa.deployment.model import RULES, Model
from ccfa.deployment.updating import DIGEST_SIZE, PHOTOS, new_state, now
from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import rule_name
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
    if rule_name(resolved.method.predict) not in RULES:
        raise UsageError(f"{resolved.method.name} predicts by a rule of its own, which a model folder cannot hold.")
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
            "accuracy": float(report.rules[report.own].overall[stage.index]),
            "seconds": round(report.seconds / len(resolved.stages), 1),
            "device": report.environment.get("device", "unknown"),
        }
        for stage in resolved.stages
    ]
    state = new_state(
        learner,
        experiment=experiment,
        plugins=directory.config.get("plugins", {}),
        framing=framing,
        held_out=resolved.test,
        classes=classes,
        updates=updates,
        digests=torch.empty(0, DIGEST_SIZE, dtype=torch.uint8),
    )
    with folder.held():
        folder.replace(state)
    return Model(folder.path, state, device)
