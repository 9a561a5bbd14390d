"""Files that users name, read without trusting them."""

import os
import stat
from pathlib import Path

from ccfa.errors import DataError


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`; anything else is a DataError without the path.

    A pipe is not waited for, and nothing is read of a device or of a file that is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise DataError("is a folder" if stat.S_ISDIR(facts.st_mode) else "is not a regular file")
            if facts.st_size > max_bytes:
                raise DataError(f"has {facts.st_size:,} bytes, expected at most {max_bytes:,}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(facts.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error
