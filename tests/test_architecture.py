"""Rules of the source that import-linter cannot state, and the public names."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa
from ccfa.options import meanings

SOURCE = Path(ccfa.__file__).parent
TEXTS = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def test_there_is_one_backward():
    assert [name for name, text in TEXTS.items() for _ in re.findall(r"\.backward\(", text)] == ["learning/loop.py"]


KNOWS_CUDA = re.compile(
    r"is_cuda|(?:torch|backends)\.cuda|import cuda|\.cuda\(|autocast|cuda\.graph|CUDAGraph|Stream\(|\btriton\b"
)


def test_only_kernels_and_acceleration_know_cuda():
    """Comparisons such as `device.type == "cuda"` choose a device or a folder, and are allowed everywhere."""
    outside = [name for name, text in TEXTS.items() if KNOWS_CUDA.search(text) and not name.startswith("kernels/")]
    assert outside == [
        "learning/acceleration.py",
        "reporting/inventory.py",  # lists the GPUs of the machine
    ]


def test_no_method_and_not_the_learner_name_ccfa():
    inner = [name for name in TEXTS if name.startswith(("methods/", "learning/"))]
    code = {name: re.sub(r'""".*?"""', "", TEXTS[name], flags=re.DOTALL) for name in inner}  # docstrings may show it
    assert [name for name in inner if re.search(r"\bCCFA\b|ccfa\.py|cross_class", code[name])] == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("ccfa", ["torch", "numpy", "sklearn", "PIL", "rich"]),
        ("ccfa.evaluation", ["torch", "sklearn", "PIL", "rich"]),
        ("ccfa.learning", ["sklearn", "PIL", "rich", "tyro", "timm"]),
    ],
)
def test_importing_is_cheap(module, unwanted):
    program = f"import sys, {module}; print(*sorted(set({unwanted}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_help_needs_nothing_large():
    program = (
        "import sys; from ccfa import cli; sys.argv[1:] = ['--help']\n"
        "try: cli.main()\n"
        "finally: print(*{'torch', 'numpy', 'sklearn', 'PIL'} & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "doctor" in result.stdout
    assert result.stderr.split() == []


def test_public_names_exist():
    assert all(getattr(ccfa, name) for name in ccfa.__all__)
    assert set(dir(ccfa)) == {*ccfa.__all__, "__version__"}
    with pytest.raises(AttributeError, match="Podnet"):
        _ = ccfa.Podnet


# A protocol has no parameters, and a model is made by `load_model` or `learn`.
@pytest.mark.parametrize("name", sorted(set(ccfa.__all__) - {"FeatureAugmentation", "METHODS", "Model", "Observer"}))
def test_public_names_explain_their_parameters(name):
    public = getattr(ccfa, name)
    assert set(inspect.signature(public).parameters) <= set(meanings(public))
