"""Kernels in CUDA C++: compiled for this GPU by NVRTC, which torch brings along, and launched through the driver.

The machine code is kept in the folder `kernels` of the cache, so that each source is compiled once on a machine.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ccfa.data import cache_folder
from ccfa.errors import CcfaError
from ccfa.files import read_file, write_atomically
from ccfa.kernels.graphs import CAPTURE

OPTIONS = ("--std=c++17", "--use_fast_math", "--split-compile=0")  # the last: by all cores
SHARED_MEMORY_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_MEMORY_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
Argument = Tensor | int | float | ctypes.Structure | None
"""Of a kernel; None is a null pointer."""
Key = tuple[int, str, tuple[tuple[str, int], ...]]
"""Device, source, constants."""
_MODULES: dict[Key, "_Module"] = {}
LAUNCHED: set[tuple[str, str]] = set()
"""Sources and names of the kernels that were launched, or captured, in this process."""
_left_out = os.environ.get("CCFA_KERNELS", "").lower() in ("off", "0", "false")  # all kernels, of the whole process


class CompileError(RuntimeError):
    """NVRTC is missing or refuses a source."""


class _Attribute(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class Kernel:
    """A function of a loaded module."""

    source: str
    name: str
    function: ctypes.c_void_p
    context: ctypes.c_void_p  # of its device
    can_start_early: bool

    def __call__(
        self, grid: Sequence[int], threads: int, *arguments: Argument, shared: int = 0, early: bool = False
    ) -> None:
        """Launch on the current stream. Tensors are passed as pointers, whole numbers as int, others as float.

        Args:
            grid: The number of blocks in each direction.
            threads: The number of threads of a block.
            arguments: Those of the kernel.
            shared: Bytes of dynamic shared memory of a block.
            early: Whether it may start before the kernel launched before it has ended. It must wait for that itself,
                with `griddepcontrol.wait`. GPUs before Hopper ignore this.
        """
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(EARLY_START, 0, (1,))
        launch = _Launch(
            (*grid, *(1,) * (3 - len(grid))),
            (threads, 1, 1),
            shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            early and self.can_start_early,
        )
        LAUNCHED.add((self.source, self.name))
        _check(_driver().cuCtxSetCurrent(self.context))  # a thread that has not used the device yet has none
        _check(_driver().cuLaunchKernelEx(ctypes.byref(launch), self.function, pointers, None))


def _as_c(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Structure:
    if isinstance(argument, ctypes.Structure):
        return argument
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Let torch compute everything, in all threads, as on a GPU that runs no kernels."""
    global _left_out
    before, _left_out = _left_out, True
    try:
        yield
    finally:
        _left_out = before


def are_left_out() -> bool:
    """Whether `kernels_left_out` is in force, or the process was started with CCFA_KERNELS=off."""
    return _left_out


def can_run(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of a device: the current one, if it is a GPU that runs them."""
    if _left_out or device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return _runs_them(device)


@functools.cache
def _runs_them(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's with bfloat16 tensor cores, and there is NVRTC to compile for it."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        kernel("rows.cu", "normalise")  # the smallest
    except CompileError:
        return False
    return True


def shared_memory(device: torch.device) -> int:
    """The most shared memory, in bytes, that a block can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined,no-any-return]


def kernel(source: str, name: str, shared: int = 0, **constants: int) -> Kernel:
    """A kernel of a source in this folder, on the current device.

    Args:
        source: The name of the file.
        name: The name of the kernel, declared `extern "C"`.
        shared: The most dynamic shared memory, in bytes, that it will be launched with.
        constants: Macros that the source reads.
    """
    return _kernel(torch.cuda.current_device(), source, name, shared, tuple(sorted(constants.items())))


@functools.cache
def _kernel(device: int, source: str, name: str, shared: int, constants: tuple[tuple[str, int], ...]) -> Kernel:
    key = device, source, constants
    if key not in _MODULES:
        with CAPTURE:  # loading may wait for the device; in backward's thread a module is there already
            if key not in _MODULES:
                _MODULES[key] = _loaded(device, source, constants)
    module, function = _MODULES[key], ctypes.c_void_p()
    _check(_driver().cuCtxSetCurrent(module.context))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module.handle, name.encode()))
    # Kernels that divide a multiprocessor's memory in different ways cannot run on it together.
    _check(_driver().cuFuncSetAttribute(function, SHARED_MEMORY_SHARE, 100))
    if shared > 48 * 1024:
        _check(_driver().cuFuncSetAttribute(function, SHARED_MEMORY_LIMIT, shared))
    return Kernel(source, name, function, module.context, torch.cuda.get_device_capability(device) >= (9, 0))


class _Module(NamedTuple):
    handle: ctypes.c_void_p
    context: ctypes.c_void_p  # of its device


def _loaded(device: int, source: str, constants: tuple[tuple[str, int], ...]) -> _Module:
    major, minor = torch.cuda.get_device_capability(device)
    code = files("ccfa.kernels").joinpath(source).read_text()
    options = [f"--gpu-architecture=sm_{major}{minor}", *OPTIONS, *(f"-D{key}={value}" for key, value in constants)]
    key = hashlib.sha256("\0".join([code, *options, str(torch.version.cuda)]).encode()).hexdigest()
    folder = cache_folder()
    stored = folder / "kernels" / f"{Path(source).stem}-{key}.cubin" if folder else None
    torch.cuda.current_stream(device).query()  # makes this thread use the device
    module, context = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    known = _recalled(stored) if stored else None
    if known is None or _driver().cuModuleLoadData(ctypes.byref(module), known):  # it is not there, or damaged
        binary = _compiled(code, source, options)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        if stored:
            _keep(stored, binary)
    return _Module(module, context)


def _recalled(path: Path) -> bytes | None:
    with suppress(CcfaError):
        return read_file(path)
    return None


def _keep(path: Path, binary: bytes) -> None:
    """Where it cannot be written, the next process compiles again."""
    with suppress(CcfaError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, binary)


def _compiled(code: str, name: str, options: Sequence[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name.encode(), 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed, size = nvrtc.nvrtcCompileProgram(program, len(options), given), ctypes.c_size_t()
    kind = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, result)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise CompileError(f"NVRTC refuses {name}:\n{result.value.decode()}")
    return result.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    release = (torch.version.cuda or "").split(".")[0]
    for name in (f"libnvrtc.so.{release}", "libnvrtc.so", f"nvrtc64_{release}0_0.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("There is no NVRTC, which comes with torch's CUDA builds.")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
