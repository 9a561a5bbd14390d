"""Checkpoints: directories that are whole or not there, verified before use, holding nothing that can execute.

The newest checkpoint whose manifest verifies is the one to continue from. The last two are kept; a finished run keeps
the last. Every stage's weights are in networks/ and are never removed.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

import ccfa
from ccfa.errors import DivergedError, ModelError, Notice, ResourceError
from ccfa.experiments.differences import differences, two_columns
from ccfa.experiments.files import read_bounded, sync, write_durably
from ccfa.experiments.weights import MAX_TENSORS, parsed
from ccfa.failpoints import failpoint

FORMAT = 1
KEPT = 2
MANIFEST = "MANIFEST.json"
TENSORS, STATE = "tensors.safetensors", "state.json"
MAX_MANIFEST, MAX_STATE = 2**16, 2**26  # bytes


class Checkpoint(NamedTuple):
    """What was stored: the learner's tensors, and everything else as JSON."""

    number: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class DamagedError(ModelError):
    """A checkpoint that is not whole, or not as it was written."""


class Checkpoints:
    """The checkpoints of one experiment in a folder, numbered from 1."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = config

    def numbers(self) -> list[int]:
        """The numbers of those that are there, ascending."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(name) for name in names if re.fullmatch(r"\d{6,9}", name, re.ASCII))

    def path(self, number: int) -> Path:
        """Where a checkpoint is."""
        return self.folder / f"{number:06d}"

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Store a new one, whole and finite or not at all, and then drop those that are no longer kept."""
        number = max(self.numbers(), default=0) + 1
        content = {
            TENSORS: save(_finite({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})),
            STATE: json.dumps({"config": self.config, **state}, indent=1).encode(),  # columns keep their order
        }
        content[MANIFEST] = _canonical(_sealed(_manifest(self.config, content)))
        temporary = self.folder / f".tmp-{number:06d}-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            for name in (TENSORS, STATE, MANIFEST):  # the manifest last: it says that the others are whole
                write_durably(temporary / name, content[name])
            sync(temporary)
            failpoint("commit")
            os.rename(temporary, self.path(number))
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            needed = sum(map(len, content.values()))
            raise ResourceError(
                f"Could not store checkpoint {number} in {self.folder}: {error.strerror}. It needs {needed:,} bytes"
                f"{_free(self.folder)}. What was stored before is kept."
            ) from error
        failpoint("after_commit")
        self.prune()

    def prune(self, kept: int = KEPT) -> None:
        """Remove all but the last ones, and what an interrupted writer left behind."""
        for number in self.numbers()[:-kept]:
            shutil.rmtree(self.path(number), ignore_errors=True)
        for left_over in self.folder.glob(".tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def load(self) -> Checkpoint | None:
        """The newest one that is whole; None where there is none. One of another experiment is refused."""
        numbers = self.numbers()
        for number in reversed(numbers):
            try:
                return Checkpoint(number, *self._verified(self.path(number)))
            except DamagedError as error:
                aside = self.folder / f"damaged-{self.path(number).name}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path(number), aside)
                earlier = "the one before it is used: what was done since is done again"
                lost = earlier if number != numbers[0] else "there is none before it: the run starts from the beginning"
                warnings.warn(Notice(f"{error} It is set aside as {aside.name}, and {lost}."), stacklevel=2)
        return None

    def _verified(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The content of a checkpoint, once every byte is known to be as it was written."""
        manifest = _read_manifest(path)
        if manifest.get("format") != FORMAT:
            raise ModelError(
                f"{path} has format {manifest.get('format')}, written by ccfa {manifest.get('ccfa')}; "
                f"ccfa {ccfa.__version__} reads format {FORMAT}. Continue the run with that version of ccfa."
            )
        files = manifest.get("files")
        if not isinstance(files, dict) or set(files) != {TENSORS, STATE}:
            raise DamagedError(f"The manifest of {path} should name {TENSORS} and {STATE} and nothing else.")
        if present := set(os.listdir(path)) ^ {TENSORS, STATE, MANIFEST}:
            raise DamagedError(
                f"{path} lacks files or has others than its manifest says: {', '.join(sorted(present))}."
            )
        state = _parsed(_checked(path / STATE, files[STATE], MAX_STATE), path / STATE)
        if manifest.get("experiment") != _digest(_canonical(self.config)):
            found = differences(state.get("config", {}), self.config)
            raise ModelError(
                f"{path} is of another experiment. Put the run's own checkpoints back, or remove {self.folder} to "
                f"start the run again.\n{two_columns(found)}"
            )
        tensors = _parsed_tensors(_checked(path / TENSORS, files[TENSORS], MAX_TENSORS), path / TENSORS)
        return _finite(tensors, f"{path} holds"), state


def _manifest(config: Mapping[str, Any], content: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "ccfa": ccfa.__version__,
        "experiment": _digest(_canonical(config)),
        "files": {name: _facts(data) for name, data in content.items()},
    }


def _facts(data: bytes) -> dict[str, Any]:
    """What a manifest says about a file."""
    return {"size": len(data), "sha256": _digest(data)}


def _told(facts: Any) -> str:
    if not isinstance(facts, dict) or not isinstance(facts.get("size"), int):
        return f"{facts}"
    return f"{facts['size']:,} bytes with SHA-256 {facts.get('sha256')}"


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the digest of itself."""
    return {**manifest, "sha256": _digest(_canonical(manifest))}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    """JSON in the one form in which it is compared byte by byte."""
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read(path / MANIFEST, MAX_MANIFEST)
    manifest = _parsed(data, path / MANIFEST)
    if data != _canonical(_sealed({name: value for name, value in manifest.items() if name != "sha256"})):
        raise DamagedError(f"{path / MANIFEST} is not as it was written.")
    return manifest


def _checked(path: Path, expected: Any, limit: int) -> bytes:
    """The content of a file whose size and SHA-256 are those of the manifest."""
    size = expected.get("size") if isinstance(expected, dict) else None
    data = _read(path, min(size, limit) if isinstance(size, int) else limit)
    found = _facts(data)
    if expected != found:
        raise DamagedError(f"{path} is damaged: expected {_told(expected)}, found {_told(found)}.")
    return data


def _read(path: Path, limit: int) -> bytes:
    try:
        if path.is_symlink() or not path.is_file():
            raise DamagedError(f"{path} is missing or no plain file.")
        return read_bounded(path, limit)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}.") from error
    except ModelError as error:
        raise DamagedError(str(error)) from error


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not valid JSON.") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} should hold a JSON object.")
    return content


def _parsed_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return parsed(data)[0]
    except ValueError as error:
        raise DamagedError(f"{path} is damaged ({error}).") from error


def _finite(tensors: dict[str, Tensor], subject: str = "A checkpoint would hold") -> dict[str, Tensor]:
    """The tensors, which are all numbers."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError(
                f"{subject} values of {name} that are no finite numbers: training diverged. The last checkpoint "
                f"with finite values is kept. Try a smaller learning rate."
            )
    return tensors


def _free(folder: Path) -> str:
    try:
        return f", and {shutil.disk_usage(folder).free:,} are free"
    except OSError:
        return ""
