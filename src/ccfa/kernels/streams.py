"""CUDA streams that no other run has, so that several runs can share a GPU, and branches of a captured step."""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ccfa.errors import ResourceError

T = TypeVar("T")


class Lane:
    """The streams of one run: its main one, and one for each branch of its graphs. No other run has them.

    `torch.cuda.Stream()` hands out the same 32 streams in turn, so two runs soon share one. What one of them launches
    while the other captures becomes part of the other's graph, and waiting for it ends the capture with an error.
    Each branch has a stream because freed memory is reused on the stream that it came from: what a branch made may be
    freed while the main stream still reads it, for example in backward. The branch waits for the main stream before it
    runs again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.main = _unshared_stream(device)
        self._branches: dict[str, torch.cuda.Stream] = {}

    def branch(self, name: str) -> torch.cuda.Stream:
        if name not in self._branches:
            self._branches[name] = _unshared_stream(self.device)
        return self._branches[name]


class _Here(threading.local):
    """The lanes of this thread, by the number of their device."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}


_HERE = _Here()
_IDLE: defaultdict[int, list[Lane]] = defaultdict(list)  # for later runs, with the memory kept for their streams


def lane_here(device: torch.device) -> Lane:
    """The lane of this thread; a thread that borrowed none gets one for itself."""
    number = _number(device)
    if number not in _HERE.lanes:
        _HERE.lanes[number] = Lane(device)
    return _HERE.lanes[number]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on a lane that no other thread has, so that runs in several threads share a GPU instead of queueing for it.

    Args:
        device: The GPU; for a CPU the context does nothing.

    >>> with own_stream(torch.device("cpu")):
    ...     torch.ones(2).sum().item()
    2.0
    """
    if device.type != "cuda":
        yield
        return
    number = _number(device)
    try:
        lane = _IDLE[number].pop()
    except IndexError:
        lane = Lane(device)
    _HERE.lanes[number] = lane
    try:
        with torch.cuda.stream(lane.main):
            yield
            lane.main.synchronize()
        _IDLE[number].append(lane)  # unless an error left work behind
    finally:
        del _HERE.lanes[number]


def aside(name: str, device: torch.device, compute: Callable[[], T]) -> Callable[[], T]:
    """Compute a value on a side stream: in a capture, a branch of the graph.

    Returns:
        A function that makes the main stream wait for the value and returns it. It must be called within the capture.
    """
    main, side, done = torch.cuda.current_stream(device), lane_here(device).branch(name), torch.cuda.Event()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        value = compute()
        done.record(side)

    def ready() -> T:
        main.wait_event(done)
        return value

    return ready


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _unshared_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream from the driver, which does not wait for the default stream."""
    handle, non_blocking = ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes this thread use the device
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
        if status:
            raise ResourceError(f"CUDA could not make a stream on {device} (error {status}).")
        return torch.cuda.ExternalStream(handle.value, device)
