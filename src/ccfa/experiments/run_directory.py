"""A run: a directory with everything an experiment leaves behind.

`Run` is the only reader and the only writer of these files:

    config.json, environment.json, status.json    the experiment, where it ran, how it ended
    metrics.jsonl, errors.txt                     one line per epoch, errors
    stages.csv, accuracy_matrix.csv, report.json  the results so far
    networks/, predictions/, exemplars/           one file per stage
    checkpoints/                                  what `ccfa resume` continues from; the last two are kept
"""

import csv
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ccfa
from ccfa.errors import DivergedError, ModelError, Notice, ResourceError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.experiment import experiment_of
from ccfa.files import (
    LOCK,
    damage_named,
    disk_errors,
    is_temporary,
    locked,
    make_folder,
    read_file,
    read_json,
    read_tensors,
    remove_temporaries,
    require_plain,
    sync,
    write_atomically,
    write_json,
    write_table,
    write_tensors,
)
from ccfa.settings import Experiment

FOLDERS = ("predictions", "networks", "exemplars", "checkpoints")
METRICS = "metrics.jsonl"
ERRORS = "errors.txt"
CHECKPOINTS_KEPT = 2
CHECKPOINT_FORMAT = 2
VALUE_WIDTH = 40  # characters of a value in a message


@contextmanager
def left_alone(folder: Path) -> Iterator[None]:
    """Hold a folder if it has a lock file; a folder without one is not changed."""
    has_lock = (folder / LOCK).exists() and os.access(folder / LOCK, os.W_OK)
    with locked(folder) if has_lock else nullcontext():
        yield


