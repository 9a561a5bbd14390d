import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa

SOURCE = Path(ccfa.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def names(paths):
    return [str(path.relative_to(SOURCE)) for path in paths]


def test_there_is_one_backward():
    calls = [path for path in FILES for _ in re.findall(r"\.backward\(", path.read_text(encoding="utf-8"))]
    assert names(calls) == ["learning/loop.py"]


KNOWS_CUDA = re.compile(
    r"is_cuda|(?:torch|backends)\.cuda|import cuda|\.cuda\(|autocast|cuda\.graph|CUDAGraph|Stream\(|\btriton\b"
)


def test_only_kernels_and_acceleration_know_cuda():
    """Comparisons such as `device.type == "cuda"` choose a device or a folder, and are allowed everywhere."""
    found = names(path for path in FILES if KNOWS_CUDA.search(path.read_text(encoding="utf-8")))
    outside = [name for name in found if not name.startswith("kernels/")]
    assert outside == [
        "learning/acceleration.py",
        "reporting/doctor.py",  # lists the GPUs of the machine
    ]


@pytest.mark.parametrize(
    "text",
    [
        "if x.is_cuda:",
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "x.cuda()",
        'with torch.autocast("cuda"):',
        "torch.is_autocast_enabled()",
        "with cuda.graph(g):",
        "Stream(device)",
        "import triton.language as tl",
        'find_spec("triton")',
        "torch.backends.cuda.matmul.allow_tf32 = True",
    ],
)
def test_the_search_for_cuda_finds(text):
    assert KNOWS_CUDA.search(text)


@pytest.mark.parametrize("package", ["methods", "learning"])
def test_no_method_and_not_the_learner_name_the_augmentation(package):
    for path in (SOURCE / package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = re.search(r"\bCCFA\b|ccfa\.py|cross_class", text)
        assert not named, f"{path.relative_to(SOURCE)} names CCFA"


def test_there_is_no_drawer_for_odds_and_ends():
    assert [name for name in names(FILES) if re.search(r"(utils?|helpers?|misc|common)\.py$", name)] == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("ccfa", ["torch", "numpy", "sklearn", "PIL", "rich"]),
        ("ccfa.cli", ["torch", "numpy", "sklearn", "PIL"]),
        ("ccfa.errors", ["torch", "numpy", "sklearn", "PIL", "rich"]),
        ("ccfa.evaluation", ["torch", "sklearn", "PIL", "rich"]),
        ("ccfa.data", ["sklearn", "PIL", "rich", "tyro"]),
        ("ccfa.learning", ["sklearn", "rich", "tyro"]),
    ],
)
def test_importing_is_cheap(module, unwanted):
    program = f"import sys, {module}; print(*sorted(set({unwanted}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_every_public_name_of_the_package_is_there():
    for name in ccfa.__all__:
        assert getattr(ccfa, name)
    with pytest.raises(AttributeError, match="no attribute 'Podnet'"):
        _ = ccfa.Podnet


def with_examples():
    for path in FILES:
        if ">>> " in path.read_text(encoding="utf-8"):
            yield ".".join(("ccfa", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("module", [*with_examples()])
def test_examples_in_docstrings_run(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed
