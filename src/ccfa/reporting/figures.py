"""A figure of the paper as files: PNG and PDF, its numbers as CSV, and a caption that says how it was made."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from ccfa.errors import ResourceError, UsageError
from ccfa.evaluation.similarity import Estimator
from ccfa.experiments.files import write_atomically, write_table
from ccfa.reporting.comparison import Entry, common_folder, gather


class Wish(NamedTuple):
    """What was asked for beside the runs."""

    data_dir: Path | None = None
    device: torch.device = torch.device("cpu")
    num_images: int | None = None
    seed: int = 0
    estimator: Estimator = "biased"  # of CKA


NO_WISH = Wish()


class Written(NamedTuple):
    """Where a figure is, what to write under it, and what was left out of it."""

    paths: list[Path]
    caption: str
    notes: list[str]

    @property
    def lines(self) -> list[str]:
        """All of it as lines of text."""
        return [*(f"note: {note}" for note in self.notes), self.caption, *map(str, self.paths)]


def write_figure(kind: str, runs: Sequence[Path], out: Path | None = None, wish: Wish = NO_WISH) -> Written:
    """Draw a figure and write it as PNG and PDF, its numbers as CSV, and its caption."""
    draw = _drawing().FIGURES[kind]  # before any work is done
    if wish.num_images is not None and wish.num_images < 2:
        raise UsageError(f"A figure needs at least 2 images, got --images {wish.num_images}.")
    if not 0 <= wish.seed < 2**32:
        raise UsageError(f"The seed of a figure must be from 0 to 2^32 - 1, got {wish.seed}.")
    entries, notes = gather(runs, f"ccfa figure {kind}")
    folder = out or _folder(entries)
    drawn = draw(entries, wish)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"Could not create {folder}: {error.strerror}.") from error
    paths = {suffix: folder / f"{kind}.{suffix}" for suffix in ("png", "pdf", "csv", "txt")}
    for suffix, content in drawn.contents.items():
        write_atomically(paths[suffix], content)
    write_table(paths["csv"], drawn.rows)
    write_atomically(paths["txt"], drawn.caption + "\n")
    return Written([*paths.values()], drawn.caption, [*notes, *drawn.notes])


def _drawing() -> ModuleType:
    """What needs matplotlib, an optional extra."""
    try:
        from ccfa.reporting import paper_figures
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UsageError(
            "Figures need the package matplotlib, which is not installed. "
            "Install it with: pip install 'ccfa[figures]' (or pip install matplotlib)."
        ) from error
    return paper_figures


def _folder(entries: Sequence[Entry]) -> Path:
    """`figures` in the run, or in the folder that holds all the runs."""
    if len(entries) == 1 and entries[0].path.is_dir():
        return entries[0].path / "figures"
    return common_folder(entries).with_name("figures")
