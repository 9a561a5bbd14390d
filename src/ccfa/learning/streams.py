"""CUDA streams of one's own, so that several runs can share a GPU."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ccfa.errors import ResourceError


class Lane:
    """The streams of one run: its main one, and one for each branch of its graphs. No other run has them.

    `torch.cuda.Stream()` hands out the same 32 streams in turn, so two runs soon share one. What one of them launches
    while the other captures becomes part of the other's graph, and waiting for it ends the capture with an error.
    Branches have a stream each because freed memory is reused on the stream that it came from: what a branch made may
    be freed while the main stream still reads it, in backward say; the branch waits for the main stream before it runs
    again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.main = _unshared_stream(device)
        self._branches: dict[str, torch.cuda.Stream] = {}

    def branch(self, name: str) -> torch.cuda.Stream:
        """The stream of a branch."""
        if name not in self._branches:
            self._branches[name] = _unshared_stream(self.device)
        return self._branches[name]


_HERE = threading.local()  # .lanes: those of this thread, by the number of their device
_IDLE: dict[int, list[Lane]] = {}  # for the next run, with the memory the allocator keeps for their streams


def lane_here(device: torch.device) -> Lane:
    """The lane of this thread; a thread that borrowed none gets one for itself."""
    lanes, number = _lanes_here(), _number(device)
    if number not in lanes:
        lanes[number] = Lane(device)
    return lanes[number]


def _lanes_here() -> dict[int, Lane]:
    lanes: dict[int, Lane] = _HERE.__dict__.setdefault("lanes", {})
    return lanes


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _unshared_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream of the driver's, which does not wait for the default stream."""
    handle, non_blocking = ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes this thread use the device
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
        if status:
            raise ResourceError(f"CUDA could not make a stream on {device} (error {status}).")
        return torch.cuda.ExternalStream(handle.value, device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Streams of one's own, so that runs in several threads share a GPU instead of queueing for it."""
    if device.type != "cuda":
        yield
        return
    lanes, number = _lanes_here(), _number(device)
    idle = _IDLE.setdefault(number, [])
    try:
        lane = idle.pop()
    except IndexError:
        lane = Lane(device)
    before, lanes[number] = lanes.get(number), lane
    try:
        with torch.cuda.stream(lane.main):
            yield
            lane.main.synchronize()
        idle.append(lane)  # unless an error left work behind
    finally:
        del lanes[number]
        if before:
            lanes[number] = before
