"""Compiling and keeping CUDA sources, without a GPU."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.resources import files

import pytest
import torch

from ccfa.kernels import cuda

SOURCES = {  # with the constants that it is compiled with
    "attack.cu": ["DIM=64", "PROXIES=10", "CRITERION=1", "ROWS=5", "THREADS=512", "IN_GLOBAL=0"],
    "balanced.cu": ["PLACES=10"],
    "head_loss.cu": [
        *("DIM=64", "PROXIES=10", "CRITERION=1", "ROWS=6", "WARPS=20", "IN_GLOBAL=0", "TILE=8", "THREADS=512"),
    ],
    "pod.cu": [],
    "resnet.cu": [],
    "rows.cu": [],
    "sgd.cu": [],
    "targets.cu": [],
}


def test_every_source_is_listed():
    assert {file.name for file in files("ccfa.kernels").iterdir() if file.name.endswith(".cu")} == set(SOURCES)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", SOURCES)
def test_the_sources_compile(name, tmp_path):
    source = files("ccfa.kernels").joinpath(name)
    constants = [f"-D{constant}" for constant in SOURCES[name]]
    command = ["nvcc", "-arch=sm_90", *cuda.OPTIONS, *constants, "-ptx", "-o", tmp_path / "out.ptx", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_cpu_runs_them_and_no_gpu_that_is_not_current(monkeypatch):
    monkeypatch.setattr(cuda, "_runs_them", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    can_run = [cuda.can_run(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1")]
    assert can_run == [False, False, True]
    with cuda.kernels_left_out():
        assert not cuda.can_run(torch.device("cuda:1"))


@pytest.mark.parametrize(("setting", "left_out"), [("off", "True"), ("", "False")])
def test_an_environment_variable_leaves_them_out(setting, left_out):
    code = "from ccfa.kernels import cuda; print(cuda.are_left_out())"
    command, environment = [sys.executable, "-c", code], os.environ | {"CCFA_KERNELS": setting}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip() == left_out


def test_arguments_are_passed_as_the_kernels_declare_them():
    tensor = torch.zeros(3)
    passed = [cuda._as_c(argument) for argument in (tensor, 3, 0.5, None)]
    assert [type(argument) for argument in passed] == [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_void_p,
    ]
    assert [argument.value for argument in passed] == [tensor.data_ptr(), 3, 0.5, None]


def test_machine_code_is_kept_and_recalled(tmp_path):
    path = tmp_path / "kernels" / "one.cubin"
    assert cuda._recalled(path) is None
    cuda._keep(path, b"code")
    assert cuda._recalled(path) == b"code"
    (tmp_path / "file").write_bytes(b"")
    cuda._keep(tmp_path / "file" / "one.cubin", b"code")  # nothing can be written there


def test_a_gpu_that_nvrtc_cannot_compile_for_runs_none(monkeypatch):
    def refused(*_):
        raise cuda.CompileError("unknown architecture")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (99, 0))
    monkeypatch.setattr(cuda, "kernel", refused)
    assert not cuda._runs_them.__wrapped__(torch.device("cuda"))


class Nvrtc:
    """NVRTC that refuses every source."""

    def __getattr__(self, name):
        def call(*arguments):
            if name == "nvrtcGetProgramLogSize":
                arguments[1]._obj.value = 8
            if name == "nvrtcGetProgramLog":
                arguments[1].value = b"line 1"
            return 6 if name == "nvrtcCompileProgram" else 0

        return call


def test_a_refused_source_says_why(monkeypatch):
    monkeypatch.setattr(cuda, "_nvrtc", Nvrtc)
    with pytest.raises(cuda.CompileError, match=r"one\.cu:\nline 1"):
        cuda._compiled("code", "one.cu", ["--std=c++17"])
