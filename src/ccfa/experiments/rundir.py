"""A run directory: every file written whole or not at all, nothing in it a pickle."""

import json
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccfa.errors import ModelError, Notice, ResourceError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.files import (
    read_arrays,
    read_bounded,
    require_place,
    sync,
    write_arrays,
    write_atomically,
    write_table,
)
from ccfa.experiments.lock import one_at_a_time
from ccfa.experiments.weights import pack
from ccfa.failpoints import failpoint
from ccfa.learning.acceleration import Acceleration

FOLDERS = ("predictions", "networks", "exemplars")
RECORDS = ("environment.json", "status.json", "config.json")
LOGS = ("metrics.jsonl", "log.txt")
ERRORS = "errors.txt"  # never cut
MAX_BYTES = 2**27  # of a JSON file; no run comes near it


class RunDirectory:
    """Where a run keeps its configuration, its numbers and its networks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def require_new(cls, path: Path) -> None:
        """Refuse a path that exists, or where none can be made."""
        if os.path.lexists(path):
            reuse = ", or add --reuse to show its result, or to finish it, if it holds this very experiment"
            raise UsageError(
                f"{path} exists already and is left as it is{cls(path)._unfinished()}. Choose another directory with "
                f"--out{reuse if (path / 'config.json').exists() else ''}."
            )
        require_place(path)

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], environment: dict[str, Any]) -> "RunDirectory":
        """A new directory, there as a whole or not at all; one that exists already is never touched."""
        hidden = cls(path.with_name(f".ccfa-{secrets.token_hex(8)}"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(path.parent):
                cls.require_new(path)
                hidden._make(config, environment)
                os.rename(hidden.path, path)
                sync(path.parent)
        except OSError as error:
            if os.path.lexists(path):  # on a file system without locks somebody was faster
                cls.require_new(path)
            raise ResourceError(f"Could not create {path}: {error.strerror}.") from error
        finally:
            _remove_unused(hidden.path)
        return cls(path)

    def _make(self, config: dict[str, Any], environment: dict[str, Any]) -> None:
        self.path.mkdir()
        for name in FOLDERS:
            (self.path / name).mkdir()
        self.write_json("environment.json", environment)
        self.set_status("running")
        self.write_json("config.json", config)

    @classmethod
    def create_or_continue(cls, path: Path, config: dict[str, Any], environment: dict[str, Any]) -> "RunDirectory":
        """A new directory, or that of an unfinished run of this very experiment."""
        if not (path / "config.json").exists():
            with one_at_a_time(path.parent):
                if _is_unused(path):
                    _remove_unused(path)
            try:
                return cls.create(path, config, environment)
            except UsageError:
                if not (path / "config.json").exists():  # nobody was faster
                    raise
        return cls(path)

    @classmethod
    def finished(cls, path: Path, config: dict[str, Any], acceleration: Acceleration) -> Report | None:
        """The report of a finished run of this very experiment, or None where there is more to do."""
        if not path.exists() or _is_unused(path):
            return None
        directory = cls(path)
        if found := differences(directory.read_json("config.json"), config):
            raise UsageError(
                f"{path} holds another experiment. Choose another directory with --out.\n{two_columns(found)}"
            )
        precision = directory.read_json("environment.json").get("acceleration", {}).get("precision")
        if precision != acceleration.precision:
            raise UsageError(f"{path} was run in {precision}, not in {acceleration.precision}. Use another --out.")
        return directory.report() if directory.is_finished() else None

    def is_finished(self) -> bool:
        """Whether all stages are done."""
        return self.read_json("status.json").get("state") == "finished"

    def _unfinished(self) -> str:
        """What to say about a run that can be continued."""
        if not (self.path / "config.json").exists() or self.is_finished():
            return ""
        return f"; it holds an unfinished run, which `ccfa resume {self.path}` continues"

    def report(self) -> Report:
        """The report of the run."""
        try:
            return Report.from_json(self._read("report.json"))
        except ModelError as error:
            raise ModelError(f"{self.path / 'report.json'}: {error}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory."""
        try:
            content = json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path / name} is not valid JSON: {error}.") from error
        if not isinstance(content, dict):
            raise ModelError(f"{self.path / name} should hold a JSON object.")
        return content

    def _read(self, name: str) -> str:
        try:
            return read_bounded(self.path / name, MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path} is not a complete run directory: cannot read {name} ({error}).") from error

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file of the directory."""
        write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def set_status(self, state: str, **details: Any) -> None:
        """Replace status.json."""
        self.write_json("status.json", {"state": state, "pid": os.getpid(), **details})

    def append(self, name: str, line: str) -> None:
        """Add a line to a log, or an error to errors.txt; a full disk costs the line and not the run."""
        path = self.path / name
        if not self.path.is_dir():
            raise ResourceError(f"Could not add to {path}: its directory is gone.")
        length = path.stat().st_size if path.exists() else 0
        try:
            failpoint("append")
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, length)  # no half line
            warnings.warn(Notice(f"Lines of {path} are missing: {error.strerror}. The run goes on."), stacklevel=2)

    def log_lengths(self) -> dict[str, int]:
        """The length of each log in bytes, once they are on the disk."""
        present = [self.path / name for name in LOGS if (self.path / name).exists()]
        for path in present:
            sync(path)
        return {path.name: path.stat().st_size for path in present}

    def truncate_logs(self, lengths: Mapping[str, int]) -> None:
        """Take back what was logged after a checkpoint, so that no epoch is told twice and no line is torn."""
        for name in LOGS:
            path, length = self.path / name, lengths.get(name, 0)
            if path.exists() and path.stat().st_size > length:
                os.truncate(path, length)

    def sweep(self) -> None:
        """Remove what a writer that was killed left behind, and make the folders that were not carried along."""
        for name in FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        for folder in (self.path, *(self.path / name for name in FOLDERS)):
            for left_over in folder.glob(".*.tmp"):
                left_over.unlink(missing_ok=True)

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write a CSV file."""
        write_table(self.path / name, rows)

    def write_predictions(self, stage: int, arrays: dict[str, NDArray[np.int64]]) -> None:
        """Write a stage's labels and predictions."""
        write_arrays(self.path / "predictions" / f"stage-{stage:03d}.npz", arrays)

    def read_predictions(self, stage: int) -> dict[str, NDArray[np.int64]]:
        """A stage's labels and predictions."""
        return read_arrays(self.path / "predictions" / f"stage-{stage:03d}.npz")

    def write_exemplars(self, stage: int, classes: Sequence[Tensor]) -> None:
        """Write the rows of the training set kept of each class after a stage, best first."""
        content = json.dumps({"rows": [rows.tolist() for rows in classes]}) + "\n"
        write_atomically(self.path / "exemplars" / f"stage-{stage:03d}.json", content)

    def read_exemplars(self, stage: int) -> list[list[int]]:
        """The rows kept of each class after a stage, best first."""
        rows = self.read_json(f"exemplars/stage-{stage:03d}.json").get("rows")
        if not isinstance(rows, list) or not all(
            isinstance(kept, list) and all(isinstance(row, int) for row in kept) for kept in rows
        ):
            raise ModelError(f"The exemplars of stage {stage} in {self.path} should be a list of rows for each class.")
        return rows

    def write_network(self, stage: int, network: torch.nn.Module) -> None:
        """Write a stage's weights."""
        write_atomically(self.path / "networks" / f"stage-{stage:03d}.safetensors", pack(network))


def _is_unused(path: Path) -> bool:
    """Whether an older version was killed while it made this directory: it left empty folders, then two records."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        names = set(os.listdir(path))
        folders = [path / name for name in FOLDERS if name in names]
        made = set(FOLDERS) | (set(RECORDS[:2]) if len(folders) == len(FOLDERS) else set())
        return names <= made and not any(folder.is_symlink() or any(folder.iterdir()) for folder in folders)
    except OSError:  # not folders, not readable, or gone
        return False


def _remove_unused(path: Path) -> None:
    """Remove a directory in which nothing was done yet, name by name: what is not ours stays, and so does it."""
    with suppress(OSError):
        for folder in (path / name for name in FOLDERS):
            if folder.exists():
                folder.rmdir()
        for name in RECORDS:
            (path / name).unlink(missing_ok=True)
        path.rmdir()
