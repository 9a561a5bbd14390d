"""What this machine has, and what to do about what is missing."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ccfa
from ccfa.data import DATASETS

PACKAGES = ("numpy", "scikit-learn", "safetensors", "tyro", "rich", "pillow", "jinja2")


def findings(data_dir: Path | None) -> Iterator[str]:
    """Versions, devices, data and disk space, one line for each."""
    yield f"ccfa {ccfa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: missing. Try: pip install {package}"
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        yield f"GPU: none found (torch is {build}); runs use the CPU. See 'PyTorch for your machine' in the README."
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    where = data_dir or os.environ.get("CCFA_DATA")
    looked = f"not in {where}" if where else "no --data-dir and no $CCFA_DATA"
    for name, data in DATASETS.items():
        found = data.find(data_dir) if data.find else None
        missing = f"{looked}. " if data.find else ""
        yield f"{name}: {found or missing + data.description}"
    yield f"disk: {shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free here"
