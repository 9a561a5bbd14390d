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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, uint8

from ccfa.errors import DataError, ModelError, ResourceError

TEXT_LIMIT = 2**27  # bytes of a JSON file or a log
TENSOR_LIMIT = 2**32
_HEADER_LIMIT = 2**27


def read_file(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """Return the bytes of a file of a run, which is never a link; a ModelError says why it cannot be read."""
    if path.is_symlink():
        raise ModelError(f"{path} is a symbolic link.")
    try:
        return read_regular(path, limit, os.O_NOFOLLOW)
    except DataError as error:
        raise ModelError(f"{path} {error}.") from error


def read_regular(path: Path, limit: int, flags: int = 0) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; anything else is a DataError without the path.

    A pipe is not waited for, and nothing is read of a device or of a file that is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise DataError("is a folder" if stat.S_ISDIR(facts.st_mode) else "is not a regular file")
            if facts.st_size > limit:
                raise DataError(f"has {facts.st_size:,} bytes, expected at most {limit:,}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(facts.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: write a temporary file, flush it to the disk, rename it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ResourceError(f"Could not write {path}: {error.strerror}. The previous version is kept.") from error


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"Could not create {path}: {error.strerror}.") from error


def require_place(path: Path) -> None:
    """Check that a folder can be created or written at this path, and leave nothing there."""
    try:
        whole = path.absolute()
        if whole.is_dir() and os.access(whole, os.W_OK | os.X_OK):
            return
        existing = next(folder for folder in (whole, *whole.parents) if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".ccfa-", dir=existing))
    except OSError as error:
        raise ResourceError(f"Could not create {path}: {error.strerror}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object.")
    return content


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
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    # One entry: the order of several would be random, and equal content should make equal bytes.
    write_atomically(path, save(stored, metadata={"ccfa": f"{_digest(stored, text)} {text}"}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and facts as they were stored; any change since then is a ModelError."""
    content = read_file(path, TENSOR_LIMIT)
    try:
        length = int.from_bytes(content[:8], "little")
        if content[8:9] != b"{" or not 0 < length <= min(_HEADER_LIMIT, len(content)):
            raise ValueError("it is not a safetensors file")
        digest, _, text = json.loads(content[8 : 8 + length])["__metadata__"]["ccfa"].partition(" ")
        tensors = load(content)
        if digest != _digest(tensors, text):
            raise ValueError("its digest is wrong")
        facts = json.loads(text)
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a JSON object")
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes a parser do
        raise ModelError(f"{path} is damaged: {error}.") from error
    return tensors, facts


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(uint8).numpy().tobytes())
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store arrays in a compressed .npz file."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def read_arrays(path: Path, limit: int = 2**28) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, which may unpack to so many bytes; nothing in it is executed."""
    content = read_file(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            if sum(entry.file_size for entry in stored.zip.infolist()) > limit:
                raise ValueError("it unpacks to too many bytes")
            arrays = {name: stored[name] for name in stored.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("it holds something else than arrays")
            return arrays
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes a parser do
        raise ModelError(f"{path} is damaged: {error}.") from error
