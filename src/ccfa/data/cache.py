"""Decoded photos on disk, so that a second run starts at once."""

import os
import sys
from pathlib import Path


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
