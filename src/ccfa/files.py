"""Every file of a run goes through here: one reader, one writer, one format for tensors.

The reader takes regular files only, never follows a link, and reads no more than a limit. The writer replaces a file
atomically. Tensors are stored as safetensors, which cannot execute code, with a digest of everything in the file.
"""

import csv
import errno
import hashlib
import io
import json
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, uint8

from ccfa.errors import DamagedError, DataError, LockedError, ModelError, Notice, ResourceError

TEXT_LIMIT = 2**27  # bytes of a JSON file or a log
TENSOR_LIMIT = 2**36  # a checkpoint holds four networks, of which one may have gigabytes
CAN_REFUSE_LINKS = hasattr(os, "O_NOFOLLOW")  # Windows cannot, nor can it flush what is open for reading
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
CAREFULLY: int = os.O_RDONLY | sum(getattr(os, f"O_{name}", 0) for name in ("CLOEXEC", "NONBLOCK", "NOCTTY", "BINARY"))
LOCK = ".lock"
STALE_SECONDS = 3600  # a temporary file that was not written to for so long has no writer any more


def read_file(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """Return the bytes of a file of a run, which is never a link; a ModelError says why it cannot be read."""
    try:
        if not CAN_REFUSE_LINKS and path.is_symlink():
            raise DataError("is a link")
        return read_regular(path, limit, NO_LINK)
    except DataError as error:
        raise ModelError(f"{path} {error}.") from error


def read_regular(path: Path, limit: int, flags: int = 0) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; anything else is a DataError without the path.

    A pipe is not waited for, and nothing is read of a device or of a file that is too large.
    """
    with open_regular(path, flags) as (descriptor, size):
        if size > limit:
            raise DataError(f"has {size:,} bytes, expected at most {limit:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)


@contextmanager
def open_regular(path: Path, flags: int = 0) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading and yield its descriptor and its size; errors are as those of `read_regular`."""
    try:
        try:
            descriptor = os.open(path, CAREFULLY | flags)
        except ValueError as error:
            raise DataError("cannot be read: no file can have this name") from error
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise DataError("is a folder" if stat.S_ISDIR(facts.st_mode) else "is not a regular file")
            yield descriptor, facts.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: write a temporary file, flush it to the disk, rename it.

    Old temporary files in the folder, which killed writers have left, are removed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    with disk_errors(f"write {path}"):
        try:
            with open(temporary, "xb") as file:
                file.write(content.encode(errors="replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
                now = os.fstat(file.fileno()).st_mtime
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)
    remove_temporaries(path.parent, before=now - STALE_SECONDS)


def is_temporary(name: str) -> bool:
    """Whether a file has the name of a temporary file of `write_atomically`."""
    return name.startswith(".") and name.endswith(".tmp")


def remove_temporaries(folder: Path, before: float = float("inf")) -> None:
    """Remove the temporary files in a folder that were last written to before a time."""
    with suppress(OSError):  # what cannot be removed is in nobody's way
        for path in [folder / name for name in os.listdir(folder) if is_temporary(name)]:
            if path.stat().st_mtime < before:
                path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    if not CAN_REFUSE_LINKS:
        return
    descriptor = os.open(path, os.O_RDONLY | NO_LINK)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Turn an error of the disk into a ResourceError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"Could not {action}: {error.strerror}.") from error


def make_folder(path: Path) -> None:
    with disk_errors(f"create {path}"):
        path.mkdir(parents=True, exist_ok=True)


def require_place(path: Path) -> None:
    """Check that a folder can be created or written at this path, and leave nothing there."""
    with disk_errors(f"create {path}"):
        whole = path.absolute()
        if whole.is_dir() and os.access(whole, os.W_OK | os.X_OK):
            return
        existing = next(folder for folder in (whole, *whole.parents) if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".ccfa-", dir=existing))


def require_plain(path: Path) -> None:
    """Refuse a link, which leads outside of the directory, and a pipe, for which a writer would wait forever."""
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ModelError(f"{path} is a symbolic link, a pipe or a device. Remove it.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes, which get a LockedError; the lock ends with the process."""
    require_plain(folder / LOCK)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = ""
        with suppress(ModelError, KeyError):
            status = read_json(folder / "status.json")
            holder = f" ({status['pid']} on {status['host']})"
        raise LockedError(
            f"{folder} is being written by another process{holder}. Wait for it, or use another --out."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise ResourceError(f"Could not lock {folder}: {error.strerror}.") from error
        message = f"The file system of {folder} has no locks ({error.strerror}): start nothing else there."
        warnings.warn(Notice(message), stacklevel=2)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes a parser do into a DamagedError with the file's name."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedError(f"{path} is damaged: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    content = read_file(path)
    with damage_named(path):
        return _object(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file with the keys of the first row as its header."""
    write_atomically(path, csv_text([list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV; a text that a spreadsheet would run as a formula is prefixed with an apostrophe.

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Store tensors and JSON facts in one safetensors file with one SHA-256 digest of both."""
    write_atomically(path, packed(tensors, facts))


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return tensors and JSON facts as the content of a safetensors file."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    # One entry: the order of several would be random, and equal content should make equal bytes.
    return save(stored, metadata={"ccfa": f"{_digest(stored, text)} {text}"})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and facts as they were stored; any change since then is a ModelError."""
    content = read_file(path, TENSOR_LIMIT)
    with damage_named(path):
        return unpacked(content)


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts that were packed; anything else is an error."""
    tensors = load(content)  # checks the header, which is read once more for the facts
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    digest, _, text = json.loads(header)["__metadata__"]["ccfa"].partition(" ")
    if digest != _digest(tensors, text):
        raise ValueError("its digest is wrong")
    return tensors, _object(text)


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(uint8).numpy().tobytes())
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def read_arrays(path: Path, limit: int = 2**28) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file of at most `limit` bytes when unpacked; nothing in it is executed."""
    content = read_file(path)
    with damage_named(path), np.load(io.BytesIO(content), allow_pickle=False) as stored:
        if sum(entry.file_size for entry in stored.zip.infolist()) > limit:
            raise ValueError("it unpacks to too many bytes")
        arrays = {name: stored[name] for name in stored.files}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("it holds something else than arrays")
        return arrays


def _object(text: str | bytes) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it should hold a JSON object")
    return content
