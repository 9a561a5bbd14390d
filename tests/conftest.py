"""One thread a test process: the suite runs on all cores already. And the command line without a process."""

import os
import signal
import sys
import warnings

import pytest
import torch

import cuda_on_cpu
from ccfa import cli, plugins
from ccfa.kernels import LAUNCHED
from failing import install

torch.set_num_threads(1)
os.environ["CCFA_CACHE"] = "off"  # tests decode their photos and leave the user's cache alone, in children, too


def pytest_collection_modifyitems(items):
    """The slow tests first, so that no worker is left with them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(plugins, "_loaded", {})
    for registry in plugins.Registry.every:
        monkeypatch.setattr(registry, "_added", dict(registry._added))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU, and a CPU on which the package's CUDA kernels run as if it were one."""
    LAUNCHED.clear()
    if request.param == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    if cuda_on_cpu.COMPILER is None:
        pytest.skip("there is no C++ compiler, or this is not Linux")
    cuda_on_cpu.pretend(monkeypatch)
    return torch.device("cpu")


@pytest.fixture
def fail():
    """Makes named places fail, counted from now."""
    undo = []

    def at(places):
        while undo:
            undo.pop()()
        undo.append(install(places))

    yield at
    at("")
    undo.pop()()


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """The command line in this process, so that many mistakes can be made in little time: code, output, errors."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["ccfa", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CCFA_DATA", raising=False)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    previous = signal.getsignal(signal.SIGTERM)
    yield called
    signal.signal(signal.SIGTERM, previous)
