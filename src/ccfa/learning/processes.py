"""One run by several processes, on several GPUs or machines, with the result of one process.

Every process knows the whole batch. It computes the backbone's features of its own rows only, and the features of all
rows are gathered before the head. What follows, and every random number, is the same everywhere. The gradient of a
parameter is the mean of what the processes have found; gathering therefore multiplies gradients by their number.
"""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from ccfa.augmentation import MixedImages, Samples
from ccfa.augmentation.mixing import ManifoldMixup
from ccfa.errors import ResourceError, Stopped, UsageError
from ccfa.files import packed, unpacked
from ccfa.learning.acceleration import count_gpus, pick_device
from ccfa.methods import Method, Step, Term
from ccfa.models import Features

# A process that ends closes its connections, which the others notice at once. This limit is for one that hangs. Process
# 0 may need hours to prepare a large data set while the others wait.
TIMEOUT = timedelta(hours=2)
MEETING = timedelta(minutes=10)  # how long the first processes wait for the last one to start
FAREWELL = timedelta(seconds=10)  # how long the others wait for process 0 to end first; torchrun kills after 30 seconds
SAVING = timedelta(minutes=5)  # the same without an error, where process 0 stores a checkpoint or writes its pages
READING = timedelta(seconds=2)  # how long process 0 waits until another one knows that it ends
_joined = itertools.count()


