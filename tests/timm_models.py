"""torchvision and timm for tests, also where the compiled part of torchvision does not fit torch."""

import importlib
from types import ModuleType

import pytest
import torch

DECLARED: list[torch.library.Library] = []  # what a library declares lasts as long as it does
MISSING = "is not installed: the extra timm"


def torchvision_or_skip() -> ModuleType:
    """The package torchvision.

    PyPI's torchvision is built for CUDA builds of torch. With a CPU build its operators are missing, and its import
    fails where it describes two of them. No test uses them, so here they are declared and the import repeated.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        DECLARED.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            DECLARED[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    module: ModuleType = pytest.importorskip("torchvision", reason=f"torchvision {MISSING}")
    return module


def timm_or_skip() -> ModuleType:
    """The package timm, which imports torchvision."""
    torchvision_or_skip()
    module: ModuleType = pytest.importorskip("timm", reason=f"timm {MISSING}")
    return module
