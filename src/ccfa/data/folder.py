"""Images from any folder with one subfolder a class, with or without train and test parts."""

import logging
import os
import stat
import time
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ccfa.data.decoding import Decoded, decode_image, require_image_size
from ccfa.data.duplicates import tell_conflicts, tell_shared
from ccfa.data.images import ImageSet, require_same_classes
from ccfa.errors import DataError, Notice, UsageError

_LOG = logging.getLogger(__name__)
_EXPECTED = """Expected
  FOLDER/<class>/<image files>
or
  FOLDER/train/<class>/<image files>
  FOLDER/test/<class>/<image files>   (or val/ instead of test/)"""
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini")
_NUM_SHOWN = 10
_SECONDS_BETWEEN_SIGNS = 10.0
_AT_ONCE = 1000

BadFiles = list[tuple[Path, str]]


def load_folder(
    root: Path, image_size: int = 64, held_out: float = 0.2, seed: int = 0, skip_bad: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Train and test sets, 3 x image_size x image_size; without a test part, `held_out` of each class."""
    require_image_size(image_size)
    if not 0 < held_out < 1:
        raise UsageError(f"The fraction to hold out must be above 0 and below 1, got {held_out}.")
    folders = _class_folders(root)
    if set(folders) == {"train"}:
        raise DataError(f"{_shown(root)} has train/ but neither test/ nor val/. {_EXPECTED}")
    if {"train"} < set(folders) <= {"train", "test", "val"}:
        parts = [folders["train"], folders.get("test") or folders["val"]]
        train, test = (load_classes(part, image_size, skip_bad) for part in parts)
        _require_same_names(root, train, test)
        require_same_classes(train, test)
    else:
        train, test = load_classes(root, image_size, skip_bad).hold_out(held_out, seed)
    tell_shared(train, test)
    return train, test


def load_classes(root: Path, image_size: int = 64, skip_bad: bool = False) -> ImageSet:
    """All images of root/<class>/*, classes sorted by name."""
    require_image_size(image_size)
    folders = _class_folders(root)
    bad: BadFiles = []
    files = {name: _image_files(folder, bad) for name, folder in folders.items()}
    paths = [path for name in files for path in files[name]]
    labels = [label for label, name in enumerate(files) for _ in files[name]]
    images, good, remarks = _decode_all(paths, image_size, bad)
    if bad and not skip_bad:
        raise DataError(f"{_listed(bad)}\nRemove or repair them, or leave them out with --skip-bad (skip_bad=True).")
    kept = np.array(labels, dtype=np.int64)[good]
    empty = [name for label, name in enumerate(files) if label not in set(kept.tolist())]
    if empty:
        raise DataError(f"No usable images in the classes {empty[:_NUM_SHOWN]} of {_shown(root)}. {_EXPECTED}")
    if bad:
        warnings.warn(f"Skipped: {_listed(bad)}", Notice, stacklevel=2)
    for remark, those in remarks.items():
        warnings.warn(f"{remark}: {len(those)} images, such as {_shown(those[0])}", Notice, stacklevel=2)
    images = images[good] if bad else images
    tell_conflicts(images, kept, [path for path, is_good in zip(paths, good, strict=True) if is_good])
    return ImageSet(images, kept, files)


def _class_folders(root: Path) -> dict[str, Path]:
    """The class folders by class name (NFC), sorted by name."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"{_shown(root)} {problem}. {_EXPECTED}")
    visible = _visible(root)
    folders = [path for path in visible if path.is_dir()]
    loose = [path.name for path in visible if path.suffix.lower() in _IMAGE_ENDINGS and not path.is_dir()]
    if loose:
        raise DataError(f"{_shown(root)} has images outside the class folders, such as {loose[0]!r}. {_EXPECTED}")
    if not folders:
        raise DataError(f"{_shown(root)} has no class folders. {_EXPECTED}")
    seen: dict[str, str] = {}
    by_name = {_text(path.name): path for path in folders}
    for name in by_name:
        if not name.isprintable():
            raise DataError(f"Class folder {name!r} has a name that cannot be printed; rename it.")
        same = unicodedata.normalize("NFC", name).strip().casefold()
        if same in seen:
            raise DataError(
                f"Class folders {seen[same]!a} and {name!a} differ only in case, spaces or Unicode form; "
                "merge or rename one."
            )
        seen[same] = name
    composed = {unicodedata.normalize("NFC", name): path for name, path in by_name.items()}
    return {name: composed[name] for name in sorted(composed)}


def _text(name: str) -> str:
    """A file name as UTF-8, also where the locale knows only ASCII."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _visible(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise DataError(f"{_shown(folder)} cannot be listed: {error.strerror}.") from error
    kept = [name for name in names if not name.startswith(".") and name.lower() not in _LEFT_BY_SYSTEMS]
    return [folder / name for name in sorted(kept)]


def _image_files(folder: Path, bad: BadFiles) -> list[Path]:
    """The regular files of a class; what cannot be reached goes to `bad`, pipes and devices are skipped."""
    files = []
    for path in _visible(folder):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            bad.append((path, "dangling link" if path.is_symlink() else str(error.strerror)))
            continue
        if stat.S_ISDIR(mode):
            raise DataError(
                f"{_shown(path)} is a folder inside a class folder; images must lie directly in the class "
                f"folder. {_EXPECTED}"
            )
        if stat.S_ISREG(mode):
            files.append(path)
    return files


def _decode_all(
    paths: Sequence[Path], image_size: int, bad: BadFiles
) -> tuple[NDArray[np.uint8], NDArray[np.bool_], dict[str, list[Path]]]:
    """Every image, which of them are good, and remarks on some; the reasons of the others go to `bad`."""
    from PIL.Image import DecompressionBombWarning

    images = np.zeros((len(paths), 3, image_size, image_size), dtype=np.uint8)
    good = np.zeros(len(paths), dtype=np.bool_)
    remarked: dict[str, list[Path]] = defaultdict(list)
    shown = time.monotonic()
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", DecompressionBombWarning)  # a limit of our own decides
        decode = partial(_decoded_or_reason, image_size=image_size)
        # Handed out piece by piece: a task costs more memory than a small image.
        pieces = (paths[start : start + _AT_ONCE] for start in range(0, len(paths), _AT_ONCE))
        decoded = chain.from_iterable(pool.map(decode, piece) for piece in pieces)
        for row, (path, result) in enumerate(zip(paths, decoded, strict=True)):
            if isinstance(result, str):
                bad.append((path, result))
            else:
                images[row], good[row] = result.pixels, True
                for remark in result.remarks:
                    remarked[remark].append(path)
            if time.monotonic() - shown > _SECONDS_BETWEEN_SIGNS:
                _LOG.warning("Read %d of %d images", row + 1, len(paths))
                shown = time.monotonic()
    return images, good, remarked


def _decoded_or_reason(path: Path, image_size: int) -> Decoded | str:
    try:
        return decode_image(path, image_size)
    except DataError as error:
        return str(error)


def _listed(bad: BadFiles) -> str:
    lines = [f"  {_shown(path)}: {reason}" for path, reason in bad[:_NUM_SHOWN]]
    if len(bad) > _NUM_SHOWN:
        lines.append(f"  and {len(bad) - _NUM_SHOWN} more")
    return "\n".join([f"{len(bad)} files are not usable images:", *lines])


def _require_same_names(root: Path, train: ImageSet, test: ImageSet) -> None:
    only_train = sorted(set(train.class_names) - set(test.class_names))[:_NUM_SHOWN]
    only_test = sorted(set(test.class_names) - set(train.class_names))[:_NUM_SHOWN]
    if only_train or only_test:
        raise DataError(
            f"{_shown(root)}: train and test must have the same classes; only in train: {only_train}, "
            f"only in test: {only_test}."
        )


def _shown(path: Path) -> str:
    """The path as text that always prints, whatever bytes the name is made of."""
    text = str(path)
    return text if text.isprintable() else repr(text)