@dataclass(frozen=True)
class Processes:
    """The processes that share a run. Process 0 alone writes files and decides; every other one computes its part.

    Args:
        rank: The number of this process.
        number: How many there are.
        store: Where they leave messages for each other; None without a group. A group may have one member.

    Example:
        >>> Processes(rank=1, number=2).own(5)
        slice(3, 5, None)
        >>> ALONE.largest(3)
        3
    """

    rank: int = 0
    number: int = 1
    store: Any = None

    @property
    def is_alone(self) -> bool:
        """Whether there is no group, so that nothing is exchanged."""
        return self.number == 1 and self.store is None

    def own(self, num_rows: int) -> slice:
        """The rows of this process; the first processes have one more where they cannot all have as many."""
        size, larger = divmod(num_rows, self.number)
        first = self.rank * size + min(self.rank, larger)
        return slice(first, first + size + (self.rank < larger))

    def part(self, mixed: MixedImages) -> MixedImages:
        """The batch with the images of this process alone, and with all labels."""
        return mixed if self.is_alone else mixed._replace(images=mixed.images[self.own(len(mixed.images))])

    def whole(self, own: Tensor, num_rows: int) -> Tensor:
        """The rows of all processes, in order, made of each one's own."""
        return own if self.is_alone else applied(_Gathered, own, num_rows, self)

    def whole_features(self, own: Features, num_rows: int) -> Features:
        """The features of all rows; maps are gathered when they are read."""
        if self.is_alone:
            return own
        maps = WholeMaps(lambda: tuple(self.whole(level, num_rows) for level in own.maps))
        return Features(maps, self.whole(own.embedding, num_rows))

    def penalty(self, term: Term, step: Step, own: Features, previous: Features) -> Tensor:
        """A term's penalty of the whole batch, where the features of this process's rows are `own` and `previous`."""
        if self.is_alone or not term.is_row_mean:
            return term(step)  # type: ignore[no-any-return]
        rows = self.own(len(step.labels))
        samples = Samples(step.head.embed(own.embedding), step.samples.labels[rows], step.samples.weights[rows])
        labels = step.labels[rows]
        mine = replace(step, labels=labels, features=own, previous_features=previous, samples=samples)
        return applied(_MeanOfParts, term(mine), len(labels) / len(step.labels), self)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its mean over the processes."""
        if self.is_alone:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.number
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of process 0: what each has computed may differ in its last bits."""
        for tensor in () if self.is_alone else tensors:
            if tensor.numel():
                value = tensor.detach().flatten().clone()
                with self._connected():
                    dist.broadcast(value, 0)
                with torch.no_grad():
                    tensor.copy_(value.view(tensor.shape))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if not self.is_alone:
            with self._connected():
                dist.all_reduce(tensor)
        return tensor

    def largest(self, value: int) -> int:
        """The largest value of any process."""
        if self.is_alone:
            return value
        found = torch.tensor(value)
        with self._connected():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def tell(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send facts and tensors from process 0 to all others, which call `told`."""
        if not self.is_alone:
            self._broadcast(packed(tensors or {}, facts))

    def told(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Receive what process 0 tells."""
        tensors, facts = unpacked(self._broadcast(b""))
        return facts, tensors

    def _broadcast(self, content: bytes) -> bytes:
        length = torch.tensor(len(content))
        with self._connected():
            dist.broadcast(length, 0)
            data = torch.frombuffer(bytearray(content or bytes(int(length))), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return data.numpy().tobytes()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn a failed connection into an error that says who is missing and why."""
        try:
            yield
        except RuntimeError as error:
            if self.rank and (code := self._message("ended", FAREWELL)):
                raise SystemExit(int(code)) from error  # process 0 has said why
            reason = self._message("failed", timedelta(seconds=1)) or "it was killed, or its connection broke"
            raise ResourceError(
                f"Another of the {self.number} processes has ended: {reason}. A run continues from its last checkpoint "
                f"with `ccfa resume`."
            ) from error

    def _message(self, key: str, patience: timedelta) -> str:
        """What a process has left under a key, or nothing if it leaves nothing in time."""
        limit = time.monotonic() + patience.total_seconds()
        with suppress(RuntimeError):  # the store may have ended with process 0
            while not self.store.check([key]) and time.monotonic() < limit:
                time.sleep(0.05)
            return str(self.store.get(key).decode()) if self.store.check([key]) else ""
        return ""

    def leave(self, error: BaseException | None) -> None:
        """End the connections. Process 0 leaves last, and is the one that reports an error."""
        code = exit_code(error) if error else 0
        with suppress(RuntimeError):  # the store may have ended with process 0
            if error and self.rank:
                self.store.compare_set("failed", "", f"process {self.rank}: {error}")
            if self.rank == 0:
                self.store.set("ended", str(code))
        dist.destroy_process_group()
        if self.rank == 0:  # the store ends with it, unless torchrun keeps it
            for rank in range(1, self.number):
                if not self._message(f"left by {rank}", READING):
                    break
        elif self._message("ended", SAVING if error is None or isinstance(error, Stopped) else FAREWELL):
            with suppress(RuntimeError):
                self.store.set(f"left by {self.rank}", "yes")
            if error:
                raise SystemExit(code) from error


ALONE = Processes()


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with this error."""
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def several() -> bool:
    """Whether torchrun, or whoever sets its variables, has started several processes for this command."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def own_device(name: str) -> torch.device:
    """The device of this process: of several, each has the GPU of its LOCAL_RANK, or the CPU.

    Args:
        name: `auto`, `cpu` or `cuda`; for a single process also `cuda:N`.
    """
    if not several():
        return pick_device(name)
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"Of several processes each has a GPU of its own, so --device {name} cannot be met. Leave it out."
        )
    kind, place = pick_device(name).type, int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda" and place >= (num_gpus := count_gpus()):
        raise ResourceError(
            f"Each process needs a GPU of its own, and this machine has {num_gpus} for more processes. Call torchrun "
            f"with --nproc-per-node {num_gpus}, or train on CPUs with --device cpu."
        )
    return pick_device(f"cuda:{place}" if kind == "cuda" else kind)


@contextmanager
def joined(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun has started: NCCL connects GPUs, gloo CPUs. Without torchrun there is one.

    An error ends all processes. Only process 0 reports it, unless it cannot be reached.

    Args:
        device: The name of a device, as in `own_device`.

    Returns:
        A context with the processes, to be given to a `Learner`.

    Example:
        >>> with joined("cpu") as processes:
        ...     processes.number
        1
    """
    if not several():
        yield ALONE
        return
    kind = own_device(device).type
    try:
        store, rank, number = _met(f"ccfa-{next(_joined)}")
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=number, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ResourceError(
            f"The processes could not be connected: {str(error).rstrip('.')}. Check how torchrun was called."
        ) from error
    processes = Processes(rank, number, store)
    try:
        yield processes
    except BaseException as error:
        processes.leave(error)
        raise
    processes.leave(None)


def _met(prefix: str) -> tuple[Any, int, int]:
    """The store, the number of this process and how many there are, once every process has come."""
    limit = time.monotonic() + MEETING.total_seconds()
    while True:
        store, rank, number = next(rendezvous("env://", timeout=MEETING))
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)
        try:
            _meet(store, rank, number)
            return store, rank, number
        except dist.DistNetworkError:  # process 0 was just closing the store of its last run
            if time.monotonic() >= limit:
                raise
            time.sleep(0.05)


def _meet(store: Any, rank: int, number: int) -> None:
    """Wait for every process. Connecting them would wait as long as for one that hangs."""
    keys = [f"process {rank}" for rank in range(number)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, MEETING)
    except dist.DistStoreError as error:
        missing = ", ".join(key.removeprefix("process ") for key in keys if not store.check([key]))
        raise RuntimeError(f"of {number}, number {missing} did not start within {MEETING}") from error


def require_shareable(method: Method) -> None:
    """Refuse a method that several processes cannot train."""
    if isinstance(method.image_augmentation, ManifoldMixup):
        raise UsageError(
            "Manifold Mixup mixes feature maps of images that other processes hold. Use one process, or --mix mixup."
        )


class WholeMaps(tuple[Tensor, ...]):
    """The maps of all processes, gathered when they are read: few terms read them, and they are large."""

    gather: Callable[[], tuple[Tensor, ...]]

    def __new__(cls, gather: Callable[[], tuple[Tensor, ...]]) -> "WholeMaps":
        maps = super().__new__(cls)
        maps.gather = functools.cache(gather)
        return maps

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.gather())

    def __getitem__(self, index: Any) -> Any:
        return self.gather()[index]

    def __len__(self) -> int:
        return len(self.gather())


def applied(function: Any, *arguments: Any) -> Tensor:
    """The result of an autograd function, with a type."""
    result: Tensor = function.apply(*arguments)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, num_rows: int, processes: Processes) -> Tensor:
        ctx.rows, ctx.number = processes.own(num_rows), processes.number
        whole = own.new_zeros(num_rows, *own.shape[1:])
        whole[ctx.rows] = own
        return processes.sum(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.number * gradient[ctx.rows], None, None


class _MeanOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, share: float, processes: Processes) -> Tensor:
        ctx.factor = processes.number * share
        return processes.sum(own * share if share else torch.zeros_like(own))  # the mean of no rows is not a number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.factor * gradient, None, None
