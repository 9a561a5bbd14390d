"""From what was typed to runs: which paths are runs, which are not, and where their comparison goes."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import Report
from ccfa.experiments import Run
from ccfa.files import read_file
from ccfa.reporting.sameness import Entry


def gather(paths: Sequence[Path], command: str = "ccfa compare") -> tuple[list[Entry], list[str]]:
    """The runs among run directories, report files and whatever else a glob has caught, and notes on the rest."""
    if not paths:
        raise UsageError(f"Name at least one run directory, e.g. {command} runs/*")
    entries: dict[Path, Entry] = {}
    notes, no_runs, unstarted = [], [], []
    for path in itertools.chain.from_iterable(map(_opened, paths)):
        if not path.exists():
            raise ModelError(f"{path} does not exist. Name run directories, e.g. {command} runs/*")
        if path.resolve() in entries:
            notes.append(f"{path} is named twice and counted once.")
        elif path.suffix == ".json" and path.is_file():
            entries[path.resolve()] = Entry(path, _report_file(path))
        elif not (path / "config.json").is_file():
            no_runs.append(path)
        elif not (path / "report.json").is_file():
            unstarted.append(path)
        else:
            entries[path.resolve()] = Entry(path, Run(path).report())
    if no_runs:
        notes.append(f"left out, since they are no runs: {_listed(no_runs)}.")
    if unstarted:
        notes.append(f"left out, since no stage of them is finished: {_listed(unstarted)}.")
    if not entries:
        raise ModelError(f"No run with a finished stage among {_listed(paths)}: nothing to show.")
    return list(entries.values()), notes


def _opened(path: Path) -> list[Path]:
    """The runs of a folder of runs, as a sweep leaves it; any other path as it is."""
    is_run = not path.is_dir() or (path / "config.json").is_file()
    return [path] if is_run else sorted(file.parent for file in path.glob("[!.]*/config.json")) or [path]


def common_folder(entries: Sequence[Entry]) -> Path:
    """`comparison` in the folder that holds all the runs."""
    parents = [entry.path.parent for entry in entries]
    try:
        return Path(os.path.commonpath(parents)) / "comparison"
    except ValueError:  # some absolute, some not
        return Path(os.path.commonpath([parent.resolve() for parent in parents])) / "comparison"


def _report_file(path: Path) -> Report:
    try:
        return Report.from_json(read_file(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(str, paths[:8]))
    return shown if len(paths) <= 8 else f"{shown} and {len(paths) - 8} more"
