"""Continuing a run: the same experiment on the same data, and what is said where the surroundings are others."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ccfa.data import Stage
from ccfa.errors import ModelError, Notice
from ccfa.experiments.checkpoint import Checkpoint
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.environment import environment
from ccfa.experiments.experiment import Resolved, experiment_of, resolve
from ccfa.experiments.recording import Recorder
from ccfa.experiments.rundir import RunDirectory
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration, Precision, pick_device
from ccfa.learning.state import restore

DECIDES_BITS = ("ccfa", "commit", "torch", "numpy", "device", "threads", "acceleration")


def resolve_again(directory: RunDirectory, data_dir: Path | None = None) -> Resolved:
    """The experiment of a run with its data, which must be what it was begun with."""
    config = directory.read_json("config.json")
    resolved = resolve(experiment_of(config), data_dir)
    if found := differences(config, resolved.config):
        raise ModelError(
            f"{directory.path} cannot be continued: the data or the method are no longer what it was begun with. "
            f"Put them back, or start a new run.\n{two_columns(found)}"
        )
    return resolved


def speed_again(
    directory: RunDirectory, device: str, precision: Precision | None, compile: bool, graph: bool
) -> tuple[torch.device, Acceleration]:
    """Device and precision as asked for or, where nothing is asked, as the run was begun with.

    What was switched off for the run, compilation or graphs, stays off on the kind of device it was begun on.
    """
    begun = directory.read_json("environment.json")
    chosen = pick_device(str(begun.get("torch_device", "auto")) if device == "auto" else device)
    same_kind = str(begun.get("torch_device", "")).startswith(chosen.type)
    before = begun.get("acceleration", {}) if same_kind else {}
    compile, graph = compile and before.get("compile", True), graph and before.get("graph", True)
    return chosen, Acceleration.for_device(chosen, precision or before.get("precision"), compile, graph)


def note_surroundings(directory: RunDirectory, device: torch.device, acceleration: Acceleration, number: int) -> None:
    """Say and write down what may keep a continued run from ending with the same bits as one never stopped."""
    begun = directory.read_json("environment.json")
    now = environment(device, acceleration)
    known = [name for name in DECIDES_BITS if name in begun]
    found = differences({name: begun[name] for name in known}, {name: now[name] for name in known})
    if found:
        resumed = [*begun.get("resumed", []), {"checkpoint": number, "differences": found}]
        directory.write_json("environment.json", {**begun, "resumed": resumed})
        text = f"Continued in other surroundings, so the result may differ in its last bits:\n{two_columns(found)}"
        warnings.warn(Notice(text), stacklevel=2)


def take_up(stored: Checkpoint, learner: Learner, recorder: Recorder, stages: Sequence[Stage]) -> dict[str, int]:
    """Make learner and recorder stand where the checkpoint left them, and return the lengths that the logs had then.

    A checkpoint that does not fit together is refused.
    """
    try:
        restore(learner, stored.tensors, stored.state["learner"])
        recorder.rows = list(stored.state["rows"])
        recorder.seconds_before = float(stored.state["seconds"])
        recorder.begin_stage(float(stored.state["stage_seconds"]))
        lengths = {str(name): max(0, int(length)) for name, length in stored.state["log_lengths"].items()}
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"Checkpoint {stored.number} does not hold what it should: {error!r}.") from error
    stage, head = learner.stage, learner.network.head
    fits = {
        "the stage": stage in stages and len(recorder.rows) == stage.index + (not learner.interrupted),
        "the number of classes": head.num_classes == stage.num_seen + head.num_auxiliary,
        "the exemplars": all(_are_rows_of(label, rows, learner) for label, rows in enumerate(learner.exemplars())),
    }
    if wrong := [name for name, holds in fits.items() if not holds]:
        raise ModelError(f"Checkpoint {stored.number} does not fit this run: {', '.join(wrong)} cannot be so.")
    return lengths


def _are_rows_of(label: int, rows: Tensor, learner: Learner) -> bool:
    if rows.dtype != torch.int64 or rows.dim() != 1 or ((rows < 0) | (rows >= len(learner.train))).any():
        return False
    return bool((learner.train.labels[rows] == label).all())
