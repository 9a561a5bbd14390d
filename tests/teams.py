"""Several processes for one run, as torchrun starts them, without the time that torchrun takes to start."""

import os
import socket
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from ccfa.errors import CcfaError
from ccfa.learning.processes import Processes, joined
from children import started, wait


def torchrun_variables(rank: int, number: int, port: int) -> dict[str, str]:
    """What torchrun tells each of its processes."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def in_processes(function: Callable[[], Any], number: int = 2) -> list[tuple[int, Any]]:
    """The exit code of each of several children, and what the function has returned or raised there."""
    port, children = free_port(), []
    for rank in range(number):
        reading, writing = Pipe(duplex=False)

        def child(rank: int = rank, writing: Any = writing) -> None:
            os.environ.update(torchrun_variables(rank, number, port))
            try:
                writing.send(function())
            except CcfaError as error:
                writing.send(error)
                raise

        children.append((started(child), reading))
        writing.close()
    found = [_received(reading) for _, reading in children]  # before the children end: a pipe holds little
    return [(wait(process), value) for (process, _), value in zip(children, found, strict=True)]


def _received(reading: Any, timeout: float = 120) -> Any:
    try:
        return reading.recv() if reading.poll(timeout) else None
    except EOFError:
        return None


def together(function: Callable[[Processes], Any], number: int = 2) -> list[Any]:
    """What a function of the joined processes returns in each of them."""

    def child() -> Any:
        with joined("cpu") as processes:
            return function(processes)

    found = in_processes(child, number)
    assert [code for code, _ in found] == [0] * number, found
    return [value for _, value in found]
