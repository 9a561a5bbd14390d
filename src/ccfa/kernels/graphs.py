"""A training step as one CUDA graph with branches, on streams that no other run has, so that runs can share a GPU."""

import ctypes
import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Generator, Tensor, nn, optim

from ccfa.errors import ResourceError

T = TypeVar("T")
Losses = dict[str, Tensor]
StepFunction = Callable[..., Losses]
"""A batch as one or more tensors -> losses."""

WARM_UP_STEPS = 2  # lets cuDNN and the allocator settle before a capture
MAIN_PRIORITY = -1  # of streams; a lower number comes first where several have work to do
# By the first word of a branch. Samples are a long chain of small kernels, which would wait long for each place behind
# backward's: with 0 they end after it. Gradients of weights fill what is left.
BRANCH_PRIORITIES = {"samples": -2, "weights": 0}
CAPTURE = threading.RLock()  # beginning a capture waits for the whole device, which ends another capture


class Lane:
    """The streams of one run: its main one, and one for each branch of its graphs. No other run has them.

    `torch.cuda.Stream()` hands out the same 32 streams in turn, so two runs soon share one. What one of them launches
    while the other captures becomes part of the other's graph, and waiting for it ends the capture with an error.
    Each branch has a stream because freed memory is reused on the stream that it came from: what a branch made may be
    freed while the main stream still reads it, for example in backward. The branch waits for the main stream before it
    runs again. The reverse is for the caller: what a branch reads of other streams must be kept until it ends.
    """

    def __init__(self, device: torch.device) -> None:
        # Several branches add to the gradient of a parameter. The engine waits for them, but would warn.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self.device = device
        self.main = _unshared_stream(device, MAIN_PRIORITY)
        self._branches: dict[str, torch.cuda.Stream] = {}

    def branch(self, name: str) -> torch.cuda.Stream:
        if name not in self._branches:
            self._branches[name] = _unshared_stream(self.device, BRANCH_PRIORITIES.get(name.split()[0], MAIN_PRIORITY))
        return self._branches[name]


class _Here(threading.local):
    """The lanes of this thread, by the number of their device."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}


_HERE = _Here()
_LOADED: list[torch.device] = []  # the device on which linear algebra was first used
_IDLE: defaultdict[int, list[Lane]] = defaultdict(list)  # for later runs, with the memory kept for their streams


def lane_here(device: torch.device) -> Lane:
    """The lane of this thread; a thread that borrowed none gets one for itself."""
    number = _number(device)
    if number not in _HERE.lanes:
        _HERE.lanes[number] = Lane(device)
    return _HERE.lanes[number]


def _load_linear_algebra(device: torch.device) -> None:
    """Have torch load its linear algebra, which it does at the first call and fails at if two threads are the first."""
    with CAPTURE:  # it may wait for the device
        if not _LOADED:
            torch.linalg.cholesky_ex(torch.ones(1, 1, device=device))
            _LOADED.append(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on a lane that no other thread has, so that runs in several threads share a GPU instead of queueing for it.

    Args:
        device: The GPU; for a CPU the context does nothing.
    """
    if device.type != "cuda":
        yield
        return
    number = _number(device)
    _load_linear_algebra(device)
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


@dataclass(frozen=True)
class Aside(Generic[T]):
    """A value that may still be computed on another stream. Call it to make the current stream wait for the value."""

    value: T
    done: torch.cuda.Event | None = None

    def __call__(self) -> T:
        if self.done:
            self.done.wait()
        return self.value


def aside(name: str, device: torch.device, compute: Callable[[], T], lane: Lane | None = None) -> Aside[T]:
    """Compute a value on a side stream: in a capture, a branch of the graph.

    Args:
        name: The name of the branch.
        device: The GPU.
        compute: Makes the value.
        lane: Whose branch it is, if not this thread's: backward runs in a thread that all runs share.

    Returns:
        The value, to be waited for within the capture. What `compute` reads must be kept until the current stream has
        waited: memory that is freed earlier may be overwritten while the branch still reads it.
    """
    done = torch.cuda.Event()
    side = (lane or lane_here(device)).branch(name)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        value = compute()
        done.record(side)
    return Aside(value, done)


def captured(
    step: StepFunction,
    batch: tuple[Tensor, ...],
    network: nn.Module,
    optimiser: optim.Optimizer,
    generator: Generator,
) -> StepFunction:
    """The step recorded as a CUDA graph, with network and optimiser left as they were."""
    inputs = tuple(tensor.clone() for tensor in batch)
    state = [*network.parameters(), *network.buffers()]
    stream = lane_here(inputs[0].device).main
    with CAPTURE, torch.no_grad():
        kept = [tensor.clone() for tensor in state]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.enable_grad():
            for _ in range(WARM_UP_STEPS):
                step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(state, kept, strict=True):
            tensor.copy_(value)
        for group in optimiser.param_groups:
            if "capturable" in group:  # Adam needs this; set before the warm-up, it would draw a warning
                group["capturable"] = True
        for values in optimiser.state.values():  # momentum of zero is what a fresh optimiser starts from
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        with torch.enable_grad(), _no_collection(), recording:
            losses = step(*inputs)

    return CapturedStep(graph, inputs, losses, step)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: a graph of an earlier phase that is freed by the capturing thread ends the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class CapturedStep:
    """A step recorded as a graph; it keeps the step alive, whose memory the graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    losses: Losses
    step: StepFunction

    def __call__(self, *batch: Tensor) -> Losses:
        """The step on another batch; its losses are overwritten by the next."""
        for read, given in zip(self.inputs, batch, strict=True):
            read.copy_(given)
        self.graph.replay()
        return self.losses


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _unshared_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """A new stream from the driver, which does not wait for the default stream."""
    handle, non_blocking = ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes this thread use the device
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(ctypes.byref(handle), non_blocking, priority)
        if status:
            raise ResourceError(f"CUDA could not make a stream on {device} (error {status}).")
        return torch.cuda.ExternalStream(handle.value, device)