class Checkpoint(NamedTuple):
    """The learner's tensors, and everything else as JSON."""

    number: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Run:
    """A run directory: what an experiment was, what came out, and what it can be continued from.

    Reading a file that is missing, damaged or of another run raises a ModelError. Writing one that the disk does not
    take raises a ResourceError, and the previous version of the file is kept.

    Args:
        path: the directory; it need not exist yet.

    >>> import tempfile
    >>> from ccfa.experiments import resolve
    >>> folder = tempfile.TemporaryDirectory()
    >>> run = Run(Path(folder.name) / "run")
    >>> with run.entered(resolve(Experiment("finetune", scenario="5,5")).config, {"device": "cpu"}):
    ...     run.write_predictions(0, {"labels": np.array([0, 1]), "by_logits": np.array([0, 0])})
    >>> run.experiment.method, run.environment["device"], run.is_finished()
    ('finetune', 'cpu', False)
    >>> run.read_predictions(0)["by_logits"]
    array([0, 0])
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @contextmanager
    def entered(self, config: Mapping[str, Any], environment: Mapping[str, Any], new: bool = False) -> Iterator[None]:
        """Hold the directory in order to run this configuration in it: a new directory, or one that has begun it.

        With `new`, a directory that holds a run already is refused.
        """
        make_folder(self.path)
        if not self.is_begun() and not self._is_unused():
            raise self._exists()
        with locked(self.path):
            for name in (*FOLDERS, METRICS, ERRORS):
                require_plain(self.path / name)
            if self.is_begun():
                if new:
                    raise self._exists()
                self.require_same(config)
            remove_temporaries(self.path)
            for name in FOLDERS:
                make_folder(self.path / name)
                remove_temporaries(self.path / name)
            if not self.is_begun():
                write_json(self.path / "environment.json", environment)
                write_json(self.path / "config.json", config)  # last: with it, the run has begun
            yield

    def require_new(self) -> None:
        """Refuse a directory that has anything in it."""
        if self.path.is_symlink() or (self.path.exists() and not self._is_unused()):
            raise self._exists()

    def _is_unused(self) -> bool:
        """Whether nothing is here but what a process leaves that was killed before its run had begun."""
        ours = {*FOLDERS, LOCK, "environment.json"}
        with disk_errors(f"read {self.path}"):
            return self.path.is_dir() and all(name in ours or is_temporary(name) for name in os.listdir(self.path))

    def _exists(self) -> UsageError:
        message = f"{self.path} exists already and is not changed. Choose another directory with --out"
        if self.is_begun():
            message += ", or repeat the command with --reuse, which continues the run unless it is finished"
        return UsageError(f"{message}.")

    def is_begun(self) -> bool:
        return (self.path / "config.json").exists()

    def require_same(self, config: Mapping[str, Any]) -> None:
        """Refuse another configuration than the run's own."""
        if changed := differences(self.config, config):
            raise UsageError(
                f"{self.path} holds another experiment. Choose another directory with --out.\n{two_columns(changed)}"
            )

    def is_finished(self) -> bool:
        """Whether all stages are done; a run without a report has none."""
        if (self.path / "report.json").exists():
            return self.report().finished
        self.read_json("config.json")
        return False

    @property
    def config(self) -> dict[str, Any]:
        """The experiment as it was given, and what it resolved to."""
        return self.read_json("config.json")

    @property
    def experiment(self) -> Experiment:
        return experiment_of(self.config)

    @property
    def environment(self) -> dict[str, Any]:
        return self.read_json("environment.json")

    @property
    def status(self) -> dict[str, Any]:
        return self.read_json("status.json")

    def report(self) -> Report:
        """Return the results of the finished stages."""
        path = self.path / "report.json"
        content = read_file(path)
        with damage_named(path):
            return Report.from_json(content.decode())

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.path / name)
        except ModelError as error:
            hint = " Repeat the sweep to continue its runs." if any(self.path.glob("*/config.json")) else ""
            raise ModelError(f"{self.path} is not a complete run directory. {error}{hint}") from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    def set_status(self, state: str, **details: Any) -> None:
        """Write how the run stands, for people and for the page; nothing is decided by it."""
        self.write_json("status.json", {"state": state, "pid": os.getpid(), "host": platform.node(), **details})

    def write_results(self, report: Report, rows: list[dict[str, Any]]) -> None:
        """Replace the report and the tables; `rows` are those of stages.csv."""
        write_table(self.path / "stages.csv", rows)
        for rule, numbers in report.rules.items():
            name = "accuracy_matrix.csv" if rule == report.own else f"accuracy_matrix_by_{rule}.csv"
            matrix = numbers.accuracy_matrix
            columns = ["after_stage", *(f"classes_of_stage_{index}" for index in range(len(matrix)))]
            table = [dict(zip(columns, [index, *row], strict=True)) for index, row in enumerate(matrix)]
            write_table(self.path / name, table)
        write_atomically(self.path / "report.json", report.to_json())

    def append(self, name: str, line: str) -> None:
        """Add a line to a log. If the disk is full, the line is lost; if the directory is gone, the run ends."""
        path = self.path / name
        try:
            with open(path, "ab") as file:
                file.write(line.encode(errors="replace") + b"\n")
        except OSError as error:
            if not self.path.is_dir():
                raise ResourceError(f"Could not write {path}: its directory is gone.") from error
            warnings.warn(Notice(f"Lines of {path} are missing: {error.strerror}. The run continues."), stacklevel=2)

    def log_length(self) -> int:
        """Return the length of metrics.jsonl in bytes, once they are on the disk."""
        path = self.path / METRICS
        with disk_errors(f"write {path}"):
            if not path.exists():
                return 0
            sync(path)
            return path.stat().st_size

    def cut_log(self, length: int) -> None:
        """Remove what was logged after a checkpoint, so that no epoch is logged twice and no line is torn."""
        path = self.path / METRICS
        with disk_errors(f"shorten {path}"):
            if path.exists() and path.stat().st_size > length:
                os.truncate(path, length)

    def network_weights(self, stage: int) -> dict[str, Tensor]:
        return self._stage_tensors("networks", stage)

    def write_network(self, stage: int, network: torch.nn.Module) -> None:
        self._write_stage_tensors("networks", stage, network.state_dict())

    def read_predictions(self, stage: int) -> dict[str, NDArray[np.int64]]:
        """Return the labels of the test images after a stage, and their predictions by each rule, `by_logits` say."""
        return {name: tensor.numpy() for name, tensor in self._stage_tensors("predictions", stage).items()}

    def write_predictions(self, stage: int, arrays: Mapping[str, NDArray[np.int64]]) -> None:
        self._write_stage_tensors("predictions", stage, {name: torch.tensor(array) for name, array in arrays.items()})

    def _write_stage_tensors(self, folder: str, stage: int, tensors: Mapping[str, Tensor]) -> None:
        facts = {"experiment": self.digest(), "stage": stage}
        write_tensors(self.path / folder / f"stage-{stage:03d}.safetensors", tensors, facts)

    def _stage_tensors(self, folder: str, stage: int) -> dict[str, Tensor]:
        path = self.path / folder / f"stage-{stage:03d}.safetensors"
        tensors, facts = read_tensors(path)
        if facts != {"experiment": self.digest(), "stage": stage}:
            raise ModelError(f"{path} is of another run or stage.")
        return tensors

    def digest(self) -> str:
        """Return a digest of the configuration, which binds a file to this experiment."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()

    def write_exemplars(self, stage: int, classes: Sequence[Tensor]) -> None:
        """Store the training rows kept of each class, best first."""
        write_atomically(self._exemplars(stage), json.dumps({"rows": [rows.tolist() for rows in classes]}) + "\n")

    def read_exemplars(self, stage: int) -> list[list[int]]:
        """Return the training rows kept of each class, best first."""
        stored = read_json(self._exemplars(stage))
        with damage_named(self._exemplars(stage)):
            return [[int(row) for row in rows] for rows in stored["rows"]]

    def read_rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a CSV file, such as stages.csv."""
        return list(csv.DictReader(read_file(self.path / name).decode().splitlines()))

    def read_epochs(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a line that is cut off, because the run was killed, is left out."""
        records = []
        for line in read_file(self.path / METRICS).decode(errors="replace").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def _exemplars(self, stage: int) -> Path:
        return self.path / "exemplars" / f"stage-{stage:03d}.json"

    def checkpoint_numbers(self) -> list[int]:
        """Return the numbers of the stored checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(name[:6]) for name in names if re.fullmatch(r"[0-9]{6}\.safetensors", name))

    def checkpoint_path(self, number: int) -> Path:
        return self.path / "checkpoints" / f"{number:06d}.safetensors"

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Store a checkpoint with finite values, and remove those that are no longer kept."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise DivergedError(
                    f"Training diverged: values of {name} are not finite. The last checkpoint with finite values is "
                    f"kept. Try a smaller learning rate."
                )
        number = max(self.checkpoint_numbers(), default=0) + 1
        facts = {"format": CHECKPOINT_FORMAT, "ccfa": ccfa.__version__, "experiment": self.digest(), "state": state}
        write_tensors(self.checkpoint_path(number), tensors, facts)
        self.prune_checkpoints()

    def prune_checkpoints(self, kept: int = CHECKPOINTS_KEPT) -> None:
        """Remove all checkpoints but the newest ones."""
        for number in self.checkpoint_numbers()[:-kept]:
            with suppress(OSError):
                self.checkpoint_path(number).unlink()

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there is none; damaged ones are renamed."""
        for number in reversed(self.checkpoint_numbers()):
            path = self.checkpoint_path(number)
            try:
                tensors, facts = read_tensors(path)
            except ModelError as error:
                aside = path.with_name(f"damaged-{path.name}")
                with disk_errors(f"rename the damaged {path}"):
                    os.replace(path, aside)
                action = "The run continues from the checkpoint before it, or from the beginning if there is none"
                warnings.warn(Notice(f"{error} It is renamed to {aside.name}. {action}."), stacklevel=2)
                continue
            if (facts.get("format"), facts.get("experiment")) != (CHECKPOINT_FORMAT, self.digest()):
                raise ModelError(
                    f"{path} is of another experiment or of another version of ccfa ({facts.get('ccfa')}). Put the "
                    f"run's own checkpoints back, or remove the folder checkpoints to start the run again."
                )
            return Checkpoint(number, tensors, facts.get("state") or {})
        return None


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of everything that differs, by its dotted name; None stands for a missing value.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    {'a.c': (2, 3)}
    """
    before, after = dict(leaves(stored)), dict(leaves(now))
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries with its dotted name, `phases.later.0.epochs`.

    Lists are entered if they hold dictionaries or lists. A list of plain values is one value, and so is anything empty.
    """
    items = list(content.items()) if isinstance(content, Mapping) else []
    if isinstance(content, list) and any(isinstance(item, Mapping | list) for item in content):
        items = list(enumerate(content))
    if not items and prefix:
        yield prefix, content
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def two_columns(found: Mapping[str, tuple[Any, Any]], first: str = "stored", second: str = "now") -> str:
    """Return differences as lines of text: the name, the first value, the second value."""
    rows = [("", first, second)]
    rows += [(name, _short(stored), _short(now)) for name, (stored, now) in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {name:{widths[0]}}  {stored:{widths[1]}}  {now}" for name, stored, now in rows)


def _short(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, default=str)
    return text if len(text) <= VALUE_WIDTH else text[: VALUE_WIDTH - 3] + "..."
