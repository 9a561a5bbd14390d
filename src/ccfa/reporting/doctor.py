"""What this machine has, and what to do about what is missing."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ccfa
from ccfa.data import find_cifar100

PACKAGES = ("numpy", "scikit-learn", "safetensors", "tyro", "rich", "pillow", "jinja2")


def findings(data_dir: Path | None) -> Iterator[str]:
    """One line for each thing looked at."""
    yield f"ccfa {ccfa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: missing. Try: pip install {package}"
    yield from _devices()
    yield from _data(data_dir)
    free = shutil.disk_usage(Path.cwd()).free
    yield f"disk: {free / 1e9:.1f} GB free here"


def _devices() -> Iterator[str]:
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        yield f"GPU: none found (torch is {build}); runs use the CPU. See 'PyTorch for your machine' in docs/usage.md."
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _data(data_dir: Path | None) -> Iterator[str]:
    from PIL import features

    yield "digits: comes with scikit-learn"
    yield "glyphs: drawn by Pillow" if features.check("freetype2") else "glyphs: need a Pillow with FreeType support"
    found = find_cifar100(data_dir)
    if found:
        yield f"cifar100: {found}"
    else:
        where = data_dir or os.environ.get("CCFA_DATA")
        looked = f"not in {where}" if where else "no --data-dir and no $CCFA_DATA"
        yield (
            f"cifar100: {looked}. Put cifar-100-binary.tar.gz or cifar-100-python.tar.gz there, unpacked or not; "
            f"with a network, ccfa run --data cifar100 --data-dir DIR downloads it."
        )
