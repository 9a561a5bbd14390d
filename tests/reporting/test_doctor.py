from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import ccfa
from ccfa.reporting import doctor
from ccfa.reporting.doctor import PACKAGES, findings


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("CCFA_DATA", raising=False)


def test_versions_come_first():
    lines = list(findings(None))
    assert lines[0].startswith(f"ccfa {ccfa.__version__}, Python 3.")
    assert lines[1].startswith(f"torch {torch.__version__}")
    for package in PACKAGES:
        assert any(line.startswith(f"{package} ") for line in lines)


def test_a_missing_package_is_named_with_its_cure(monkeypatch):
    def version(package):
        if package == "rich":
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    assert "rich: missing. Try: pip install rich" in findings(None)


@pytest.mark.parametrize(("cuda", "said"), [(None, "a CPU build"), ("12.8", "built for CUDA 12.8")])
def test_without_a_gpu_the_reason_is_said(monkeypatch, cuda, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (line,) = [line for line in findings(None) if line.startswith("GPU")]
    assert said in line
    assert "docs/usage.md" in line


def test_every_gpu_is_listed(monkeypatch):
    gpu = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert [line for line in findings(None) if line.startswith("GPU")] == [
        "GPU 0: a card, 80 GiB",
        "GPU 1: a card, 80 GiB",
    ]


def data_line(data_dir):
    (line,) = [line for line in findings(data_dir) if line.startswith("cifar100")]
    return line


def test_missing_data_says_where_it_was_looked_for(tmp_path, monkeypatch):
    assert "no --data-dir and no $CCFA_DATA" in data_line(None)
    assert f"not in {tmp_path}" in data_line(tmp_path)
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))
    assert f"not in {tmp_path}" in data_line(None)


def test_data_found_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "find_cifar100", lambda data_dir: data_dir / "cifar-100-binary")
    assert data_line(tmp_path) == f"cifar100: {tmp_path / 'cifar-100-binary'}"


def test_free_space_is_told():
    assert list(findings(None))[-1].startswith("disk: ")
