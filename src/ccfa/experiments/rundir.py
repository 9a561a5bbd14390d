"""A run directory: every file written whole or not at all, nothing in it a pickle."""

import csv
import io
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

import ccfa
from ccfa.errors import ModelError, ResourceError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments.options import plain
from ccfa.learning.acceleration import Acceleration, describe_device


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"Could not write {path}: {error.strerror}. What was written before is kept.") from error


class RunDirectory:
    """Where a run keeps its configuration, its numbers and its networks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], environment: dict[str, Any]) -> "RunDirectory":
        """A new directory; one that exists already is never touched."""
        try:
            path.mkdir(parents=True)
            for name in ("predictions", "networks"):
                (path / name).mkdir()
        except FileExistsError:
            raise UsageError(
                f"{path} exists already and is left as it is. Choose another directory with --out, remove it, "
                f"or add --reuse to show its result if it holds this very experiment."
            ) from None
        except OSError as error:
            raise ResourceError(f"Could not create {path}: {error.strerror}.") from error
        directory = cls(path)
        directory.write_json("config.json", config)
        directory.write_json("environment.json", environment)
        directory.set_status("running")
        return directory

    @classmethod
    def finished(cls, path: Path, config: dict[str, Any], acceleration: Acceleration) -> Report | None:
        """The report of a finished run of this very experiment, or None where there is no directory yet."""
        if not path.exists():
            return None
        directory = cls(path)
        stored = directory.read_json("config.json")
        if stored != config:
            differing = [key for key in {*stored, *config} if stored.get(key) != config.get(key)]
            raise UsageError(
                f"{path} holds another experiment (it differs in {', '.join(sorted(differing))}). "
                f"Choose another directory with --out."
            )
        precision = directory.read_json("environment.json").get("acceleration", {}).get("precision")
        if precision != acceleration.precision:
            raise UsageError(f"{path} was run in {precision}, not in {acceleration.precision}. Use another --out.")
        status = directory.read_json("status.json")
        if status.get("state") == "finished":
            return directory.report()
        if status.get("state") == "running" and _alive(status.get("pid")):
            raise UsageError(f"{path} is being written by process {status['pid']}. Wait for it, or use another --out.")
        directory._set_aside()
        return None

    def _set_aside(self) -> None:
        """Rename an unfinished run, so that it can be started again and nothing is lost."""
        numbers = (number for number in range(1, 10_000) if not self._unfinished(number).exists())
        self.path.rename(self._unfinished(next(numbers)))

    def _unfinished(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.unfinished-{number}")

    def report(self) -> Report:
        """The report of the run."""
        return Report.from_json(self._read("report.json"))

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory."""
        try:
            content = json.loads(self._read(name))
        except ValueError as error:
            raise ModelError(f"{self.path / name} is not valid JSON: {error}.") from error
        if not isinstance(content, dict):
            raise ModelError(f"{self.path / name} should hold a JSON object.")
        return content

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path} is not a complete run directory: cannot read {name} ({error}).") from error

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file of the directory."""
        write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def set_status(self, state: str, **details: Any) -> None:
        """Replace status.json."""
        self.write_json("status.json", {"state": state, "pid": os.getpid(), **details})

    def append(self, name: str, line: str) -> None:
        """Add a line to a log."""
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ResourceError(f"Could not add to {self.path / name}: {error.strerror}.") from error

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write a CSV file."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path / name, text.getvalue())

    def write_predictions(self, stage: int, arrays: dict[str, NDArray[np.int64]]) -> None:
        """Write a stage's labels and predictions."""
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **arrays)
        write_atomically(self.path / "predictions" / f"stage-{stage:03d}.npz", content.getvalue())

    def write_network(self, stage: int, network: torch.nn.Module) -> None:
        """Write a stage's weights."""
        weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
        write_atomically(self.path / "networks" / f"stage-{stage:03d}.safetensors", save(weights))


def _alive(pid: object) -> bool:
    """Whether a process of that number exists."""
    try:
        os.kill(int(str(pid)), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def environment(device: torch.device, acceleration: Acceleration) -> dict[str, Any]:
    """Where and how a run happens: versions, device, precision, commit."""
    return {
        "ccfa": ccfa.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": describe_device(device),
        "acceleration": plain(acceleration),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def _commit() -> str:
    """The commit of the source, where the package runs from a checkout; `+` marks uncommitted changes."""
    try:
        # Installed inside somebody else's checkout, this file is not tracked, and their commit says nothing about us.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
