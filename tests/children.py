"""Functions run in a forked child, where limits, signals and changes of user hurt nobody else."""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from ccfa.errors import CcfaError


def in_child(function: Callable[[], Any], timeout: float = 120) -> Any:
    """What the function returns or raises, called in a child of this process."""
    reading, writing = Pipe(duplex=False)

    def answer() -> None:
        try:
            writing.send((function(), None))
        except BaseException as error:
            traceback.print_exc()
            writing.send((None, error))

    process = started(answer)
    writing.close()
    try:
        value, error = reading.recv() if reading.poll(timeout) else (None, None)
    except EOFError:
        raise AssertionError(f"the child ended with {wait(process)} and no answer") from None
    wait(process, timeout=10)
    if error:
        raise error
    return value


def started(function: Callable[[], Any]) -> int:
    """A child that runs the function as the command line would: its process number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        function()
        code = 0
    except CcfaError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as ended:
        code = int(ended.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(process: int, timeout: float = 120) -> int:
    """The exit code of a child, negative for the signal that killed it; one that hangs is killed."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError(f"the child was still running after {timeout} s")


def limit_memory(num_bytes: int) -> None:
    """Allow this process so many bytes more than it has mapped now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, mapped + num_bytes))
