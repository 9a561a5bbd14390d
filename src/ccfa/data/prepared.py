"""A large data set decoded once, into files of pixels that training reads as they are.

A prepared folder holds train.pixels and test.pixels (uint8, one image after the other), train.txt and test.txt with the
photos they come from, and index.safetensors with labels and checks. Until then, progress.jsonl says what is done.
"""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ccfa.data.decoding import Framing, decode_image, num_threads
from ccfa.data.images import ImageSet, some
from ccfa.data.streamed import Streamed
from ccfa.errors import DataError, ModelError, ResourceError, UsageError
from ccfa.files import disk_errors, locked, make_folder, read_file, read_tensors, write_atomically, write_tensors

INDEX, PROGRESS = "index.safetensors", "progress.jsonl"
PARTS = ("train", "test")
FORMAT = 1
SHARD = 256  # images: what a kill can lose
SAMPLE = 64  # images whose time is measured before the work begins

Checks = list[int | str]
"""The CRC-32 of each image of a shard, or the reason why its photo cannot be read."""
Told = Callable[[int, int], None]
"""Called with the number of images that are done and the number of all."""


@dataclass(frozen=True)
class Source:
    """Photos to prepare: for each part the files below a folder, and their labels."""

    name: str
    root: Path
    class_names: tuple[str, ...]
    files: dict[str, list[str]]
    labels: dict[str, list[int]]

    def listing(self, part: str) -> str:
        """The files of a part as a text with one line each."""
        return "".join(f"{file}\n" for file in self.files[part])


class Shard(NamedTuple):
    """Some neighbouring images of a part."""

    part: str
    first: int
    last: int


