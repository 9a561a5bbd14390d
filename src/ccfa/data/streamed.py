"""Images that stay in a file and are read when they are needed, behind the same `images[rows]` as a tensor."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccfa.errors import DataError
from ccfa.files import open_regular

NUM_READERS = 4  # threads, each with a whole batch
BATCHES_AHEAD = 8
WHOLE_BATCH = 512  # images at a time where all of them are read


class Streamed:
    """Images in a file, uint8, one after the other; each is checked against its CRC-32 whenever it is read.

    Args:
        path: The file.
        shape: Channels, height and width of an image.
        checks: The CRC-32 of each image in the file.
        rows: The place in the file of each image of this set; by default all of them in their order.
        device: Where images that are read go.

    Example:
        >>> import tempfile, zlib, numpy as np, torch
        >>> pixels = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(pixels.tobytes())
        ...     file.flush()
        ...     images = Streamed(Path(file.name), (3, 4, 4), np.array([zlib.crc32(image) for image in pixels]))
        ...     images.shape, torch.equal(images[torch.tensor([1])], torch.tensor(pixels[1:]))
        (torch.Size([2, 3, 4, 4]), True)
    """

    dtype = torch.uint8
    ndim = 4

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        checks: NDArray[Any],
        rows: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.path = path
        self.checks = checks
        self.rows = np.arange(len(checks)) if rows is None else rows
        self.shape = torch.Size([len(self.rows), *shape])
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Tensor | slice | int) -> Tensor:
        rows = self.rows[chosen.cpu().numpy() if isinstance(chosen, Tensor) else chosen]
        return self._read(rows.reshape(-1)).to(self.device).view(*rows.shape, *self.shape[1:])

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all images, `size` at a time."""
        return self.ahead(torch.arange(len(self)).split(size))

    def ahead(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each batch of rows, while threads read those of the next batches."""
        left = iter(batches)
        pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="images")
        reading: deque[Future[Tensor]] = deque()

        def begin(num: int) -> None:
            for rows in islice(left, num):
                reading.append(pool.submit(self._read, self.rows[rows.numpy()]))

        try:
            begin(BATCHES_AHEAD)
            while reading:
                # The copy is queued on the device; the host's memory is reused only after it.
                yield reading.popleft().result().to(self.device, non_blocking=True)
                begin(1)
        finally:
            pool.shutdown(cancel_futures=True)

    def to(self, device: torch.device | str) -> Streamed:
        """Return the same images for another device; nothing is read."""
        return Streamed(self.path, self.shape[1:], self.checks, self.rows, device)

    def picked(self, chosen: NDArray[np.int64]) -> Streamed:
        """Return some of the images; nothing is read."""
        return Streamed(self.path, self.shape[1:], self.checks, self.rows[chosen], self.device)

    def resident(self, device: torch.device | str) -> Tensor:
        """Read all images into one tensor on a device."""
        images = torch.empty(self.shape, dtype=self.dtype, device=device)
        place = 0
        for part in self.to(device).split(WHOLE_BATCH):
            images[place : place + len(part)] = part
            place += len(part)
        return images

    def damaged(self, first: int, last: int) -> list[int]:
        """Return the place in the file of each image of rows first to last - 1 that is not what it was."""
        found = []
        for row in self.rows[first:last]:
            try:
                self._read(np.array([row]))
            except DataError:
                found.append(int(row))
        return found

    def _read(self, rows: NDArray[np.int64]) -> Tensor:
        """Read images by their place in the file, into memory that a copy to the device need not wait for."""
        pixels = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype, pin_memory=self.device.type == "cuda")
        num_bytes = math.prod(self.shape[1:])
        lines = pixels.view(len(rows), num_bytes).numpy()
        try:
            with open_regular(self.path) as (descriptor, _), open(descriptor, "rb", 0, closefd=False) as file:
                for line, row in zip(lines, rows.tolist(), strict=True):
                    file.seek(row * num_bytes)
                    if file.readinto(line) != num_bytes or zlib.crc32(line) != self.checks[row]:
                        raise DataError(f"is damaged: image {row} is not the one that was prepared")
        except DataError as error:
            raise DataError(f"{self.path} {error}. `ccfa prepare ... --verify` repairs it.") from error
        return pixels
