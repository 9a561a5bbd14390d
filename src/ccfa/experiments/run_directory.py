"""A run: a directory with everything an experiment leaves behind.

`Run` is the only reader and the only writer of these files:

    config.json, environment.json, status.json   what was asked, where it ran, how it ended
    metrics.jsonl, log.txt, errors.txt           one line per epoch, one line per stage, errors
    stages.csv, accuracy_matrix.csv, report.json the results so far
    networks/, predictions/, exemplars/          one file per stage
    checkpoints/                                 what `ccfa resume` continues from; the last two are kept
"""

import csv
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ccfa
from ccfa.errors import DivergedError, LockedError, ModelError, Notice, ResourceError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.experiment import Experiment, experiment_of
from ccfa.files import (
    make_folder,
    read_file,
    read_json,
    read_tensors,
    sync,
    write_atomically,
    write_json,
    write_table,
    write_tensors,
)

FOLDERS = ("predictions", "networks", "exemplars", "checkpoints")
LOGS = ("metrics.jsonl", "log.txt")
ERRORS = "errors.txt"
LOCK = ".lock"
CHECKPOINTS_KEPT = 2
CHECKPOINT_FORMAT = 2


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes, which get a LockedError; the lock ends with the process."""
    path = folder / LOCK
    if path.is_symlink():
        raise ModelError(f"{path} is a symbolic link, so the folder is not one that ccfa has written.")
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise LockedError(
            f"{folder} is being written by another process{_holder(folder)}. Wait for it, or use another --out."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise ResourceError(f"Could not lock {folder}: {error.strerror}.") from error
        told = f"The file system of {folder} has no locks ({error.strerror}): do not start a second run there."
        warnings.warn(Notice(told), stacklevel=2)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def left_alone(folder: Path) -> Iterator[None]:
    """Hold a folder if anybody ever wrote in it, and leave no trace."""
    if (folder / LOCK).exists() and os.access(folder / LOCK, os.W_OK):
        with locked(folder):
            yield
    else:
        yield


def _holder(folder: Path) -> str:
    try:
        status = Run(folder).status
        return f" ({status['pid']} on {status['host']})"
    except (ModelError, KeyError):
        return ""


class Checkpoint(NamedTuple):
    """The learner's tensors, and everything else as JSON."""

    number: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Run:
    """A run directory.

    Reading a file that is missing, damaged or of another run raises a ModelError. Writing one that the disk does not
    take raises a ResourceError, and the previous version of the file is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def entered(self, config: Mapping[str, Any], environment: Mapping[str, Any], new: bool = False) -> Iterator[None]:
        """Hold the directory in order to run this configuration in it: a new directory, or one that has begun it.

        With `new`, a directory that holds a run already is refused.
        """
        make_folder(self.path)
        if not self.is_begun() and not self._is_unused():
            raise self._exists()
        with locked(self.path):
            self._refuse_links()
            if self.is_begun():
                if new:
                    raise self._exists()
                self.require_same(config)
            else:
                for name in FOLDERS:
                    make_folder(self.path / name)
                write_json(self.path / "environment.json", environment)
                write_json(self.path / "config.json", config)  # last: with it, the run has begun
            self._tidy()
            yield

    def require_new(self) -> None:
        """Refuse a directory in which something is already."""
        if self.path.is_symlink() or (self.path.exists() and not self._is_unused()):
            raise self._exists()

    def _is_unused(self) -> bool:
        """Whether nothing is here but what a process leaves that was killed before its run had begun."""
        ours = {*FOLDERS, LOCK, "environment.json"}
        try:
            return self.path.is_dir() and all(name in ours or _is_temporary(name) for name in os.listdir(self.path))
        except OSError as error:
            raise ResourceError(f"Could not read {self.path}: {error.strerror}.") from error

    def _exists(self) -> UsageError:
        told = f"{self.path} exists already and is not changed"
        if not self.is_begun():
            return UsageError(f"{told}. Choose another directory with --out.")
        with suppress(ModelError):
            if not self.is_finished():
                told += f"; it holds an unfinished run, which `ccfa resume {shlex.quote(str(self.path))}` continues"
        return UsageError(
            f"{told}. Choose another directory with --out, or add --reuse to show or finish the run in it, "
            f"if it is of the same experiment."
        )

    def is_begun(self) -> bool:
        return (self.path / "config.json").exists()

    def require_same(self, config: Mapping[str, Any]) -> None:
        """Refuse another configuration than the run's own."""
        if found := differences(self.config, config):
            raise UsageError(
                f"{self.path} holds another experiment. Choose another directory with --out.\n{two_columns(found)}"
            )

    def is_finished(self) -> bool:
        """Whether all stages are done; a run without a report has none."""
        if (self.path / "report.json").exists():
            return self.report().finished
        self.read_json("config.json")
        return False

    @property
    def config(self) -> dict[str, Any]:
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
        path = self.path / "report.json"
        try:
            return Report.from_json(read_file(path).decode())
        except (ModelError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: {error}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.path / name)
        except ModelError as error:
            raise ModelError(f"{self.path} is not a complete run directory. {error}") from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)

    def set_status(self, state: str, **details: Any) -> None:
        """Say how the run stands, for people and for the page; nothing is decided by it."""
        self.write_json("status.json", {"state": state, "pid": os.getpid(), "host": platform.node(), **details})

    def write_report(self, report: Report) -> None:
        write_atomically(self.path / "report.json", report.to_json())

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        write_table(self.path / name, rows)

    def append(self, name: str, line: str) -> None:
        """Add a line to a log. A full disk costs the line and not the run; a directory that is gone ends it."""
        path = self.path / name
        if not self.path.is_dir():
            raise ResourceError(f"Could not write {path}: its directory is gone.")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "ab") as file:
                length = file.tell()
                try:
                    file.write(line.encode(errors="replace") + b"\n")
                    file.flush()
                except OSError:
                    with suppress(OSError):
                        os.truncate(descriptor, length)  # no half line
                    raise
        except OSError as error:
            warnings.warn(Notice(f"Lines of {path} are missing: {error.strerror}. The run goes on."), stacklevel=2)

    def log_lengths(self) -> dict[str, int]:
        """Return the length of each log in bytes, once they are on the disk."""
        try:
            present = [self.path / name for name in LOGS if (self.path / name).exists()]
            for path in present:
                sync(path)
            return {path.name: path.stat().st_size for path in present}
        except OSError as error:
            raise ResourceError(f"Could not write the logs in {self.path}: {error.strerror}.") from error

    def truncate_logs(self, lengths: Mapping[str, int]) -> None:
        """Remove what was logged after a checkpoint, so that no epoch is logged twice and no line is torn."""
        try:
            for name in LOGS:
                path, length = self.path / name, lengths.get(name, 0)
                if path.exists() and path.stat().st_size > length:
                    os.truncate(path, length)
        except OSError as error:
            raise ResourceError(f"Could not shorten {path}: {error.strerror}.") from error

    def network_weights(self, stage: int) -> dict[str, Tensor]:
        """Return the weights after a stage."""
        return self._stage_tensors("networks", stage)

    def write_network(self, stage: int, network: torch.nn.Module) -> None:
        self._write_stage_tensors("networks", stage, network.state_dict())

    def read_predictions(self, stage: int) -> dict[str, NDArray[np.int64]]:
        """Return the labels and predictions after a stage, by name."""
        return {name: tensor.numpy() for name, tensor in self._stage_tensors("predictions", stage).items()}

    def write_predictions(self, stage: int, arrays: Mapping[str, NDArray[np.int64]]) -> None:
        self._write_stage_tensors("predictions", stage, {name: torch.tensor(array) for name, array in arrays.items()})

    def _stage_path(self, folder: str, stage: int) -> Path:
        return self.path / folder / f"stage-{stage:03d}.safetensors"

    def _write_stage_tensors(self, folder: str, stage: int, tensors: Mapping[str, Tensor]) -> None:
        facts = {"experiment": self.digest(), "stage": stage}
        write_tensors(self._stage_path(folder, stage), tensors, facts)

    def _stage_tensors(self, folder: str, stage: int) -> dict[str, Tensor]:
        path = self._stage_path(folder, stage)
        tensors, facts = read_tensors(path)
        if facts != {"experiment": self.digest(), "stage": stage}:
            raise ModelError(f"{path} is of another run or stage.")
        return tensors

    def digest(self) -> str:
        """Return a digest of the configuration: what binds a file to this experiment."""
        return config_digest(self.config)

    def write_exemplars(self, stage: int, classes: Sequence[Tensor]) -> None:
        """Store the training rows kept of each class, best first."""
        write_atomically(self._exemplars(stage), json.dumps({"rows": [rows.tolist() for rows in classes]}) + "\n")

    def read_exemplars(self, stage: int) -> list[list[int]]:
        """Return the training rows kept of each class, best first."""
        rows = read_json(self._exemplars(stage)).get("rows")
        if not isinstance(rows, list) or not all(
            isinstance(kept, list) and all(type(row) is int for row in kept) for kept in rows
        ):
            raise ModelError(f"{self._exemplars(stage)} should hold a list of rows for each class.")
        return rows

    def read_rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a CSV file, such as stages.csv."""
        return list(csv.DictReader(read_file(self.path / name).decode().splitlines()))

    def read_epochs(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a line that is cut off, because the run was killed, is left out."""
        records = []
        for line in read_file(self.path / "metrics.jsonl").decode(errors="replace").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def _exemplars(self, stage: int) -> Path:
        return self.path / "exemplars" / f"stage-{stage:03d}.json"

    def checkpoint_numbers(self) -> list[int]:
        folder = self.path / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        found = (re.fullmatch(r"(\d{6})\.safetensors", name, re.ASCII) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def checkpoint_path(self, number: int) -> Path:
        return self.path / "checkpoints" / f"{number:06d}.safetensors"

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Store a checkpoint with finite values, and remove those that are no longer kept."""
        _require_finite(tensors, "A checkpoint would hold")
        number = max(self.checkpoint_numbers(), default=0) + 1
        facts = {"format": CHECKPOINT_FORMAT, "ccfa": ccfa.__version__, "experiment": self.digest(), "state": state}
        try:
            write_tensors(self.checkpoint_path(number), tensors, facts)
        except ResourceError as error:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise ResourceError(f"{error} The checkpoint needs {needed:,} bytes{_free(self.path)}.") from error
        self.prune_checkpoints()

    def prune_checkpoints(self, kept: int = CHECKPOINTS_KEPT) -> None:
        for number in self.checkpoint_numbers()[:-kept]:
            with suppress(OSError):
                self.checkpoint_path(number).unlink()

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there is none; damaged ones are renamed."""
        numbers = self.checkpoint_numbers()
        for number in reversed(numbers):
            path = self.checkpoint_path(number)
            try:
                tensors, facts = read_tensors(path)
            except ModelError as error:
                aside = path.with_name(f"damaged-{path.name}")
                try:
                    os.replace(path, aside)
                except OSError as failed:
                    raise ResourceError(f"{error} It cannot be renamed: {failed.strerror}.") from failed
                lost = (
                    "the one before it is used; what was done since is done again"
                    if number != numbers[0]
                    else "there is none before it, so the run starts from the beginning"
                )
                warnings.warn(Notice(f"{error} It is renamed to {aside.name}: {lost}."), stacklevel=2)
                continue
            if facts.get("format") != CHECKPOINT_FORMAT:
                raise ModelError(
                    f"{path} has format {facts.get('format')}, written by ccfa {facts.get('ccfa')}; ccfa "
                    f"{ccfa.__version__} reads format {CHECKPOINT_FORMAT}. Continue the run with that version of ccfa."
                )
            if facts.get("experiment") != self.digest():
                raise ModelError(
                    f"{path} is of another experiment. Put the run's own checkpoints back, or remove the folder "
                    f"checkpoints to start the run again."
                )
            _require_finite(tensors, f"{path} holds")
            return Checkpoint(number, tensors, facts.get("state") or {})
        return None

    def _refuse_links(self) -> None:
        """Nothing outside the directory may be written through a link in it."""
        for name in (*FOLDERS, *LOGS, ERRORS):
            if (self.path / name).is_symlink():
                raise ModelError(f"{self.path / name} is a symbolic link; ccfa writes to no place outside of a run.")

    def _tidy(self) -> None:
        """Remove what killed writers left behind, and make folders that were not copied along."""
        try:
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
            for folder in (self.path, *(self.path / name for name in FOLDERS)):
                for name in filter(_is_temporary, os.listdir(folder)):
                    (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ResourceError(f"Could not tidy {self.path}: {error.strerror}.") from error


def config_digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _require_finite(tensors: Mapping[str, Tensor], subject: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError(
                f"{subject} values of {name} that are not finite: training diverged. The last checkpoint with finite "
                f"values is kept. Try a smaller learning rate."
            )


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f", and {shutil.disk_usage(folder).free:,} are free"
    return ""
