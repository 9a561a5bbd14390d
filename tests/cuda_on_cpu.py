"""The package's CUDA kernels on a CPU: sources compiled by a C++ compiler, with cuda_on_cpu.h in place of a GPU."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import torch
from filelock import FileLock

from ccfa.kernels import cuda, graphs

COMPILER = shutil.which("c++") if sys.platform == "linux" else None  # elsewhere threads cannot take turns like this
OPTIONS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
if "libasan" in os.environ.get("LD_PRELOAD", ""):  # AddressSanitizer is there
    OPTIONS += ["-fsanitize=address", "--param=asan-stack=0"]  # threads with stacks of their own confuse it
HEADER = Path(__file__).with_suffix(".h")
FOLDER = Path(__file__).parents[1] / "build" / "kernels"
DEVICE = SimpleNamespace(multi_processor_count=6, shared_memory_per_block_optin=227 * 1024)
_order = SimpleNamespace(is_reverse=False)  # of threads, warps and blocks


@contextmanager
def in_reverse():
    """Let blocks, warps and threads take turns in the reverse order."""
    _order.is_reverse = True
    try:
        yield
    finally:
        _order.is_reverse = False


def pretend(monkeypatch):
    """Run the kernels on tensors of the CPU, as if it were a GPU with six multiprocessors."""
    replacements = {
        cuda.can_run: lambda device: not cuda.are_left_out(),
        cuda.kernel: kernel,
        graphs.lane_here: lambda device: None,
        graphs.aside: lambda name, device, compute, lane=None: graphs.Aside(compute()),
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("ccfa.")]:
        for old, new in replacements.items():
            if vars(module).get(old.__name__) is old:
                monkeypatch.setattr(module, old.__name__, new)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: DEVICE)


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel in a compiled source."""

    source: str
    name: str
    function: ctypes._CFuncPtr
    most_shared: int

    def __call__(self, grid, threads, *arguments, shared=0, early=False):
        """As `Kernel` launches it."""
        assert shared <= self.most_shared <= DEVICE.shared_memory_per_block_optin
        values = [cuda._as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (ctypes.c_size_t * len(values))(*map(ctypes.sizeof, values))
        size = (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid)))
        wrong = self.function(size, threads, shared, _order.is_reverse, pointers, sizes, len(values))
        assert not wrong, wrong.decode()
        cuda.LAUNCHED.add((self.source, self.name))


@functools.cache
def kernel(source, name, shared=0, **constants):
    """As `ccfa.kernels.cuda.kernel` finds it."""
    found = loaded(files("ccfa.kernels").joinpath(source).read_text(), name, shared, **constants)
    return replace(found, source=source)


@functools.cache
def loaded(code, name, shared=0, **constants):
    """A kernel of a source."""
    function = getattr(_library(code, tuple(sorted(constants.items()))), f"launch_{name}")
    function.restype = ctypes.c_char_p
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    function.argtypes = [pointer, unsigned, unsigned, ctypes.c_bool, pointer, pointer, unsigned]
    return EmulatedKernel("", name, function, max(shared, 48 * 1024))


@functools.cache
def _library(code, constants):
    """The compiled source, which is kept for other processes."""
    given = [f"-D{name}={value}" for name, value in constants]
    parts = [code, HEADER.read_text(), Path(__file__).read_text(), _run(["--version"]), *OPTIONS, *given]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{key[:32]}.so"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            expanded = _run(["-x", "c++", "-E", "-P", *given, "-"], without_assembly(code))
            expanded = re.sub(
                r"(?:alignas\(16\) )?extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];",
                r"static \1 *const &\2 = reinterpret_cast<\1 *const &>(emulated::shared_begin);",
                expanded,
            )
            names = re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", expanded)
            launches = "\n".join(f"LAUNCH({name})" for name in names)
            unfinished = path.with_suffix(".new")
            arguments = ["-x", "c++", *OPTIONS, "-include", str(HEADER), "-o", str(unfinished), "-"]
            _run(arguments, f"{expanded}\n{launches}\n")
            unfinished.rename(path)
    return ctypes.CDLL(str(path))


def _run(arguments, code=""):
    done = subprocess.run([COMPILER, *arguments], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_assembly(code):
    """The code with a call of `ptx_mma_sync(x, y)` in place of `asm("mma.sync {%0}, %1;" : "+f"(x) : "r"(y))`."""
    parts, at = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\(", code):
        end = _closing(code, found.end())
        parts += [code[at : found.start()], _call(code[found.end() : end])]
        at = end + 1
    return "".join([*parts, code[at:]])


def _call(assembly):
    """The call for what stands between the parentheses of `asm`."""
    instruction = re.match(r'\s*"([\w.]*)', assembly)[1].replace(".", "_")
    if not instruction:
        return "(void)0"
    starts = [found.end() for found in re.finditer(r'"[=+&]*[a-z]" ?\(', assembly)]
    operands = [assembly[start : _closing(assembly, start)] for start in starts]
    numbers = list(dict.fromkeys(re.findall(r"%(\d+)", assembly.partition(":")[0])))
    assert numbers == [str(number) for number in range(len(operands))], f"operands in another order: {assembly}"
    return f"ptx_{instruction}({', '.join(operands)})"


def _closing(code, start):
    """Where the parenthesis that was opened before `start` is closed."""
    depth = 1
    for place in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if not depth:
            return place
    raise ValueError("a parenthesis is not closed")