@dataclass(frozen=True)
class Preparation:
    """The preparation of a data set in a folder: how large it is, what is left to do, and the work itself.

    Args:
        source: The photos.
        out: The folder to write. A preparation that was stopped there is continued.
        image_size: Width and height in pixels. The centre square of each photo is resized to it.
        skip_bad: Leave out unreadable photos instead of raising an error.
    """

    source: Source
    out: Path
    image_size: int = 256
    skip_bad: bool = False

    @property
    def framing(self) -> Framing:
        return Framing(self.image_size)

    @property
    def image_bytes(self) -> int:
        return 3 * self.image_size**2

    @property
    def num_images(self) -> int:
        return sum(len(files) for files in self.source.files.values())

    @property
    def num_bytes(self) -> int:
        """The size of the prepared images."""
        return self.num_images * self.image_bytes

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides which image is where."""
        return {
            "format": FORMAT,
            "name": self.source.name,
            "image_size": self.image_size,
            "class_names": list(self.source.class_names),
            "files": {part: hashlib.sha256(self.source.listing(part).encode()).hexdigest() for part in PARTS},
        }

    def is_finished(self) -> bool:
        """Whether the folder holds this data set; a DataError if it holds another one."""
        if not (self.out / INDEX).exists():
            return False
        _, facts = _read_index(self.out)
        self._require_same(facts)
        return True

    def describe(self) -> str:
        """How large the data set is, what is done, and how much space there is."""
        parts = " and ".join(f"{len(self.source.files[part]):,} {part} images" for part in PARTS)
        done = self._num_done()
        begun = f" {done:,} images are done." if done else ""
        return (
            f"{self.source.name}: {parts} of {len(self.source.class_names)} classes, {self.image_size} x "
            f"{self.image_size} pixels: {self.num_bytes / 1e9:.1f} GB in {self.out}; {self.free / 1e9:.1f} GB are free "
            f"there.{begun}"
        )

    @property
    def free(self) -> int:
        """The free bytes of the disk that the folder is on."""
        existing = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def seconds(self) -> float:
        """About how long the images that are left will take: some are decoded now, spread over all of them."""
        rows = [(part, row) for part in PARTS for row in range(len(self.source.files[part]))]
        left = len(rows) - self._num_done()
        chosen = rows[:: -(-len(rows) // SAMPLE)]

        def decode(place: tuple[str, int]) -> None:
            with suppress(DataError):  # the work itself names what is unreadable
                self._decoded(*place)

        began = time.monotonic()
        with _pool() as pool:
            list(pool.map(decode, chosen))
        return (time.monotonic() - began) / len(chosen) * left

    def done(self) -> dict[Shard, Checks]:
        """The shards that are done. One with an unreadable photo is not: the photo may be replaced."""
        try:
            first, *lines = read_file(self.out / PROGRESS).splitlines()
            identity = json.loads(first)
        except (ModelError, ValueError):  # nothing was begun, or not even its first line was written
            return {}
        self._require_same(identity)
        shards: dict[Shard, Checks] = {}
        for line in lines:
            with suppress(ValueError):  # a torn line: its shard is decoded again
                place, checks = json.loads(line)
                if _all_readable(checks):
                    shards[Shard(*place)] = checks
        return shards

    def run(self, told: Told = lambda done, total: None) -> None:
        """Decode what is left, and write the index. A finished folder is left as it is."""
        if self.is_finished():
            return
        if (left := self.num_bytes - self._num_done() * self.image_bytes) > self.free:
            raise ResourceError(
                f"{self.out} needs {left / 1e9:.1f} GB more, and {self.free / 1e9:.1f} GB are free there. Use another "
                "--out, or a smaller --image-size."
            )
        make_folder(self.out)
        with locked(self.out), disk_errors(f"write {self.out}"):
            done = self.done()
            for part in PARTS:
                write_atomically(self.out / f"{part}.txt", self.source.listing(part))
            # Without a torn last line, to which the next one would be added.
            write_atomically(self.out / PROGRESS, "".join(map(_line, (self.identity, *done.items()))))
            checks, bad = self._decode(done, told)
            if bad and not self.skip_bad:
                raise DataError(
                    f"{len(bad)} photos cannot be read:\n{some(bad, chr(10))}\nReplace them and repeat the command, or "
                    "leave them out with --skip-bad."
                )
            self._write_index(checks)

    def verify(self, told: Told = lambda done, total: None) -> int:
        """Read everything again, and decode the images that are damaged; return their number."""
        tensors, facts = _read_index(self.out)
        self._require_same(facts)
        num_read = num_repaired = 0
        for part in PARTS:
            images = _streamed(self.out, part, tensors, facts)
            starts = range(0, len(images), SHARD)
            with _opened(self.out / f"{part}.pixels") as descriptor, _pool() as pool:
                for rows in pool.map(lambda first, images=images: images.damaged(first, first + SHARD), starts):
                    for row in rows:
                        self._repair(descriptor, part, row, int(images.checks[row]))
                    num_repaired += len(rows)
                    num_read = min(num_read + SHARD, self.num_images)
                    told(num_read, self.num_images)
        return num_repaired

    def _repair(self, descriptor: int, part: str, row: int, check: int) -> None:
        if self._store(descriptor, part, row) != check:
            raise DataError(
                f"{self.source.files[part][row]} is not the photo that was prepared, or this version of Pillow decodes "
                f"it differently. Delete {self.out} and prepare it again."
            )

    def _num_done(self) -> int:
        return self.num_images if self.is_finished() else sum(shard.last - shard.first for shard in self.done())

    def _require_same(self, facts: dict[str, Any]) -> None:
        if other := sorted(name for name, value in self.identity.items() if facts.get(name) != value):
            raise DataError(
                f"{self.out} holds images that were prepared with another {', '.join(other)}. Use another --out, or "
                "delete it."
            )

    def _decode(self, done: dict[Shard, Checks], told: Told) -> tuple[dict[str, NDArray[np.int64]], list[str]]:
        """Decode the shards that are left; return the CRC-32 of each image, -1 without one, and what is unreadable."""
        if not hasattr(os, "pwrite"):
            raise UsageError("`ccfa prepare` needs Linux or macOS: its threads write into one file at once.")
        shards = [
            Shard(part, first, min(first + SHARD, len(files)))
            for part, files in self.source.files.items()
            for first in range(0, len(files), SHARD)
        ]
        checks = {part: np.full(len(files), -1, np.int64) for part, files in self.source.files.items()}
        bad: list[str] = []
        num_done = 0
        with (
            _opened(self.out / "train.pixels") as train,
            _opened(self.out / "test.pixels") as test,
            open(self.out / PROGRESS, "ab") as log,
            closing(self._results(shards, done, {"train": train, "test": test})) as results,  # before the files are
        ):
            for part, descriptor in (("train", train), ("test", test)):  # also if its last photos are unreadable
                os.ftruncate(descriptor, len(self.source.files[part]) * self.image_bytes)
            for shard, found in results:
                for row, check in enumerate(found, start=shard.first):
                    if isinstance(check, int):
                        checks[shard.part][row] = check
                    else:
                        bad.append(f"  {self.source.root / self.source.files[shard.part][row]} {check}")
                if shard not in done and _all_readable(found):
                    log.write(_line((shard, found)).encode())
                    log.flush()
                    os.fsync(log.fileno())
                num_done += shard.last - shard.first
                told(num_done, self.num_images)
        return checks, bad

    def _results(
        self, shards: list[Shard], done: dict[Shard, Checks], files: dict[str, int]
    ) -> Generator[tuple[Shard, Checks]]:
        """Yield what came of each shard: first of those that are done, then of others as they are decoded."""
        yield from ((shard, done[shard]) for shard in shards if shard in done)
        with _pool() as pool:
            left = (shard for shard in shards if shard not in done)
            working = {pool.submit(self._store_shard, files[shard.part], shard): shard for shard in left}
            for future in as_completed(working):
                yield working[future], future.result()

    def _store_shard(self, descriptor: int, shard: Shard) -> Checks:
        """Decode a shard and write it to its place."""
        found: Checks = []
        for row in range(shard.first, shard.last):
            try:
                found.append(self._store(descriptor, shard.part, row))
            except DataError as error:
                found.append(str(error))
        os.fsync(descriptor)  # before it is noted as done
        return found

    def _store(self, descriptor: int, part: str, row: int) -> int:
        pixels = self._decoded(part, row).tobytes()
        if os.pwrite(descriptor, pixels, row * len(pixels)) < len(pixels):
            raise ResourceError(f"Could not write {self.out}: the disk is full.")
        return zlib.crc32(pixels)

    def _decoded(self, part: str, row: int) -> NDArray[np.uint8]:
        return decode_image(self.source.root / self.source.files[part][row], self.framing)

    def _write_index(self, checks: dict[str, NDArray[np.int64]]) -> None:
        tensors = {}
        for part in PARTS:
            tensors[f"{part}.checks"] = torch.from_numpy(checks[part])
            tensors[f"{part}.labels"] = torch.tensor(self.source.labels[part], dtype=torch.int64)
        write_tensors(self.out / INDEX, tensors, self.identity)
        (self.out / PROGRESS).unlink()


def read_prepared(folder: Path) -> tuple[ImageSet, ImageSet]:
    """Return the train and the test set of a prepared folder. Images are checked when they are read.

    Args:
        folder: The folder that `ccfa prepare` has written.

    Raises:
        DataError: If the folder is not finished or is damaged.
    """
    if not (folder / INDEX).exists():
        begun = (folder / PROGRESS).exists()
        reason = "is not finished: repeat `ccfa prepare`" if begun else "is not a prepared data set"
        raise DataError(f"{folder} {reason}.")
    tensors, facts = _read_index(folder)
    sets = []
    for part in PARTS:
        images = _streamed(folder, part, tensors, facts)
        labels = tensors[f"{part}.labels"][torch.from_numpy(images.rows)]
        sets.append(ImageSet(images, labels, facts["class_names"]))
    return sets[0], sets[1]


def _streamed(folder: Path, part: str, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> Streamed:
    path, side, checks = folder / f"{part}.pixels", facts["image_size"], tensors[f"{part}.checks"].numpy()
    expected = len(checks) * 3 * side * side
    found = path.stat().st_size if path.exists() else 0
    if found != expected:
        raise DataError(f"{path} has {found:,} bytes, expected {expected:,}. Delete {folder} and prepare it again.")
    return Streamed(path, (3, side, side), checks, np.flatnonzero(checks >= 0))


def _read_index(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        tensors, facts = read_tensors(folder / INDEX)
    except ModelError as error:
        raise DataError(f"{error} Delete {folder} and prepare it again.") from error
    if facts.get("format") != FORMAT:
        raise DataError(f"{folder} was prepared by another version of ccfa. Delete it and prepare it again.")
    return tensors, facts


def _all_readable(checks: Checks) -> bool:
    return all(isinstance(check, int) for check in checks)


def _line(record: Any) -> str:
    return json.dumps(record) + "\n"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file to write into at any place, kept as it is."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that are waited for at the end; what they have not begun is left undone."""
    pool = ThreadPoolExecutor(num_threads())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
