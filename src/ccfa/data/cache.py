"""Decoded photos on disk, so that a second run on the same files starts at once.

A file is known by its path, its size and the times of its last changes. Entries have a digest, which is checked
before use, and hold no code. What cannot be read or written is as if it were not there.
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
ENTRY_LIMIT = 2 * 10**9  # bytes of one entry, which is in memory twice while it is written
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")


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


def key_of(paths: Sequence[Path], decoder: str) -> str:
    """Return a digest of the decoder and of the path, size and times of change of each file."""
    digest = hashlib.sha256(decoder.encode())
    for path in paths:
        facts: tuple[int, ...] = ()
        with suppress(OSError):  # a file without facts is not decoded either
            found = os.stat(path)
            # ctime is changed by every write; nobody can set it back, as archives and copies do with mtime.
            facts = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        digest.update(os.fsencode(os.path.abspath(path)) + f"\0{facts}\n".encode())
    return digest.hexdigest()


def recall(folder: Path, key: str) -> tuple[NDArray[np.uint8], list[int]] | None:
    """Return the images of an entry and their rows, or None if there is no undamaged entry."""
    path = folder / f"{key}.safetensors"
    try:
        tensors, facts = read_tensors(path)
        if facts != {"key": key} or tensors.keys() != {"images", "rows"}:
            return None
        os.utime(path)  # used now
    except (CcfaError, OSError):
        return None
    return tensors["images"].numpy(), tensors["rows"].tolist()


def keep(folder: Path, key: str, images: NDArray[np.uint8], rows: Sequence[int]) -> None:
    """Store an entry, and remove the least recently used ones if there are too many bytes."""
    if images.nbytes > ENTRY_LIMIT:
        return
    with suppress(CcfaError, OSError):
        folder = Path(os.path.realpath(folder))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # photos are nobody else's business
        stored = {"images": torch.from_numpy(images), "rows": torch.tensor(rows, dtype=torch.int64)}
        write_tensors(folder / f"{key}.safetensors", stored, {"key": key})
        _make_room(folder)


def _make_room(folder: Path) -> None:
    entries = {path: os.stat(path) for path in folder.iterdir() if _ENTRY.fullmatch(path.name)}
    num_bytes = sum(facts.st_size for facts in entries.values())
    for path, facts in sorted(entries.items(), key=lambda entry: entry[1].st_mtime_ns):
        if num_bytes <= LIMIT:
            break
        path.unlink(missing_ok=True)
        num_bytes -= facts.st_size
