from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import ccfa
from ccfa.reporting import doctor
from ccfa.reporting.doctor import PACKAGES, findings


@pytest.fixture
def found(monkeypatch):
    """The lines about one thing, on a machine without data."""
    monkeypatch.delenv("CCFA_DATA", raising=False)
    return lambda name, data_dir=None: [line for line in findings(data_dir) if line.startswith(name)]


def test_versions_are_listed(found, monkeypatch):
    assert ccfa.__version__ in found("ccfa")[0]
    assert torch.__version__ in found("torch")[0]
    assert all(found(package) for package in (*PACKAGES, "disk"))

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", version)
    assert "pip install rich" in found("rich")[0]


@pytest.mark.parametrize(("cuda", "said"), [(None, "CPU build"), ("12.8", "12.8")])
def test_missing_gpu_has_its_reason(found, monkeypatch, cuda, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (line,) = found("GPU")
    assert said in line


def test_every_gpu_is_listed(found, monkeypatch):
    gpu = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert found("GPU") == ["GPU 0: a card, 80 GiB", "GPU 1: a card, 80 GiB"]


def test_data_are_looked_for(found, tmp_path, monkeypatch):
    assert "--data-dir" in found("cifar100")[0]
    assert str(tmp_path) in found("cifar100", tmp_path)[0]
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))
    assert str(tmp_path) in found("cifar100")[0]
    (tmp_path / "cifar-100-binary").mkdir()
    assert found("cifar100", tmp_path) == [f"cifar100: {tmp_path / 'cifar-100-binary'}"]
