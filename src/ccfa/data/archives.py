"""Files from elsewhere, read without trusting them: digests, tar members, pickled arrays, downloads."""

import hashlib
import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from ccfa.errors import DataError

_CHUNK = 1 << 20
_MAX_MEMBERS = 100


def require_digest(path: Path, num_bytes: int, sha256: str) -> None:
    """Check a file's size and SHA-256."""
    found_bytes = path.stat().st_size
    if found_bytes != num_bytes:
        raise DataError(
            f"{path} is truncated or altered: expected {num_bytes} bytes, found {found_bytes}. "
            "Delete it and fetch it again."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DataError(f"{path} is altered: expected SHA-256 {sha256}, found {found}. Delete it and fetch it again.")


def read_members(path: Path, names: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """The contents of the named regular files of a tar.gz; nothing is ever written to disk."""
    contents: dict[str, bytes] = {}
    total = 0
    try:
        # As a stream, so that the caps are checked before anything behind them is unpacked.
        with tarfile.open(path, "r|gz") as archive:
            for position, member in enumerate(archive):
                total += member.size
                if position >= _MAX_MEMBERS or total > max_bytes:
                    raise DataError(f"{path} is refused: expected at most {_MAX_MEMBERS} members of {max_bytes} bytes.")
                if member.name not in names:
                    continue
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or member.name in contents:
                    raise DataError(f"{path} is refused: {member.name!r} is not one regular file.")
                contents[member.name] = file.read()
    except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar.gz archive: {error}.") from error
    missing = sorted(set(names) - set(contents))
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}.")
    return contents


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refused: text encoded as {encoding!r}")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows NumPy arrays and plain values, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that pickled arrays consist of."""
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"refused: it asks for {module}.{name}")


def unpickle_arrays(content: bytes, source: str) -> dict[str, Any]:
    """The dictionary of arrays and plain values in a pickle, also one that Python 2 wrote."""
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise almost anything
        raise DataError(
            f"{source} cannot be read: {error}. Expected a pickle of arrays and plain values only."
        ) from error
    if not isinstance(loaded, dict):
        raise DataError(f"{source} holds {type(loaded).__name__}, expected a dictionary.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): loaded[key] for key in loaded}


def fetch(url: str, target: Path, num_bytes: int, sha256: str, *, opener: Callable[..., Any]) -> None:
    """Fetch `url` with `opener` (urlopen) into `target`, which appears only once whole and checked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with opener(url, timeout=60) as response, partial.open("wb") as file:
            left = num_bytes + 1  # one more than expected, so that a longer answer is noticed and no more read
            while left > 0 and (chunk := response.read(min(_CHUNK, left))):
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        require_digest(partial, num_bytes, sha256)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
