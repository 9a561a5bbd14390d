"""Files that are whole or not there."""

import csv
import errno
import io
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ccfa.errors import ModelError, ResourceError
from ccfa.failpoints import failpoint

MAX_ARRAY_BYTES = 256 * 2**20  # unpacked: a small file may claim to hold far more


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"Could not write {path}: {error.strerror}. What was written before is kept.") from error


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
        failpoint("write")
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a folder's entries, or a file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file, headed by the keys of its rows."""
    write_atomically(path, csv_text([list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV; a text that a spreadsheet would run as a formula is prefixed with an apostrophe.

    >>> csv_text([["=2+2", "-0.5", -0.5]])
    "'=2+2,-0.5,-0.5\\r\\n"
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows([[_safe(cell) for cell in row] for row in rows])
    return text.getvalue()


def _safe(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def require_place(path: Path) -> None:
    """Refuse a place where nothing can be put, before anything is read for it; nothing is left there."""
    whole = path.absolute()
    if whole.is_dir() and os.access(whole, os.W_OK | os.X_OK):
        return  # and is not touched
    existing = next(folder for folder in (whole, *whole.parents) if folder.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".ccfa-", dir=existing))
    except OSError as error:
        raise ResourceError(f"Could not create {path}: {error.strerror}.") from error


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a plain file, which may have so many; a ModelError, without reading them, where it has more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ModelError(f"{path} is no plain file.")
        if facts.st_size > limit:
            raise ModelError(f"{path} has {facts.st_size:,} bytes, more than the {limit:,} it may have.")
        return file.read(facts.st_size)


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as a compressed .npz file without pickles."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file; nothing in it is ever executed, nor unpacked beyond a bound."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_ARRAY_BYTES:
            raise ModelError(f"{path} would unpack to {size / 2**20:.0f} MiB: too large for what it should hold.")
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
