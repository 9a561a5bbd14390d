"""Decoded photos on disk, so that a second run on the same files starts at once.

A file is known by its path, its size and the times of its last changes. The files of a folder are in one entry, so a
new class or photo does not make the others be decoded again. Entries have a digest, which is checked before use, and
hold no code. What cannot be read or written is as if it were not there.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ccfa.errors import CcfaError
from ccfa.files import read_tensors, write_tensors

LIMIT = 4 * 10**9  # bytes of all entries; the least recently used ones are removed
FILES_LIMIT = 2 * 10**9  # bytes of the images of one list of files; more would leave no room for others
ENTRIES = 16  # of one list of files at most, so that thousands of classes are not as many small files
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")

Entries = dict[str, dict[int, str]]
"""The entries of a list of files by their names: for each of its files the row and a digest of what is known of it."""


def cache_folder() -> Path | None:
    """Return the folder for decoded photos: $CCFA_CACHE, or else `ccfa` in the user's cache folder.

    Returns:
        The folder, which need not exist; None if CCFA_CACHE=off switches the cache off or there is no home folder.

    Example:
        >>> from unittest.mock import patch
        >>> from ccfa.data import cache_folder
        >>> with patch.dict(os.environ, CCFA_CACHE="off"):
        ...     print(cache_folder())
        None
    """
    given = os.environ.get("CCFA_CACHE")
    if given:
        return None if given == "off" else Path(given)
    try:
        usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError:
        return None
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "ccfa"


def entries_of(paths: Sequence[Path], decoder: str, root: str | Path | None = None) -> Entries:
    """Return the entries of files under a root, by default their folder; those in one folder are in one entry."""
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    root = os.path.abspath(root) if root else os.path.commonpath(folders or [""])
    entries: Entries = {}
    for row, (folder, path) in enumerate(zip(folders, paths, strict=True)):
        facts: tuple[int, ...] = ()
        with suppress(OSError):  # a file without facts is not decoded either
            found = os.stat(path)
            # ctime is changed by every write; nobody can set it back, as archives and copies do with mtime.
            facts = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        place = int(_digest(folder), 16) % ENTRIES
        entries.setdefault(_digest(decoder, place, root), {})[row] = _digest(decoder, facts, folder, path.name)
    return entries


def recall(folder: Path, entries: Entries, images: NDArray[np.uint8]) -> set[int]:
    """Fill in the images that undamaged entries hold, and return their rows."""
    known: set[int] = set()
    for name, keys in entries.items():
        path = folder / f"{name}.safetensors"
        with suppress(CcfaError, OSError, LookupError, ValueError):  # or an entry of another version
            tensors, facts = read_tensors(path)
            stored = dict(zip(facts["keys"], tensors["images"].numpy(), strict=True))
            found = {row: stored[key] for row, key in keys.items() if key in stored}
            for row, image in found.items():
                images[row] = image
            known |= found.keys()
            os.utime(path)  # used now
    return known


def keep(folder: Path, entries: Entries, images: NDArray[np.uint8], good: set[int], known: set[int]) -> None:
    """Replace the entries that lack images, and remove the least recently used ones if there are too many bytes."""
    if images.nbytes > FILES_LIMIT:
        return
    with suppress(CcfaError, OSError):
        folder = Path(os.path.realpath(folder))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # photos are nobody else's business
        for name, keys in entries.items():
            if not known.issuperset(rows := [row for row in keys if row in good]):
                stored = {"images": torch.from_numpy(images[rows])}
                write_tensors(folder / f"{name}.safetensors", stored, {"keys": [keys[row] for row in rows]})
        _make_room(folder)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()


def _make_room(folder: Path) -> None:
    entries = {path: os.stat(path) for path in folder.iterdir() if _ENTRY.fullmatch(path.name)}
    num_bytes = sum(facts.st_size for facts in entries.values())
    for path, facts in sorted(entries.items(), key=lambda entry: entry[1].st_mtime_ns):
        if num_bytes <= LIMIT:
            break
        path.unlink(missing_ok=True)
        num_bytes -= facts.st_size
